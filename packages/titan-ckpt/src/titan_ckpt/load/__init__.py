"""Read and check a step, and fill a state of any layout from it.

`reader`: open a step and check its blocks, without torch. `copies`: which stored bytes fill which tensor, and which rank
checks which block. `restore`: which step a restore takes, and how it fills the state.
"""
