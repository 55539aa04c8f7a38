"""On a CUDA device: kernels equal the reference bit for bit, with the hardware's conversions; products agree."""

import pytest
import titan_fp8
import torch
from titan_fp8 import ops, reference
from titan_fp8.dispatch import backends

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
POW2 = pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "exact"])
SHAPES = pytest.mark.parametrize("shape", [(256, 512), (300, 147), (0, 128), (1, 1), (300, 1), (1, 256)], ids=str)


@pytest.fixture(autouse=True)
def _kernels_ran(caplog):
    """Plain torch did not take the place of an expert's kernel that is wrong on this device."""
    yield
    assert not [record for record in caplog.get_records("call") if record.name == "titan_fp8.first_call"]


def _matrix(rows, columns, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    if rows > 9 and columns > 4:
        x[3, 4], x[5], x[7] = torch.inf, torch.nan, 0
        x[9] *= 1e-38
    return x.to(dtype)


def _every_bfloat16():
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[torch.randperm(65536, generator=torch.Generator().manual_seed(0))].view(256, 256).cuda()


def _assert_same(got, expected):
    got, expected = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (got, expected))
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.itemsize]
        assert torch.equal(ours.contiguous().view(raw), theirs.contiguous().view(raw))


def _on_cpu(op, *arguments, **keywords):
    """The op's result on the CPU, brought back."""
    moved = [argument.cpu() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    result = op(*moved, **keywords)
    return [tensor.cuda() for tensor in ([result] if isinstance(result, torch.Tensor) else result)]


@DTYPES
@POW2
@SHAPES
@pytest.mark.parametrize(
    "name", ["cast_tensor", "cast_tensor_dual", "cast_row", "cast_row_dual", "cast_block", "cast_block_dual"]
)
def test_cast_equals_the_reference(name, shape, dtype, pow2):
    op, x = getattr(ops, name), _matrix(*shape)
    _assert_same(op(x, dtype, pow2), _on_cpu(op, x, dtype, pow2))


@DTYPES
@POW2
@SHAPES
def test_weight_casts_and_their_transpose_equal_the_reference(shape, dtype, pow2):
    w = _matrix(*shape)
    for op in (ops.cast_weight_block, ops.cast_weight_rows):
        _assert_same(op(w, dtype, pow2), _on_cpu(op, w, dtype, pow2))
    codes = ops.cast_weight_rows(w, dtype, pow2)[0].view(torch.uint8)[: shape[0], : shape[1]]
    for multiple in (16, 128):
        _assert_same(ops.transpose_codes(codes, multiple), _on_cpu(ops.transpose_codes, codes, multiple))


@DTYPES
@pytest.mark.parametrize("name", ["cast_tensor_dual", "cast_row_dual", "cast_block_dual", "cast_mx_dual"])
def test_cast_equals_the_reference_for_every_bfloat16(name, dtype):
    op, x = getattr(ops, name), _every_bfloat16()
    _assert_same(op(x, dtype), _on_cpu(op, x, dtype))


@DTYPES
def test_hardware_rounds_every_midpoint_and_its_neighbours_as_the_reference(dtype):
    values = torch.arange(0x7F if dtype == E4M3 else 0x7C, dtype=torch.uint8).view(dtype).float()
    middle = (values[1:] + values[:-1]) / 2
    around = torch.cat(
        [middle, torch.nextafter(middle, middle * 2), torch.nextafter(middle, middle * 0), values * 1.07]
    )
    x = torch.cat([around, -around]).view(1, -1).cuda()
    amax = torch.tensor(reference.FLOAT8_MAX[dtype], device="cuda")  # scale 1
    _assert_same(ops.cast_tensor(x, dtype, True, amax), _on_cpu(ops.cast_tensor, x, dtype, True, amax))


@DTYPES
@POW2
@pytest.mark.parametrize("shape", [(256, 512), (300, 147)], ids=str)
def test_cuda_kernel_equals_the_reference(shape, dtype, pow2):
    pytest.importorskip("cuda.bindings.nvrtc")
    x = _matrix(*shape)
    _assert_same(ops.cast_block_dual(x, dtype, pow2, backend="cuda"), _on_cpu(ops.cast_block_dual, x, dtype, pow2))


@DTYPES
def test_cuda_kernel_equals_the_reference_for_every_bfloat16(dtype):
    pytest.importorskip("cuda.bindings.nvrtc")
    x = _every_bfloat16()
    _assert_same(ops.cast_block_dual(x, dtype, backend="cuda"), _on_cpu(ops.cast_block_dual, x, dtype))


@pytest.mark.parametrize("shape", [(256, 512), (300, 144)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_other_input_dtypes_equal_the_reference(format, dtype, shape):
    x = _matrix(*shape, dtype)
    for name in ("tensor", "tensor_dual", "row", "row_dual", "block", "block_dual", "mx", "mx_dual"):
        cast = getattr(ops, f"cast_{name}")
        _assert_same(cast(x, format), _on_cpu(cast, x, format))
    for w in (x, torch.stack([x, x.flip(0)])):
        for name in ("cast_weight_block", "cast_weight_rows"):
            _assert_same(getattr(ops, name)(w, format), _on_cpu(getattr(ops, name), w, format))
        expected = [tensor.cuda() for tensor in ops.cast_weights_block([w.cpu()], format)]
        _assert_same(ops.cast_weights_block([w], format), expected)
    offs = torch.tensor([40, 40, shape[0] - 3], dtype=torch.int32, device="cuda")
    for scaling in ("block1x128", "mx32", "tensor", "row"):
        _assert_same(
            ops.cast_grouped(x, offs, format, scaling=scaling),
            _on_cpu(ops.cast_grouped, x, offs, format, scaling=scaling),
        )


def test_weights_in_one_launch_equal_the_reference():
    weights = [_matrix(256, 384), torch.stack([_matrix(128, 128), _matrix(128, 128, seed=1)]), _matrix(130, 200)]
    for chosen in (weights, weights[:2]):  # ragged ones take the masked kernel
        expected = [tensor.cuda() for tensor in ops.cast_weights_block([w.cpu() for w in chosen])]
        _assert_same(ops.cast_weights_block(chosen), expected)


@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256), (2, 130, 200)], ids=str)
def test_one_weight_equals_the_reference(shape):
    w = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    _assert_same(ops.cast_weight_block(w), _on_cpu(ops.cast_weight_block, w))


