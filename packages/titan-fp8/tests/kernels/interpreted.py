"""Every Triton kernel run by Triton's interpreter on the CPU and compared with the reference; prints one JSON object.

Run as a script with TRITON_INTERPRET=1: the variable must be set before triton is imported and changes it for the whole
process, so the tests start this as a subprocess, once. Each case's value is its count of differing elements.
"""

import copy
import json
import sys

import torch
import triton
import triton.language as tl
from titan_fp8 import reference
from titan_fp8.kernels.triton import (
    block,
    cross_entropy,
    elementwise,
    fused,
    grouped_cast,
    grouped_mm,
    layer_norm,
    mx,
    rotation,
    row,
    tensor,
    transpose,
    weights,
)
from titan_fp8.kernels.triton.round import round_like, scales_of, to_float8, widen

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}


@triton.jit
def round_kernel(y, codes, N: tl.constexpr, IS_E4M3: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(codes + lanes, to_float8(tl.load(y + lanes), IS_E4M3, False))


@triton.jit
def scales_kernel(amax, encode, decode, N: tl.constexpr, IS_E4M3: tl.constexpr, POW2: tl.constexpr):
    lanes = tl.arange(0, N)
    encoded, decoded = scales_of(tl.load(amax + lanes), IS_E4M3, POW2)
    tl.store(encode + lanes, encoded)
    tl.store(decode + lanes, decoded)


@triton.jit
def bfloat16_kernel(x, wide, rounded, N: tl.constexpr):
    lanes = tl.arange(0, N)
    value = widen(tl.load(x + lanes), False)
    tl.store(wide + lanes, value)
    tl.store(rounded + lanes, round_like(value * 1.0000001, tl.bfloat16, False))


def all_bfloat16():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def midpoints(dtype):
    """The midpoints of all neighbouring float8 values and their float32 neighbours, both signs, and beyond the maximum."""
    values = torch.arange(0x7F if dtype == E4M3 else 0x7C, dtype=torch.uint8).view(dtype).float()
    largest = values[-1]
    middle = torch.cat([(values[1:] + values[:-1]) / 2, largest * torch.tensor([1.01, 1.0625, 1.125, 2, 1e30])])
    around = torch.cat([middle, torch.nextafter(middle, middle * 2), torch.nextafter(middle, middle * 0), values])
    return torch.cat([around, -around])


def padded_to_power_of_two(values):
    size = triton.next_power_of_2(values.numel())
    return torch.cat([values, values.new_zeros(size - values.numel())])


def mismatches(got, expected):
    got = [got] if isinstance(got, torch.Tensor) else list(got)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    count = 0
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        strides = zip(ours.stride(), theirs.stride(), ours.shape, strict=True)
        assert all(left == right for left, right, size in strides if size > 1)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.itemsize]
        count += int((ours.contiguous().view(integers) != theirs.contiguous().view(integers)).sum())
    return count


def exhaustive():
    results = {}
    for dtype, name in NAMES.items():
        for label, values in (("bf16", all_bfloat16().float()), ("midpoints", midpoints(dtype))):
            values = padded_to_power_of_two(values)
            finite = torch.where(values.isinf(), torch.nan, values)  # load_finite's doing
            codes = torch.empty(values.numel(), dtype=torch.uint8)
            round_kernel[(1,)](finite, codes, values.numel(), dtype == E4M3)
            results[f"round-{label}-{name}"] = mismatches(codes.view(dtype), reference.round_to_float8(values, dtype))
        amax = all_bfloat16()[:32768].float()
        for pow2 in (True, False):
            encode, decode = torch.empty_like(amax), torch.empty_like(amax)
            scales_kernel[(1,)](amax, encode, decode, amax.numel(), dtype == E4M3, pow2)
            expected = reference.encode_decode_scales(amax, dtype, pow2)
            results[f"scales-{name}-{'pow2' if pow2 else 'exact'}"] = mismatches((encode, decode), expected)
        # Every bfloat16 through the whole kernel: in order (a block has one or two exponents) and shuffled.
        shuffled = all_bfloat16()[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]
        for label, values in (("in-order", all_bfloat16()), ("shuffled", shuffled)):
            x = values.view(256, 256)
            got = block.cast_block_dual(x, dtype, True)
            results[f"cast_block_dual-every-bf16-{label}-{name}"] = mismatches(
                got, reference.cast_block_dual(x, dtype, True)
            )
        x, amax = midpoints(dtype).view(2, -1), torch.tensor(reference.FLOAT8_MAX[dtype])  # scale 1
        got = tensor.cast_tensor_dual(x, dtype, True, amax)
        results[f"cast_tensor_dual-midpoints-{name}"] = mismatches(
            got, reference.cast_tensor_dual(x, dtype, True, amax)
        )
    x = all_bfloat16()
    wide, rounded = torch.empty(65536), torch.empty(65536)
    bfloat16_kernel[(1,)](x, wide, rounded, 65536)
    results["widen-every-bf16"] = mismatches(wide, x.float())
    expected = (x.float() * 1.0000001).bfloat16().float()
    results["round_like-every-bf16"] = int((rounded.nan_to_num(7) != expected.nan_to_num(7)).sum())
    return results


