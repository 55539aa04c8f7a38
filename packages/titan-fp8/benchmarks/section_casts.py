"""Casts: bit-exact with the reference on this device, and their share of the copy bandwidth."""

import torch
from measure import Bench
from titan_fp8 import ops, reference
from titan_fp8.dispatch import backends

E4M3 = torch.float8_e4m3fn


def mismatches(got, expected) -> int:
    """Differing bytes of two results."""
    got, expected = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (got, expected))
    raw = [[x.contiguous().flatten().view(torch.uint8) for x in pair] for pair in (got, expected)]
    return sum(int((ours != theirs).sum()) for ours, theirs in zip(*raw, strict=True))


def run(bench: Bench, copy_tb_per_s: float) -> dict:
    """Time, bandwidth and exactness of every cast at 16384×4096."""
    rows, columns = bench.size(16384, 256), bench.size(4096, 256)
    xs = [bench.random(rows, columns, seed=i) for i in range(3)]
    offs = torch.arange(1, 9, device=bench.device, dtype=torch.int32) * (rows // 8)
    known_amax = reference.amax(xs[0])
    elements = rows * columns
    chosen = {report.op: report.chosen for report in backends(bench.device)}
    # name: (call, reference, bytes moved per element)
    calls = {
        "cast_block_dual": (ops.cast_block_dual, reference.cast_block_dual, 4.0625, {"pow2": True}),
        "cast_block": (ops.cast_block, reference.cast_block, 3.03125, {"pow2": True}),
        "cast_tensor_dual": (ops.cast_tensor_dual, reference.cast_tensor_dual, 6.0, {"pow2": True}),
        "cast_row": (ops.cast_row, reference.cast_row, 3.0, {"pow2": True}),
        "cast_row_dual": (ops.cast_row_dual, reference.cast_row_dual, 6.0, {"pow2": True}),
        "cast_mx_dual": (ops.cast_mx_dual, reference.cast_mx_dual, 4.0625, {}),
    }
    result = {}
    for name, (call, plain, bytes_each, options) in calls.items():
        _row(bench, result, name, [lambda x=x, c=call: c(x) for x in xs], elements * bytes_each, copy_tb_per_s)
        result[name]["mismatches"] = mismatches(call(xs[0]), plain(xs[0], E4M3, **options))
    if chosen["cast_block_dual"] == "cuda":  # then that is what ran above
        other = [lambda x=x: ops.cast_block_dual(x, backend="triton") for x in xs]
        _row(bench, result, "cast_block_dual (triton)", other, elements * 4.0625, copy_tb_per_s)
        result["cast_block_dual (triton)"]["mismatches"] = mismatches(
            other[0](), reference.cast_block_dual(xs[0], E4M3, True)
        )
    given = [lambda x=x: ops.cast_tensor_dual(x, amax=known_amax) for x in xs]
    _row(bench, result, "cast_tensor_dual (amax given)", given, elements * 4.0, copy_tb_per_s)
    grouped = [lambda x=x: ops.cast_grouped(x, offs) for x in xs]
    _row(bench, result, "cast_grouped", grouped, elements * 4.0625, copy_tb_per_s)
    result["cast_grouped"]["mismatches"] = mismatches(
        grouped[0](), reference.cast_grouped(xs[0], offs, E4M3, True, "block1x128")
    )
    weights = [[x[: rows // 4].contiguous() for x in xs]] * 2
    several = [lambda w=w: ops.cast_weights_block(w) for w in weights]
    _row(bench, result, "cast_weights_block (3 in one launch)", several, 3 * elements / 4 * 4.0, copy_tb_per_s)
    result["cast_weights_block (3 in one launch)"]["mismatches"] = mismatches(
        several[0](), reference.cast_weights_block(weights[0], E4M3, True)
    )
    # Two casts of one layout each, at best: the transposed one moves the same bytes as the other, but not as simply.
    twice = [lambda x=x: (ops.cast_block(x), ops.cast_block(x)) for x in xs]
    _row(bench, result, "two separate casts, at best", twice, elements * 6.0625, copy_tb_per_s)
    separate = [lambda x=x: (ops.cast_block(x), ops.cast_block(x.t())) for x in xs]
    _row(bench, result, "rows, then transposed copy and rows", separate, elements * 10.0625, copy_tb_per_s)
    for name, runs in _two_kernels(xs).items():
        _row(bench, result, name, runs, elements * 6.0625, copy_tb_per_s)
    gate, up = xs[0], xs[1]
    weight = torch.ones(columns, device=bench.device, dtype=torch.bfloat16)
    _row(
        bench,
        result,
        "rmsnorm_cast_block",
        [lambda x=x: ops.rmsnorm_cast_block(x, weight, 1e-5) for x in xs],
        elements * 6.0625,
        copy_tb_per_s,
    )
    rows = weight[None]
    norms = [lambda x=x: ops.layernorm_cast_block(x, rows, rows, 1e-5) for x in xs]
    _row(bench, result, "layernorm_cast_block", norms, elements * 6.0625, copy_tb_per_s)
    gelus = [lambda x=x: ops.gelu_cast_block(x) for x in xs]
    _row(bench, result, "gelu_cast_block", gelus, elements * 4.0625, copy_tb_per_s)
    swiglu = [lambda g=gate, u=up: ops.swiglu_cast_block(g, u)]
    _row(bench, result, "swiglu_cast_block", swiglu, elements * 6.0625, copy_tb_per_s)
    backward = [lambda h=xs[2], g=gate, u=up: ops.swiglu_backward_cast_block(h, g, u)]
    _row(bench, result, "swiglu_backward_cast_block", backward, elements * 10.125, copy_tb_per_s)
    return result


def _row(bench: Bench, result: dict, name: str, runs, moved_bytes: float, copy_tb_per_s: float) -> None:
    ms = bench.median_ms(runs)
    tb_per_s = moved_bytes / ms / 1e9
    result[name] = row = {"us": ms * 1e3, "tb_per_s": tb_per_s, "share_of_copy": tb_per_s / copy_tb_per_s}
    # for a run that is ended early
    print(f"{name}: {row['us']:.0f} us, {row['share_of_copy']:.2f} of a copy", flush=True)


def _two_kernels(xs) -> dict:
    """Torchao's two blockwise casts of one activation, where torchao is installed."""
    if not xs[0].is_cuda:
        return {}
    try:
        from torchao.prototype.blockwise_fp8_training import kernels
    except ImportError:
        return {}
    rows = getattr(kernels, "triton_fp8_blockwise_act_quant_lhs", None)
    columns = getattr(kernels, "triton_fp8_blockwise_act_quant_transposed_lhs", None)
    if rows is None or columns is None:
        return {}
    return {"torchao: two block casts": [lambda x=x: (rows(x), columns(x)) for x in xs]}
