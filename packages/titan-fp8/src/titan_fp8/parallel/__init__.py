"""Float8 over ranks.

- `tensor`: tensor parallelism on plain tensors, gathering activations in float8.
- `styles`: the same as styles for torch's ``parallelize_module``.
- `fsdp`: weights that FSDP2 gathers in float8.
"""
