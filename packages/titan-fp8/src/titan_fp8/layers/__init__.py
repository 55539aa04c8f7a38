"""Matrix products under autograd.

- `functional`: `linear`, `linears` and `linear_deferred`.
- `fused`: RMSNorm and SwiGLU before linears, with the cast in one kernel.
- `accumulate`: weight gradients added to float32 buffers.
- `eager`: the kernels of a recipe on a device, looked up once.
- `linear`: `Float8Linear`, an ``nn.Linear`` that calls them.
- `grouped`: one product per expert.
"""