@pytest.mark.parametrize("ends", [(20, 20, 100), (0, 0, 300), (0, 0, 0), (1, 129, 300)], ids=str)
def test_grouped_cast_equals_the_reference(ends):
    x, offs = _matrix(300, 256), torch.tensor(ends, dtype=torch.int32, device="cuda")
    for scaling in ("block1x128", "mx32", "tensor", "row"):
        _assert_same(ops.cast_grouped(x, offs, scaling=scaling), _on_cpu(ops.cast_grouped, x, offs, scaling=scaling))


@pytest.mark.parametrize(
    "pair", ["tensor·tensor", "row·row", "block1x128·block128", "block1x128·block1x128", "mx32·mx32"]
)
@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("fast_accum", [False, True], ids=["", "fast"])
def test_product_agrees_with_the_reference(pair, rows, fast_accum):
    x, w = torch.randn(rows, 512, device="cuda").bfloat16(), torch.randn(256, 512, device="cuda").bfloat16()
    casts = {"tensor": ops.cast_tensor, "row": ops.cast_row, "block1x128": ops.cast_block, "mx32": ops.cast_mx}
    casts["block128"] = lambda w: ops.cast_weight_block(w)[:2]
    left, right = pair.split("·")
    call = (*casts[left](x), *casts[right](w), left, right, torch.bfloat16, fast_accum)
    product, expected = ops.scaled_mm(*call), _on_cpu(ops.scaled_mm, *call)[0]
    # Two bfloat16 roundings of nearly the same sum; the tensor core's partial sums have 14 bits.
    torch.testing.assert_close(product, expected, rtol=2**-6, atol=2**-6 * 512**0.5)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block1x128", "mx32"])
