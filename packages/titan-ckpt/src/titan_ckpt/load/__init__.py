"""Read a step, check it, and fill a state of any layout from it.

`reader`: open a step and check its blocks; no torch. `copies`: which stored bytes fill which tensor, and which rank
checks which block. `restore`: one restore, as each rank makes it. `fallback`: which step a restore takes. `compare`:
whether two stored tensors are equal, bit by bit.
"""
