"""Matrix products under autograd.

- `functional`: `linear`, `linears` and `linear_deferred`.
- `fused`: RMSNorm and SwiGLU before linears, with the cast in one kernel.
- `accumulate`: weight gradients added to float32 buffers.
- `linear`: `Float8Linear`, an ``nn.Linear`` that calls them.
- `grouped`: one product per expert.
"""
