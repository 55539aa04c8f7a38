"""Triton kernels, each the twin of a function in `titan_fp8.reference`, with the same signature."""
