"""CUDA C++ kernels: sources as package data, compiled on first use by NVRTC (no nvcc, no ABI to match), then cached."""