@pytest.mark.parametrize("ends", [(20, 20, 100), (0, 0, 300), (0, 0, 0), (1, 129, 270)], ids=str)
def test_grouped_products_agree_with_the_reference(ends, scaling):
    x, g = torch.randn(300, 512, device="cuda").bfloat16(), torch.randn(300, 256, device="cuda").bfloat16()
    w, offs = torch.randn(3, 256, 512, device="cuda").bfloat16(), torch.tensor(ends, dtype=torch.int32, device="cuda")
    if scaling == "block1x128":
        weight_scaling, weight = "block128", ops.cast_weight_block(w)[:2]
    else:
        cast = {"tensor": ops.cast_tensor, "row": ops.cast_row, "mx32": ops.cast_mx}[scaling]
        weight_scaling, weight = scaling, [torch.stack(parts) for parts in zip(*(cast(e) for e in w), strict=True)]
    q, scale, xt, xt_scale, padded = ops.cast_grouped(x, offs, scaling=scaling)
    _, _, gt, gt_scale, _ = ops.cast_grouped(g, offs, scaling=scaling)
    call = (q, scale, *weight, offs, scaling, weight_scaling)
    torch.testing.assert_close(
        ops.grouped_scaled_mm(*call), _on_cpu(ops.grouped_scaled_mm, *call)[0], rtol=2**-6, atol=2**-6 * 512**0.5
    )
    call = (gt, gt_scale, xt, xt_scale, padded, "mx32" if scaling == "mx32" else "block1x128")
    torch.testing.assert_close(
        ops.grouped_scaled_mm_wgrad(*call),
        _on_cpu(ops.grouped_scaled_mm_wgrad, *call)[0],
        rtol=2**-6,
        atol=2**-6 * 300**0.5,
    )


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [128, 384])
@pytest.mark.parametrize("ends", [(0, 1, 130, 130, 700), (127, 255, 256, 384, 690), (0, 0, 0, 0, 0)], ids=str)
def test_the_products_for_hopper_are_the_portable_ones_bit_for_bit(monkeypatch, ends, columns, out_dtype):
    grouped_mm = pytest.importorskip("titan_fp8.kernels.triton.grouped_mm")
    x, g = torch.randn(700, 512, device="cuda").bfloat16(), torch.randn(700, columns, device="cuda").bfloat16()
    w, offs = (
        torch.randn(5, columns, 512, device="cuda").bfloat16(),
        torch.tensor(ends, dtype=torch.int32, device="cuda"),
    )
    if grouped_mm.for_hopper(x) is None:
        pytest.skip("not a Hopper GPU, or a Triton that was not checked")

    def products():
        found = []
        for scaling in ("tensor", "row", "block1x128"):
            q, scale, xt, xt_scale, padded = ops.cast_grouped(x, offs, scaling=scaling)
            _, _, gt, gt_scale, _ = ops.cast_grouped(g, offs, E5M2, scaling=scaling)
            cast = {"tensor": ops.cast_tensor, "row": ops.cast_row}.get(scaling)
            weight = ops.cast_weight_block(w)[:2] if cast is None else map(torch.stack, zip(*map(cast, w), strict=True))
            names = scaling, "block128" if cast is None else scaling
            found.append(grouped_mm.grouped_scaled_mm(q, scale, *weight, offs, *names, out_dtype))
            found.append(
                grouped_mm.grouped_scaled_mm_wgrad(gt, gt_scale, xt, xt_scale, padded, "block1x128", out_dtype)
            )
        return found

    ours = products()
    monkeypatch.setattr(grouped_mm, "for_hopper", lambda _: None)
    _assert_same(ours, products())


