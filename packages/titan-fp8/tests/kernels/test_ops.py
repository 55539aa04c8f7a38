"""Every custom op: opcheck, its fake's shapes, what it refuses, and the transposed layouts."""

import pytest
import titan_fp8
import torch
from titan_fp8 import ops
from titan_fp8.dispatch import backends, implementation
from titan_fp8.reference import dequantize
from torch.utils._python_dispatch import TorchDispatchMode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _matrix(rows=200, columns=144, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float32).bfloat16()


def _offs(*ends):
    return torch.tensor(ends, dtype=torch.int32)


def _calls():
    x, w, offs = _matrix(), _matrix(160, 144, seed=1), _offs(30, 30, 170)
    cast, weight = ops.cast_block_dual(x), ops.cast_weight_block(w)
    grouped = ops.cast_grouped(x, offs)
    experts = ops.cast_weight_block(torch.stack([w, w, w]))
    row_a, row_b = ops.cast_row(x), ops.cast_row(w)
    tensor_a, tensor_b = ops.cast_tensor(x, E5M2), ops.cast_tensor(w)
    mx_a, mx_b = ops.cast_mx(x), ops.cast_mx(w)
    rstd = torch.ones(200)
    bias = torch.zeros(row_b[0].shape[0], dtype=torch.bfloat16)
    return {
        "amax": (ops.amax, (x,)),
        "cast_tensor": (ops.cast_tensor, (x, E5M2, False)),
        "cast_tensor_dual": (ops.cast_tensor_dual, (x, E4M3, True, torch.tensor(2.0))),
        "cast_row": (ops.cast_row, (x,)),
        "cast_row_dual": (ops.cast_row_dual, (x,)),
        "cast_block": (ops.cast_block, (x,)),
        "cast_block_dual": (ops.cast_block_dual, (x, E5M2)),
        "cast_weight_block": (ops.cast_weight_block, (w,)),
        "cast_weight_rows": (ops.cast_weight_rows, (w,)),
        "transpose_codes": (ops.transpose_codes, (cast[0].view(torch.uint8)[:100, :37], 16)),
        "cast_weights_block": (ops.cast_weights_block, ([w, torch.stack([w, w])],)),
        "cast_mx": (ops.cast_mx, (x,)),
        "cast_mx_dual": (ops.cast_mx_dual, (x,)),
        **{f"cast_grouped-{s}": (ops.cast_grouped, (x, offs, E4M3, True, s)) for s in ("tensor", "row", "block1x128", "mx32")},
        "scaled_mm-tensor": (ops.scaled_mm, (*tensor_a, *tensor_b, "tensor", "tensor")),
        "scaled_mm-row": (ops.scaled_mm, (*row_a, *row_b, "row", "row", torch.bfloat16, True, bias)),
        "scaled_mm-block": (ops.scaled_mm, (*cast[:2], *weight[:2], "block1x128", "block128")),
        "scaled_mm-wgrad": (ops.scaled_mm, (*cast[2:], *cast[2:], "block1x128", "block1x128", torch.float32)),
        "scaled_mm-mx": (ops.scaled_mm, (*mx_a, *mx_b, "mx32", "mx32")),
        "grouped_scaled_mm": (ops.grouped_scaled_mm, (*grouped[:2], *experts[:2], offs, "block1x128", "block128")),
        "grouped_scaled_mm_wgrad": (ops.grouped_scaled_mm_wgrad, (*grouped[2:4], *grouped[2:4], grouped[4], "block1x128")),
        "rmsnorm": (ops.rmsnorm, (x, torch.ones(144), 1e-5)),
        "swiglu": (ops.swiglu, (x, x)),
        "swiglu_backward": (ops.swiglu_backward, (x, x, x)),
        "rmsnorm_cast_block": (ops.rmsnorm_cast_block, (x, torch.ones(144), 1e-5)),
        "rmsnorm_backward": (ops.rmsnorm_backward, (x, x, torch.ones(144), rstd)),
        "swiglu_cast_block": (ops.swiglu_cast_block, (x, x)),
        "layernorm_cast_block": (ops.layernorm_cast_block, (x, torch.ones(1, 144), torch.ones(1, 144), 1e-5)),
        "gelu_cast_block": (ops.gelu_cast_block, (x,)),
        "swiglu_backward_cast_block": (ops.swiglu_backward_cast_block, (x, x, x)),
    }  # fmt: skip


CALLS = _calls()


@pytest.mark.parametrize("name", CALLS)
def test_op_passes_opcheck(name):
    op, arguments = CALLS[name]
    # The ops have no gradient of their own, so the autograd checks of opcheck do not apply. test_schema multiplies its
    # inputs, which torch cannot do in float8; what it proves, that inputs are left alone, is the next test.
    takes_float8 = any(getattr(argument, "dtype", None) in (E4M3, E5M2) for argument in arguments)
    torch.library.opcheck(op, arguments, test_utils=("test_faketensor", *(() if takes_float8 else ("test_schema",))))


