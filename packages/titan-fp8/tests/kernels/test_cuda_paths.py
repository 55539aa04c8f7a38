"""Lines that only a CUDA device reaches, run on fake CUDA tensors: shapes, strides, dtypes and torch's own checks of operands."""

import pytest
import titan_fp8
import torch
import torch.nn.functional as F
from titan_fp8 import Recipe, cast_grad, cast_input, cast_weight, dispatch, ops, reference
from titan_fp8.dispatch import backends, implementation
from titan_fp8.kernels.products import add_scaled_mm_cublaslt, scaled_mm_bf16, scaled_mm_cublaslt
from torch._subclasses import FakeTensorMode

RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8"]
SHAPES = [(256, 384, 512), (7, 50, 33), (1, 16, 16)]


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


def operands(recipe, m, k, n):
    """Those of the three products: forward, input gradient, weight gradient."""
    x, w, g = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (n, k), (m, n)))
    xq, wq, gq = cast_input(x, recipe), cast_weight(w, recipe), cast_grad(g, recipe)
    return (
        ((xq.data, xq.scale, wq.data, wq.scale), recipe.x.gran, recipe.w.gran),
        ((gq.data, gq.scale, wq.data_t, wq.scale_t), recipe.g.gran, recipe.w.gran),
        ((gq.data_t, gq.scale_t, xq.data_t, xq.scale_t), recipe.g.gran, recipe.x.gran),
    )


@pytest.mark.parametrize("product", [scaled_mm_cublaslt, scaled_mm_bf16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_take_what_casts_make(fake, product, shape, recipe):
    for (a, scale_a, b, scale_b), gran_a, gran_b in operands(Recipe.get(recipe), *shape):
        for out_dtype in (torch.bfloat16, torch.float32):
            for bias in (None, torch.empty(b.shape[0], device="cuda", dtype=out_dtype)):
                out = product(a, scale_a, b, scale_b, gran_a, gran_b, out_dtype, False, bias)
                assert out.shape == (a.shape[0], b.shape[0])
                assert out.dtype == out_dtype
                assert out.is_cuda


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_tensor_and_row_scales_ask_for_the_short_accumulator(fake, monkeypatch, recipe):
    asked = []
    for name, result in (("scaled_mm", torch.empty), ("scaled_addmm_", lambda *size, **_: None)):
        monkeypatch.setattr(
            F,
            name,
            lambda *args, use_fast_accum, result=result, **_: asked.append(use_fast_accum) or result(1),
            raising=False,
        )
    for (a, scale_a, b, scale_b), gran_a, gran_b in operands(Recipe.get(recipe), 256, 384, 512):
        scaled_mm_cublaslt(a, scale_a, b, scale_b, gran_a, gran_b, torch.bfloat16, True, None)
        add_scaled_mm_cublaslt(torch.empty(1), a, scale_a, b, scale_b, gran_a, gran_b, True)
    # torch raises "scaled_gemm doesn't support fast accum with 128x128 blockwise scaling", and so for 1x128
    assert asked == [recipe in ("tensorwise", "rowwise")] * 6


def test_products_of_no_rows_are_not_asked_of_cublaslt(fake):
    for (a, scale_a, b, scale_b), gran_a, gran_b in operands(Recipe.get("tensorwise"), 0, 64, 32):
        bias = torch.empty(b.shape[0], device="cuda", dtype=torch.bfloat16)
        out = scaled_mm_cublaslt(a, scale_a, b, scale_b, gran_a, gran_b, torch.bfloat16, False, bias)
        assert out.shape == (a.shape[0], b.shape[0])


@pytest.mark.parametrize("scaling", ["tensor", "row", "block1x128", "mx32"])
def test_grouped_products_of_the_reference_run_on_a_device(fake, scaling):
    x, g = (torch.empty(300, size, device="cuda", dtype=torch.bfloat16) for size in (256, 384))
    offs = torch.empty(3, device="cuda", dtype=torch.int32)
    q, scale, xt, scale_xt, padded = ops.cast_grouped(x, offs, scaling=scaling)
    _, _, gt, scale_gt, _ = ops.cast_grouped(g, offs, scaling=scaling)
    of_weight = "block128" if scaling == "block1x128" else scaling
    weight = torch.empty(3, 384, 256, device="cuda", dtype=torch.float8_e4m3fn)
    weight_scale = {
        "tensor": lambda: torch.empty((), device="cuda"),
        "row": lambda: torch.empty(3, 384, 1, device="cuda"),
        "block128": lambda: torch.empty(3, 3, 4, device="cuda"),
        "mx32": lambda: torch.empty(3, 384, 8, device="cuda", dtype=torch.float8_e8m0fnu),
    }[of_weight]()
    out = reference.grouped_scaled_mm(q, scale, weight, weight_scale, offs, scaling, of_weight, torch.bfloat16)
    assert out.shape == (300, 384)
    kind = "mx32" if scaling == "mx32" else "block1x128"
    dw = reference.grouped_scaled_mm_wgrad(gt, scale_gt, xt, scale_xt, padded, kind, torch.float32)
    assert (dw.shape, dw.dtype) == ((3, 384, 256), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise_gw_hp"])
def test_layers_run_forward(fake, recipe, dtype):
    """Forward alone: autograd's engine asks the driver for a device."""
    layer = titan_fp8.Float8Linear(50, 33, recipe=recipe, device="cuda", dtype=dtype)
    with titan_fp8.ConstantWeights(layer):
        for _ in range(2):
            out = layer(torch.empty(2, 7, 50, device="cuda", dtype=dtype, requires_grad=True))
    assert (out.shape, out.dtype, out.requires_grad) == ((2, 7, 33), dtype, True)


@pytest.fixture
def device(monkeypatch):
    """Pretends a device of some compute capability."""
    caches = [implementation, dispatch._problem]

    def pretend(capability, cuda="13.0"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(dispatch, "_cuda_problem", lambda capability: "not asked here")
        for cached in caches:
            cached.cache_clear()
        return {report.op: report for report in backends("cuda:0")}

    yield pretend
    for cached in caches:
        cached.cache_clear()


BLOCK, MX = "scaled_mm[block1x128·block128]", "scaled_mm[mx32·mx32]"


@pytest.mark.parametrize(
    ("capability", "cuda", "block", "mx", "cast"),
    [
        ((8, 0), "13.0", "bf16", "bf16", "reference"),
        ((8, 9), "13.0", "bf16", "bf16", "triton"),
        ((9, 0), "12.8", "bf16", "bf16", "triton"),
        ((9, 0), "13.0", "cublaslt", "bf16", "triton"),
        ((10, 0), "13.0", "bf16", "cublaslt", "triton"),
    ],
)
def test_each_device_gets_what_it_can_run(device, capability, cuda, block, mx, cast):
    pytest.importorskip("triton")
    reports = device(capability, cuda)
    assert (reports[BLOCK].chosen, reports[MX].chosen, reports["cast_block_dual"].chosen) == (block, mx, cast)
    assert reports["cast_grouped[mx32]"].chosen == cast
    assert reports["grouped_scaled_mm[mx32·mx32]"].chosen == "reference"
    reasons = [reason for report in reports.values() for reason in report.skipped.values()]
    assert all(reasons)  # whoever was passed over has one
