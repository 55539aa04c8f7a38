"""Layers that carry a state from token to token: linear attention over ranks. In reading order:

- `linear`: the public function; `reference`: the same token by token, in float64.
- `pieces`: how documents are cut over ranks, and the order in which their pieces follow each other.
- `local`: the same on whole rows of one device, without a plan.
- `chunks`: a rank's tokens a chunk at a time; `scan`: the states between ranks.
- `kernels`: those of another package, where they are installed and equal.
- `convolution`: the short causal convolution in front, whose first tokens need a few of another rank.
- `costs`: bytes and steps, and a plan in words.
"""
