"""float8 training for any PyTorch model: casts, products, layers and a converter.

Start with `convert_to_float8` on a model, or `linear`, `linears` and `grouped_mm` in one of your own. Under FSDP2 add
`apply_float8_all_gather` before ``fully_shard`` and `sync_scales` after each optimizer step; under tensor parallelism
use `all_gather_linears` and `linear_reduce_scatter`. `stats` says what float8 costs, `backends` which kernels run.
"""

from titan_fp8._convert import DEFAULT_SKIP, convert_to_float8
from titan_fp8._export import export_hf_fp8
from titan_fp8._fsdp import apply_float8_all_gather, sync_scales
from titan_fp8._functional import linear, linear_deferred, linears
from titan_fp8._grouped import Float8GroupedExpertsMixin, Float8GroupedMM, grouped_mm, grouped_mm_deferred
from titan_fp8._linear import Float8Linear
from titan_fp8._parallel_styles import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8Input
from titan_fp8._precast import precast_weights
from titan_fp8._products import (
    QTensor,
    cast,
    cast_grad,
    cast_input,
    cast_weight,
    forward_product,
    input_gradient,
    scaled_mm,
    weight_gradient,
)
from titan_fp8._recipe import RECIPES, Recipe, Scaling
from titan_fp8._report import ConvertedLayer, Report
from titan_fp8._roofline import H200, Hardware, predict_speedup
from titan_fp8._stats import TensorStats, record_stats, stats, tensor_stats
from titan_fp8._tensor_parallel import all_gather_float8, all_gather_linears, linear_reduce_scatter
from titan_fp8._weight_cache import WeightCache
from titan_fp8.backends import backends

__all__ = [
    "DEFAULT_SKIP",
    "H200",
    "RECIPES",
    "ConvertedLayer",
    "Float8ColwiseParallel",
    "Float8GroupedExpertsMixin",
    "Float8GroupedMM",
    "Float8Linear",
    "Float8RowwiseParallel",
    "Hardware",
    "PrepareFloat8Input",
    "QTensor",
    "Recipe",
    "Report",
    "Scaling",
    "TensorStats",
    "WeightCache",
    "all_gather_float8",
    "all_gather_linears",
    "apply_float8_all_gather",
    "backends",
    "cast",
    "cast_grad",
    "cast_input",
    "cast_weight",
    "convert_to_float8",
    "export_hf_fp8",
    "forward_product",
    "grouped_mm",
    "grouped_mm_deferred",
    "input_gradient",
    "linear",
    "linear_deferred",
    "linear_reduce_scatter",
    "linears",
    "precast_weights",
    "predict_speedup",
    "record_stats",
    "scaled_mm",
    "stats",
    "sync_scales",
    "tensor_stats",
    "weight_gradient",
]
