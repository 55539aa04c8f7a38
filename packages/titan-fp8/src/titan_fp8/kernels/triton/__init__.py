"""Triton kernels: casts, fused casts and grouped products, each equal to its reference bit for bit.

- `round`: rounding to float8 and scales, shared by all.
- `tensor`, `row`, `block`, `mx`, `weights`: casts by granularity.
- `fused`: RMSNorm and SwiGLU that end in a cast.
- `grouped_cast`, `grouped_mm`: experts.
"""