def test_grouped_ops_never_wait_for_the_device():
    x, w = torch.randn(384, 256, device="cuda").bfloat16(), torch.randn(2, 128, 256, device="cuda").bfloat16()
    offs = torch.tensor([100, 384], dtype=torch.int32, device="cuda")

    def run():
        q, scale, xt, xt_scale, padded = ops.cast_grouped(x, offs)
        weight, weight_scale, *_ = ops.cast_weight_block(w)
        ops.grouped_scaled_mm(q, scale, weight, weight_scale, offs, "block1x128", "block128")
        ops.grouped_scaled_mm_wgrad(xt, xt_scale, xt, xt_scale, padded, "block1x128")

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fusions_agree_with_the_reference():
    x, u, g = (_clean(seed) for seed in range(3))
    weight = torch.randn(384, device="cuda").bfloat16()
    gain = torch.randn(3, 384, device="cuda").bfloat16()  # of three samples
    got = ops.rmsnorm_cast_block(x, weight, 1e-5)
    expected = _on_cpu(ops.rmsnorm_cast_block, x, weight, 1e-5)
    torch.testing.assert_close(got[4], expected[4], rtol=1e-5, atol=0)
    backward = ops.swiglu_backward_cast_block(g, x, u)
    expected_backward = _on_cpu(ops.swiglu_backward_cast_block, g, x, u)
    for ours, theirs in (
        (got[:4], expected[:4]),
        (ops.swiglu_cast_block(x, u), _on_cpu(ops.swiglu_cast_block, x, u)),
        (ops.gelu_cast_block(x), _on_cpu(ops.gelu_cast_block, x)),
        (ops.layernorm_cast_block(x, gain, gain, 1e-5)[:4], _on_cpu(ops.layernorm_cast_block, x, gain, gain, 1e-5)[:4]),
        (backward[:4], expected_backward[:4]),
        (backward[4:], expected_backward[4:]),
    ):
        for q, s in ((0, 1), (2, 3)):
            values = [reference.dequantize(c[q], c[s], "block1x128") for c in (ours, theirs)]
            # A bfloat16 step of the intermediate can move a code by one float8 step, 2^-3 of a value.
            torch.testing.assert_close(*values, rtol=2**-3, atol=1e-3)
    dx, dweight = ops.rmsnorm_backward(g, x, weight, got[4])
    expected_dx, expected_dweight = _on_cpu(ops.rmsnorm_backward, g, x, weight, got[4])
    torch.testing.assert_close(dx, expected_dx, rtol=2**-7, atol=2**-7)  # one bfloat16 step
    torch.testing.assert_close(dweight, expected_dweight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("samples", [1, 3])
def test_gradients_of_layer_norm_and_gelu_agree_with_the_cpu(samples):
    def gradients(device):
        x, gain, shift, w, w2 = leaves = [t.to(device).detach().requires_grad_() for t in made]
        (h,) = titan_fp8.layer_norm_linears(x, gain, shift, 1e-5, [w])
        return torch.autograd.grad(titan_fp8.gelu_linear(h, w2).float().sum(), leaves)

    vector = (samples, 1, 384) if samples > 1 else (384,)
    shapes = ((samples, 100, 384), vector, vector, (256, 384), (128, 256))
    made = [
        torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16() / 8 for i, shape in enumerate(shapes)
    ]
    for ours, theirs in zip(gradients("cuda"), gradients("cpu"), strict=True):
        # a step of float8 in a value on a rounding boundary, and bfloat16 sums
        assert (ours.cpu().float() - theirs.float()).norm() <= 2**-5 * theirs.float().norm()


def _clean(seed):
    return torch.randn(300, 384, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "rowwise_gw_hp"])
def test_products_that_add_sum_like_a_product_and_an_addition(recipe):
    layer = titan_fp8.Float8Linear(384, 256, bias=False, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    plain = torch.nn.Linear(384, 256, bias=False, device="cuda", dtype=torch.bfloat16)
    x = _clean(0)[:256].contiguous()
    for module in (layer, plain):
        (single,) = torch.autograd.grad(module(x).square().sum(), module.weight)
        sums = titan_fp8.MainGradients(module)
        with sums:
            for _ in range(2):
                module(x).square().sum().backward()
        ((_, total),) = sums.items()
        # the single one is rounded to bfloat16
        torch.testing.assert_close(total, 2 * single.float(), rtol=2**-7, atol=2**-8 * float(total.abs().max()))


def test_no_cast_falls_back_to_the_reference_here():
    chosen = {report.op: report.chosen for report in backends()}
    assert {name for name, backend in chosen.items() if backend == "reference"} == {
        "grouped_scaled_mm[mx32·mx32]",
        "grouped_scaled_mm_wgrad[mx32]",
    }  # fmt: skip
