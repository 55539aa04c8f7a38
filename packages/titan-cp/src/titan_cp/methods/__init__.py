"""The ways to compute attention over ranks. `attention` follows the plan; the others are its methods.

- `ring`: keys travel, point to point; `allgather`: keys of all ranks, a few heads at a time.
- `ulysses`: an all-to-all gives each rank whole heads; `attention` also joins it with the ring (USP).
- `reference`: full attention in float64, which every method is compared with.
- `compiling`: the graph break that keeps collectives out of compiled code.
"""