@pytest.mark.parametrize("name", CALLS)
def test_op_neither_mutates_nor_returns_its_inputs(name):
    op, arguments = CALLS[name]
    inputs = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    before = [_bytes(argument).clone() for argument in inputs]
    results = _flat(op(*arguments))
    for argument, copy in zip(inputs, before, strict=True):
        assert torch.equal(_bytes(argument), copy)
    storages = [tensor.untyped_storage().data_ptr() for tensor in (*results, *inputs) if tensor.numel()]
    assert len({*storages}) == len(results) + len({tensor.untyped_storage().data_ptr() for tensor in inputs})


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0), (512, 512)], ids=str)
@pytest.mark.parametrize(
    "name",
    ["cast_tensor_dual", "cast_row_dual", "cast_block_dual", "cast_weight_block", "cast_weight_rows", "cast_mx_dual"],
)
def test_results_of_empty_and_unpadded_matrices_share_no_storage(name, shape):
    # The custom op raises where a result shares storage with another or with an input.
    with torch.enable_grad():
        results = _flat(getattr(ops, name)(_matrix(*shape)))
    assert len(results) == len({id(result) for result in results})


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (512, 512)], ids=str)
def test_transposed_codes_share_no_storage_with_the_codes(shape):
    codes = torch.zeros(shape, dtype=torch.uint8)
    assert ops.transpose_codes(codes, 128).shape == shape[::-1]


@pytest.mark.parametrize("name", CALLS)
def test_op_traces_without_a_graph_break(name):
    op, arguments = CALLS[name]
    torch.compiler.reset()  # every op compiles the same lambda; without this they count as recompilations
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")
    for got, expected in zip(_flat(compiled(*arguments)), _flat(op(*arguments)), strict=True):
        assert got.stride() == expected.stride()
        assert torch.equal(_bytes(got), _bytes(expected))


def _flat(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _bytes(tensor):
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


@pytest.mark.parametrize("rows", [0, 1, 128, 130])
def test_ragged_sizes_are_padded_with_zeros_of_scale_one(rows):
    q, scale, qt, scale_t = ops.cast_block_dual(_matrix(rows, 50))
    padded = -(-rows // 128) * 128
    assert q.shape == (padded, 128)
    assert qt.shape == (128, padded)
    assert scale.shape == (padded, 1)
    assert scale_t.shape == (128, padded // 128)
    assert not q.float()[rows:].any()
    assert not q.float()[:, 50:].any()
    assert (scale[rows:] == 1).all()
    assert (scale_t[50:] == 1).all()


def test_dual_cast_is_two_casts():
    x = _matrix(256, 384)
    pairs = ((ops.cast_block_dual, ops.cast_block), (ops.cast_row_dual, ops.cast_row), (ops.cast_mx_dual, ops.cast_mx))
    for dual, single in pairs:
        for got, expected in zip(dual(x), (*single(x), *single(x.t())), strict=True):
            assert torch.equal(_bytes(got), _bytes(expected))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_nan_and_infinity_become_nan_and_leave_their_block_alone(bad):
    x = _matrix(128, 128)
    clean = dequantize(*ops.cast_block(x), "block1x128")
    x[3, 5] = bad
    x[3, 6:] *= 0.001  # the amax of row 3 is among the first values
    spoiled = dequantize(*ops.cast_block(x), "block1x128")
    assert spoiled[3, 5].isnan()
    assert spoiled.isnan().sum() == 1
    assert torch.equal(spoiled[:3], clean[:3])
    assert torch.equal(spoiled[3, :5], dequantize(*ops.cast_block(x[3:4, :5]), "block1x128")[0, :5])


def test_weights_cast_together_equal_weights_cast_alone():
    weights = [_matrix(130, 200), torch.stack([_matrix(64, 64), _matrix(64, 64, 1)]), _matrix(128, 640)]
    together = ops.cast_weights_block(weights)
    alone = [tensor for w in weights for tensor in ops.cast_weight_block(w)]
    for got, expected in zip(together, alone, strict=True):
        assert torch.equal(_bytes(got), _bytes(expected))


def test_products_of_no_tokens_are_empty_or_zero():
    x, w = _matrix(0, 128), _matrix(256, 128)
    q, scale, qt, scale_t = ops.cast_block_dual(x)
    weight, weight_scale, *_ = ops.cast_weight_block(w)
    assert ops.scaled_mm(q, scale, weight, weight_scale, "block1x128", "block128").shape == (0, 256)
    wgrad = ops.scaled_mm(qt, scale_t, qt, scale_t, "block1x128", "block1x128")
    assert wgrad.shape == (128, 128)
    assert not wgrad.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out_dtype": torch.float64}, "out_dtype=torch.float64 is not supported"),
        ({"scaling_a": "column"}, "scaling_a='column' is unknown"),
        ({"scaling_a": "row"}, r"scale_a has shape \(256, 2\), but a \(256, 256\) with 'row' scales needs \(256, 1\)"),
        ({"a": lambda a: a.t()}, "float8 tensor cores read the contracted dimension contiguously"),
        ({"a": lambda a: a[:, :128].contiguous()}, r"scale_a has shape \(256, 2\)"),
        ({"scale_a": lambda s: s.contiguous()}, "1x128 scales are stored column by column"),
        ({"a": lambda a: a.float()}, "expected float8 with 2 dimensions"),
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\), expected \(256,\)"),
        ({"backend": "cublas"}, "backend='cublas' does not implement scaled_mm"),
        ({"backend": "cublaslt"}, "needs a CUDA device, the tensors are on cpu"),
    ],
)
def test_scaled_mm_rejects_what_cuda_would(arguments, message):
    q, scale, _, _ = ops.cast_block_dual(_matrix(256, 256))
    weight, weight_scale, *_ = ops.cast_weight_block(_matrix(256, 256, 1))
    call = {
        "a": q,
        "scale_a": scale,
        "b": weight,
        "scale_b": weight_scale,
        "scaling_a": "block1x128",
        "scaling_b": "block128",
    }
    for name, value in arguments.items():
        call[name] = value(call[name]) if callable(value) else value
    with pytest.raises(ValueError, match=message):
        ops.scaled_mm(**call)  # fmt: skip


