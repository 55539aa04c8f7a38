"""float8 training for any PyTorch model: casts, products, layers and a converter.

Start with `convert_to_float8` on a model, or `linear`, `linears` and `grouped_mm` in one of your own. `ConstantWeights`
around the forwards and backwards of a step casts each weight once. Under FSDP2 add `apply_float8_all_gather` before
``fully_shard``; under tensor parallelism use `all_gather_linears` and `linear_reduce_scatter`. `stats` says what float8
costs, `backends` which kernels run.
"""

from typing import TYPE_CHECKING, Any

from titan_fp8.convert.convert import DEFAULT_SKIP, convert_to_float8
from titan_fp8.convert.patterns import matching_pattern
from titan_fp8.convert.report import ConversionReport, ConvertedLayer
from titan_fp8.convert.roofline import H200, Hardware, predict_speedup
from titan_fp8.dispatch import backends
from titan_fp8.export import export_hf_fp8
from titan_fp8.layers.functional import linear, linear_deferred, linears
from titan_fp8.layers.fused import norm_linears, rms_norm, swiglu, swiglu_linear
from titan_fp8.layers.grouped import Float8GroupedExpertsMixin, Float8GroupedMM, grouped_mm, grouped_mm_deferred
from titan_fp8.layers.layer_norm import gelu, gelu_linear, layer_norm, layer_norm_linears
from titan_fp8.layers.linear import Float8Linear
from titan_fp8.lifetime import ConstantWeights
from titan_fp8.main_grad import MainGradients
from titan_fp8.parallel.fsdp import apply_float8_all_gather
from titan_fp8.parallel.tensor import all_gather_float8, all_gather_linears, linear_reduce_scatter
from titan_fp8.products import (
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
from titan_fp8.recipe import RECIPES, Recipe, Scaling
from titan_fp8.statistics import TensorStats, record_stats, stats, tensor_stats
from titan_fp8.weights.cache import WeightCache

if TYPE_CHECKING:
    from titan_fp8.kernels.triton.cross_entropy import softmax_gradient_, softmax_sums
    from titan_fp8.kernels.triton.rotation import rotate
    from titan_fp8.parallel.styles import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8Input

__all__ = [
    "DEFAULT_SKIP",
    "H200",
    "RECIPES",
    "ConstantWeights",
    "ConversionReport",
    "ConvertedLayer",
    "Float8ColwiseParallel",
    "Float8GroupedExpertsMixin",
    "Float8GroupedMM",
    "Float8Linear",
    "Float8RowwiseParallel",
    "Hardware",
    "MainGradients",
    "PrepareFloat8Input",
    "QTensor",
    "Recipe",
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
    "gelu",
    "gelu_linear",
    "grouped_mm",
    "grouped_mm_deferred",
    "input_gradient",
    "layer_norm",
    "layer_norm_linears",
    "linear",
    "linear_deferred",
    "linear_reduce_scatter",
    "linears",
    "matching_pattern",
    "norm_linears",
    "predict_speedup",
    "record_stats",
    "rms_norm",
    "rotate",
    "scaled_mm",
    "softmax_gradient_",
    "softmax_sums",
    "stats",
    "swiglu",
    "swiglu_linear",
    "tensor_stats",
    "weight_gradient",
]


def __getattr__(name: str) -> Any:
    # These derive from torch's styles, whose import takes most of a second of CPU.
    if name in ("Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8Input"):
        from titan_fp8.parallel import styles

        return getattr(styles, name)
    if name == "rotate":  # Triton waits for a device
        from titan_fp8.kernels.triton.rotation import rotate

        return rotate
    if name in ("softmax_gradient_", "softmax_sums"):
        from titan_fp8.kernels.triton import cross_entropy

        return getattr(cross_entropy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