def matrix(rows, columns, seed=0, dtype=torch.bfloat16):
    """Random, with an infinity, a row of NaN, a zero row and a tiny one."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x[3, 4], x[5], x[7] = torch.inf, torch.nan, 0
    x[9] *= 1e-38
    return x.to(dtype)


def casts():
    results = {}
    for shape in ((128, 256), (140, 147)):
        for dtype, pow2 in ((E4M3, True), (E5M2, False)):
            x = matrix(*shape)
            label = f"{shape[0]}x{shape[1]}-{NAMES[dtype]}-{'pow2' if pow2 else 'exact'}"
            few = x[:16]  # one program per row: slow to interpret
            for op, module, arguments in (
                ("amax", tensor, (x,)),
                ("cast_tensor", tensor, (x, dtype, pow2)),
                ("cast_tensor_dual", tensor, (x, dtype, pow2)),
                ("cast_row_dual", tensor, (x, dtype, pow2)),
                ("cast_row", row, (few, dtype, pow2)),
                ("cast_block", block, (x, dtype, pow2)),
                ("cast_block_dual", block, (x, dtype, pow2)),
                ("cast_weight_block", weights, (torch.stack([x, x * 2]), dtype, pow2)),
                ("cast_weight_rows", weights, (torch.stack([x, x * 2]), dtype, pow2)),
                ("cast_weights_block", weights, ([x, torch.stack([few, few * 2])], dtype, pow2)),
                ("cast_mx", mx, (x, dtype)),
                ("cast_mx_dual", mx, (x, dtype)),
            ):
                got, expected = getattr(module, op)(*arguments), getattr(reference, op)(*arguments)
                results[f"{op}-{label}"] = mismatches(got, expected)
    for shape in ((128, 256), (140, 147)):
        codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        for multiple in (16, 128):
            results[f"transpose_codes-{shape[0]}x{shape[1]}-{multiple}"] = mismatches(
                transpose.transpose_codes(codes, multiple), reference.transpose_codes(codes, multiple)
            )
    for input_dtype in (torch.float32, torch.float16):
        x = matrix(128, 128, dtype=input_dtype)
        name = str(input_dtype).removeprefix("torch.")
        results[f"cast_block_dual-{name}"] = mismatches(
            block.cast_block_dual(x, E4M3, True), reference.cast_block_dual(x, E4M3, True)
        )
    strided = matrix(128, 400)[:, 10:266]
    results["cast_block_dual-strided"] = mismatches(
        block.cast_block_dual(strided, E4M3, True), reference.cast_block_dual(strided, E4M3, True)
    )
    empty = matrix(16, 128)[:0]
    for op, module in (
        ("cast_tensor_dual", tensor),
        ("cast_row_dual", tensor),
        ("cast_row", row),
        ("cast_block_dual", block),
    ):
        got, expected = getattr(module, op)(empty, E4M3, True), getattr(reference, op)(empty, E4M3, True)
        results[f"{op}-empty"] = mismatches(got, expected)
    long_row = torch.randn(1, 20000, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = row.cast_row(long_row, E4M3, True)
    results["cast_row-long"] = mismatches(got, reference.cast_row(long_row, E4M3, True))
    return results


def grouped():
    results = {}
    for label, ends in (
        ("unaligned", (20, 20, 100)),
        ("skewed", (0, 0, 140)),
        ("none", (0, 0, 0)),
        ("full", (1, 129, 130)),
    ):
        x, offs = matrix(140, 147), torch.tensor(ends, dtype=torch.int32)
        x[ends[-1] :] *= 1e10  # rows of no group decide no scale of others
        got = grouped_cast.cast_grouped(x, offs, E4M3, True, "block1x128")
        expected = reference.cast_grouped(x, offs, E4M3, True, "block1x128")
        results[f"cast_grouped-{label}"] = mismatches(got, expected)
        for scaling in ("tensor", "row", "mx32"):
            for dtype, pow2 in ((E4M3, True), (E5M2, False)):
                got = grouped_cast.cast_grouped(x, offs, dtype, pow2, scaling)
                expected = reference.cast_grouped(x, offs, dtype, pow2, scaling)
                results[f"cast_grouped-{scaling}-{label}-{NAMES[dtype]}"] = mismatches(got, expected)
    return results


def cross_entropy_errors(logits):
    """Of the sums, and of the gradient where a token has weight 0, 1 and 2."""
    labels = torch.arange(logits.shape[0]) * 7 % logits.shape[1]
    largest, total, at_label = cross_entropy.softmax_sums(logits, labels)
    wide = logits.detach().double()
    weight = (torch.arange(logits.shape[0]) % 3).float()
    expected = torch.softmax(wide, -1) - torch.nn.functional.one_hot(labels, logits.shape[1])
    got = copy.deepcopy(logits)
    cross_entropy.softmax_gradient_(got, labels, largest, weight / total, weight)
    return {
        "softmax_sums-largest": error(largest, wide.amax(-1)),
        "softmax_sums-total": error(largest + total.log(), wide.logsumexp(-1)),
        "softmax_sums-at_label": error(at_label, wide.gather(1, labels[:, None])[:, 0]),
        "softmax_gradient": error(got, expected * weight[:, None]),
    }


def rotation_errors():
    """Rotary positions of tensors whose memory is in another order than their sizes, against plain operations."""
    generator = torch.Generator().manual_seed(0)
    layouts = {
        "tokens_first": lambda b, s, h, d: torch.randn(b, s, h, d, generator=generator),
        "heads_first": lambda b, s, h, d: torch.randn(b, h, s, d, generator=generator).transpose(1, 2),
        "channels_first": lambda b, s, h, d: torch.randn(b, d, s, h, generator=generator).permute(0, 2, 3, 1),
    }
    results = {}
    for layout, draw in layouts.items():
        for batch, seq_len in ((2, 5), (2, 1), (1, 5)):
            x, angle = draw(batch, seq_len, 3, 8), torch.rand(1, seq_len, 1, 4, generator=generator)
            a, b = x.double().chunk(2, -1)
            cos, sin = angle.double().cos(), angle.double().sin()
            got = rotation.rotate(x, angle.cos(), angle.sin())
            expected = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            results[f"rotate-{layout}-{batch}x{seq_len}"] = error(got, expected)
    # Offsets beyond int32, as heads-first memory of many tokens has. It is reserved, and touched at the three heads alone.
    wide = torch.empty(2**31 + 8, dtype=torch.bfloat16).as_strided((1, 1, 3, 8), (8, 8, 2**30, 1))
    x, angle = torch.randn(1, 1, 3, 8, generator=generator).bfloat16(), torch.rand(1, 1, 1, 4, generator=generator)
    wide.copy_(x)
    got, expected = (rotation.rotate(t, angle.cos(), angle.sin()) for t in (wide, x))
    results["rotate-heads_far_apart"] = error(got, expected.double())
    return results


def closeness():
    """Kernels whose sums or exponentials are rounded in another order: the largest relative error of each result."""
    generator = torch.Generator().manual_seed(0)
    x, g, u = (torch.randn(140, 147, generator=generator).bfloat16() for _ in range(3))
    weight = torch.randn(147, generator=generator).bfloat16()
    got, expected = (m.rmsnorm_cast_block(x, weight, 1e-5, E4M3, True) for m in (fused, reference))
    results = {"rmsnorm_cast_block": dual_error(got[:4], expected[:4]), "rmsnorm_rstd": error(got[4], expected[4])}
    got, expected = (m.rmsnorm_backward(g, x, weight, expected[4]) for m in (fused, reference))
    results["rmsnorm_backward-dx"], results["rmsnorm_backward-dweight"] = map(error, got, expected)
    got, expected = (m.rmsnorm(x, weight, 1e-5) for m in (elementwise, reference))
    results["rmsnorm"], results["rmsnorm-rstd"] = map(error, got, expected)
    for name, rows in (
        ("", x),
        ("-one_block", torch.nn.Parameter(x[:, :16])),
        ("-long", torch.cat([x, 3 * u], 1).repeat(1, 31)),
    ):
        results |= {f"{key}{name}": value for key, value in cross_entropy_errors(rows).items()}
    results["swiglu"] = error(elementwise.swiglu(x, u), reference.swiglu(x, u))
    got, expected = (m.swiglu_backward(g, x, u) for m in (elementwise, reference))
    results["swiglu_backward-gate"], results["swiglu_backward-up"] = map(error, got, expected)
    got, expected = (m.swiglu_cast_block(x, u, E4M3, True) for m in (fused, reference))
    results["swiglu_cast_block"] = dual_error(got, expected)
    got, expected = (m.swiglu_backward_cast_block(g, x, u, E4M3, True) for m in (fused, reference))
    results["swiglu_backward_cast_block-gate"] = dual_error(got[:4], expected[:4])
    results["swiglu_backward_cast_block-up"] = dual_error(got[4:], expected[4:])

    gain, shift = (torch.randn(2, 147, generator=generator).bfloat16() for _ in range(2))
    for label, rows in (("", 1), ("-of_samples", 2)):
        call = (x, gain[:rows], shift[:rows], 1e-5, E4M3, True)
        got, expected = (m.layernorm_cast_block(*call) for m in (layer_norm, reference))
        results[f"layernorm_cast_block{label}"] = dual_error(got[:4], expected[:4])
        results[f"layernorm_mean{label}"] = float((got[4] - expected[4]).abs().max() / x.abs().max())
        results[f"layernorm_rstd{label}"] = error(got[5], expected[5])
    got, expected = (m.gelu_cast_block(3 * x, E4M3, True) for m in (layer_norm, reference))
    results["gelu_cast_block"] = dual_error(got, expected)

    offs = torch.tensor([130, 130, 270], dtype=torch.int32)
    x, g = (torch.randn(300, 256, generator=generator).bfloat16() for _ in range(2))
    w = torch.randn(3, 256, 256, generator=generator).bfloat16()
    rows = [reference.cast_row(expert, E4M3, True) for expert in w]
    tensor_q, tensor_scale = reference.cast_tensor(w.flatten(0, 1), E4M3, True)
    weights = {
        "block1x128": ("block128", reference.cast_weight_block(w, E4M3, True)[:2]),
        "row": ("row", tuple(torch.stack(part) for part in zip(*rows, strict=True))),
        "tensor": ("tensor", (tensor_q.view(w.shape), tensor_scale)),
    }
    for scaling, (weight_scaling, weight_cast) in weights.items():
        q, scale, *_ = reference.cast_grouped(x, offs, E4M3, True, scaling)
        call = (q, scale, *weight_cast, offs, scaling, weight_scaling, torch.float32)
        left, right = reference.dequantize(q, scale, scaling), reference.dequantize(*weight_cast, weight_scaling)
        exact, magnitude = (grouped_rows(f(left.double()), f(right.double()), offs) for f in (torch.clone, torch.abs))
        results[f"grouped_scaled_mm-{scaling}"] = of_bound(
            grouped_mm.grouped_scaled_mm(*call), exact, 256 * 2**-24 * magnitude
        )
    _, _, xt, scale_x, ends = reference.cast_grouped(x, offs, E4M3, True, "block1x128")
    _, _, gt, scale_g, _ = reference.cast_grouped(g, offs, E5M2, True, "block1x128")
    call = (gt, scale_g, xt, scale_x, ends, "block1x128", torch.float32)
    left, right = (reference.dequantize(*part, "block1x128").double() for part in ((gt, scale_g), (xt, scale_x)))
    exact, magnitude = (grouped_columns(f(left), f(right), ends) for f in (torch.clone, torch.abs))
    results["grouped_scaled_mm_wgrad"] = of_bound(
        grouped_mm.grouped_scaled_mm_wgrad(*call), exact, left.shape[1] * 2**-24 * magnitude
    )
    return results


def grouped_rows(left, right, offs):
    """Each group of rows times its expert's transpose; zero beyond the last."""
    out, start = left.new_zeros(left.shape[0], right.shape[1]), 0
    for expert, end in enumerate(offs.tolist()):
        out[start:end], start = left[start:end] @ right[expert].t(), end
    return out


