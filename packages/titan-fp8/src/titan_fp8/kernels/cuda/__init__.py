"""CUDA C++ kernels, compiled by NVRTC when first used.

- `compile`: source to binary.
- `launch`: binary to torch's stream.
"""
