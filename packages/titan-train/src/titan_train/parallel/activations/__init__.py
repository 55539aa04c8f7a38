"""What forward keeps for backward, and where.

- `recompute`: activation checkpointing: what backward computes again. `apply_activation_checkpointing` applies both.
- `tiles`: feed-forwards a part of the sequence at a time.
- `offload`: what waits in host memory, copied beside the computation.
"""