def grouped_columns(left, right, ends):
    """Each group of columns times the same of the other."""
    parts, start = [], 0
    for end in ends.tolist():
        parts.append(left[:, start:end] @ right[:, start:end].t())
        start = end
    return torch.stack(parts)


def of_bound(got, exact, bound):
    """The largest error, in units of the bound."""
    return float(((got.double() - exact).abs() / bound.clamp(min=1e-300)).max())


def dual_error(got, expected):
    pairs = ((0, 1), (2, 3))
    return max(error(*(reference.dequantize(c[q], c[s], "block1x128") for c in (got, expected))) for q, s in pairs)


def error(got, expected):
    """Relative to the largest expected value."""
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def allow_loops_over_tensors():
    """Triton 3.6's interpreter makes a loop bound by ``int(array of one)``, which numpy refuses since 2.4."""
    interpreter = sys.modules["triton.runtime.interpreter"]
    patch = interpreter._patch_lang_tensor

    def patched(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    round_kernel[(1,)](torch.zeros(1), torch.zeros(1, dtype=torch.uint8), 1, True)  # imports the interpreter
    allow_loops_over_tensors()
    print(
        json.dumps(
            {"mismatches": {**exhaustive(), **casts(), **grouped()}, "errors": {**closeness(), **rotation_errors()}}
        )
    )
