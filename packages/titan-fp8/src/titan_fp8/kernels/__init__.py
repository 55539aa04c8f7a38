"""Kernels for CUDA devices. `titan_fp8.dispatch` chooses between them and the reference.

- `triton`: casts and grouped products.
- `cuda`: the CUDA C++ kernel, compiled when it is first used.
- `products`: dense products by cuBLASLt through torch.
"""
