"""Triton kernels: casts, fused casts and grouped products, each equal to its reference bit for bit.

- `launch`: the launch of a kernel, bound once.
- `round`: rounding to float8 and scales, shared by all.
- `tensor`, `row`, `block`, `mx`, `weights`: casts by granularity.
- `transpose`: codes by columns, from codes by rows.
- `elementwise`: RMSNorm and SwiGLU without a cast.
- `rotation`: rotary positions.
- `cross_entropy`: sums and gradients of logits.
- `fused`: RMSNorm and SwiGLU that end in a cast.
- `group_tiles`, `grouped_cast`, `grouped_mm`: experts.
- `grouped_mm_hopper`: products of experts on an H100 or H200.
"""
