"""float8 training for any PyTorch model: casts, products, layers and a converter."""

from titan_fp8._convert import DEFAULT_SKIP, convert_to_float8
from titan_fp8._fsdp import apply_float8_all_gather, sync_scales
from titan_fp8._functional import linear, linear_deferred, linears
from titan_fp8._linear import Float8Linear
from titan_fp8._products import QTensor, cast, scaled_mm
from titan_fp8._recipe import RECIPES, Recipe, Scaling
from titan_fp8._report import ConvertedLayer, Report
from titan_fp8._roofline import H200, Hardware, predict_speedup
from titan_fp8._tensor_parallel import all_gather_float8, all_gather_linears, linear_reduce_scatter
from titan_fp8._weight_cache import WeightCache

__all__ = [
    "DEFAULT_SKIP",
    "H200",
    "RECIPES",
    "ConvertedLayer",
    "Float8Linear",
    "Hardware",
    "QTensor",
    "Recipe",
    "Report",
    "Scaling",
    "WeightCache",
    "all_gather_float8",
    "all_gather_linears",
    "apply_float8_all_gather",
    "cast",
    "convert_to_float8",
    "linear",
    "linear_deferred",
    "linear_reduce_scatter",
    "linears",
    "predict_speedup",
    "scaled_mm",
    "sync_scales",
]
