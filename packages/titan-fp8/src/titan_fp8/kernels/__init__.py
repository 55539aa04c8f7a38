"""Device kernels. Nothing here is imported before an op that uses it is called on a CUDA device."""
