"""Tensor parallelism with sequence parallelism, from one declarative table per model.

- `styles`: find a model's table of styles, and read it. Families write it in `titan_train.models.common.tensor_styles`.
- `plan`, `checks`: what each rank holds, and what is refused, before any rank starts.
- `apply`: cuts the parameters (`cutting`) and puts hooks (`boundaries`) with the `collectives` around them.
- `async_matmul`, `async_linears`: the same with the transfers behind the matrix products.
- `float8_linears`: gathers that send float8.
- `micro_pipeline`: the compiler's own overlap, on GPUs.
- `loss`: cross-entropy on logits cut along the vocabulary.
"""

from titan_train.models.common.tensor_styles import Style, StyleTable
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.async_linears import overlapped_modules
from titan_train.parallel.tensor.async_matmul import all_gather_matmul, matmul_reduce_scatter
from titan_train.parallel.tensor.checks import check_tensor_parallel
from titan_train.parallel.tensor.float8_linears import float8_gathering_modules
from titan_train.parallel.tensor.loss import vocab_parallel_cross_entropy_sum
from titan_train.parallel.tensor.micro_pipeline import FusedProducts, can_micro_pipeline, micro_pipeline_options
from titan_train.parallel.tensor.styles import merge_tables, table_for

__all__ = [
    "FusedProducts",
    "Style",
    "StyleTable",
    "all_gather_matmul",
    "apply_tensor_parallel",
    "can_micro_pipeline",
    "check_tensor_parallel",
    "float8_gathering_modules",
    "matmul_reduce_scatter",
    "merge_tables",
    "micro_pipeline_options",
    "overlapped_modules",
    "table_for",
    "vocab_parallel_cross_entropy_sum",
]
