"""Tensor parallelism with sequence parallelism, from one declarative table per model.

- `styles`: find a model's table of styles, and read it. Families write it in `titan_train.models.common.tensor_styles`.
- `plan`, `checks`: what each rank holds, and what is refused, before any rank starts.
- `apply`: cuts the parameters (`cutting`) and puts hooks (`boundaries`) with the `collectives` around them.
- `async_matmul`, `async_linears`: the same with the transfers behind the matrix products.
- `float8_linears`: gathers that send float8.
- `micro_pipeline`: the compiler's own overlap, on GPUs.
- `loss`: cross-entropy on logits cut along the vocabulary.
"""