def test_two_e5m2_operands_are_rejected():
    q, scale = ops.cast_tensor(_matrix(), E5M2)
    with pytest.raises(ValueError, match="both float8_e5m2"):
        ops.scaled_mm(q, scale, q, scale, "tensor", "tensor")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.cast_block(_matrix().double()), "x is torch.float64, which has no float8 cast"),
        (lambda: ops.cast_row(_matrix()[0]), "expected 2 dimensions"),
        (lambda: ops.cast_row(_matrix(), torch.int8), "dtype=torch.int8 is not a float8 training format"),
        (lambda: ops.cast_grouped(_matrix(), torch.tensor([3])), "expected int32"),
        (lambda: ops.cast_grouped(_matrix(), _offs(3), scaling="block"), "scaling='block' is unknown"),
        (lambda: ops.cast_weights_block([]), "weights is empty"),
        (lambda: ops.swiglu_cast_block(_matrix(), _matrix(4)), "multiplied element by element"),
        (
            lambda: ops.layernorm_cast_block(_matrix(), torch.ones(7, 144), torch.ones(7, 144), 1e-5),
            "with G rows that divide",
        ),
        (lambda: ops.rmsnorm_cast_block(_matrix(), torch.ones(3), 1e-5), r"weight has shape \(3,\), expected \(144,\)"),
    ],
)
def test_casts_reject_what_they_cannot_cast(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_backends_reports_the_choice_and_the_reason_for_every_op():
    reports = backends("cpu")
    assert {report.chosen for report in reports} == {"reference"}
    assert all("needs a CUDA device" in reason for report in reports for reason in report.skipped.values())
    by_op = {report.op: report for report in reports}
    assert set(by_op["scaled_mm[row·row]"].skipped) == {"cublaslt", "bf16"}
    named = {report.op.split("[")[0] for report in reports}
    assert named == set(ops.__all__)
    assert implementation("cast_block", torch.device("cpu")).__module__ == "titan_fp8.reference.cast"


def _ops_dispatched(fn):
    with torch.profiler.profile() as seen:
        fn()
    return sum(event.name.startswith("titan_fp8::") for event in seen.events())


def test_eager_layers_skip_the_dispatcher_and_give_the_same_bits():
    """A custom op costs more host time than the kernels of a layer take; see benchmarks/host_time.py."""
    x, w = _matrix(64, 128).requires_grad_(), _matrix(96, 128, seed=1).requires_grad_()
    results = {}

    def run(name):
        results[name] = torch.autograd.grad(titan_fp8.linear(x, w).square().sum(), (x, w))

    assert _ops_dispatched(lambda: run("direct")) == 0

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Watching():
        assert _ops_dispatched(lambda: run("watched")) > 0
    for got, want in zip(results["direct"], results["watched"], strict=True):
        assert torch.equal(got, want)


def test_differentiating_twice_is_refused():
    x, w = _matrix(16, 16).requires_grad_(), _matrix(16, 16, seed=1).requires_grad_()
    (dx,) = torch.autograd.grad(titan_fp8.linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()
