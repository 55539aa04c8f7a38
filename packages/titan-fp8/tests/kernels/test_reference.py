"""The reference itself, against definitions that share no code with it."""

import pytest
import torch
from titan_fp8 import ops, reference
from titan_fp8.kernels.products import scaled_mm_bf16
from titan_fp8.reference.scale import MAX_ENCODE_EXPONENT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def _every_bfloat16():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _finite_values(dtype):
    """All non-negative finite values in order, float64; a value's index is its code."""
    return torch.arange(0x7F if dtype == E4M3 else 0x7C, dtype=torch.uint8).view(dtype).double()


def _nearest_even(y, dtype):
    """Codes by definition: the nearest of all values, the even code on a tie; saturating; NaN for non-finite."""
    values = _finite_values(dtype)
    magnitude = y.double().abs()
    upper = torch.searchsorted(values, magnitude).clamp(max=len(values) - 1)
    lower = (upper - 1).clamp(min=0)
    above, below = values[upper] - magnitude, magnitude - values[lower]
    code = torch.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, upper)
    code = torch.where(magnitude >= values[-1], len(values) - 1, code)
    code = code | (y.view(torch.int32).bitwise_right_shift(24).bitwise_and(0x80))
    return torch.where(y.isfinite(), code, 0x7F).to(torch.uint8)


@DTYPES
def test_rounding_is_nearest_even_for_every_bfloat16(dtype):
    y = _every_bfloat16().float()
    assert torch.equal(reference.round_to_float8(y, dtype).view(torch.uint8), _nearest_even(y, dtype))


@DTYPES
def test_rounding_is_nearest_even_at_every_midpoint_and_its_neighbours(dtype):
    values = _finite_values(dtype).float()
    middle = (values[1:] + values[:-1]) / 2
    around = [middle, torch.nextafter(middle, middle * 2), torch.nextafter(middle, middle * 0), values]
    y = torch.cat([torch.cat(around), -torch.cat(around)])
    assert torch.equal(reference.round_to_float8(y, dtype).view(torch.uint8), _nearest_even(y, dtype))


@DTYPES
def test_rounding_equals_torchs_inside_the_range(dtype):
    y = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 10
    y = torch.cat([y, y * 1e-3]).clamp(-400, 400)
    assert torch.equal(reference.round_to_float8(y, dtype).view(torch.uint8), y.to(dtype).view(torch.uint8))


@DTYPES
def test_power_of_two_scale_is_the_largest_that_cannot_overflow_for_every_bfloat16_amax(dtype):
    amax = _every_bfloat16()[1:0x7F80].float()  # every positive finite value
    encode, decode = reference.encode_decode_scales(amax, dtype, pow2=True)
    largest = reference.FLOAT8_MAX[dtype]
    assert (torch.frexp(encode.double()).mantissa == 0.5).all()  # a power of two
    assert (encode.double() * decode.double() == 1).all()
    assert (amax.double() * encode.double() <= largest).all()
    may_double = encode < 2.0**MAX_ENCODE_EXPONENT
    assert (amax.double() * encode.double() * 2 > largest)[may_double].all()
    # The float64 definition, spelled with a logarithm; exact here, as no ratio is near enough to a power of two to err.
    expected = torch.exp2(torch.log2(largest / amax.double()).floor().clamp(max=126))
    assert torch.equal(encode.double(), expected)


@DTYPES
def test_exact_scale_is_the_ieee_quotient_for_every_bfloat16_amax(dtype):
    amax = _every_bfloat16()[1:0x7F80].float()
    encode, decode = reference.encode_decode_scales(amax, dtype, pow2=False)
    # A float64 quotient rounded to float32 is the correctly rounded one: 53 >= 2 * 24 + 2 bits.
    expected = (reference.FLOAT8_MAX[dtype] / amax.double()).clamp(max=2.0**126).float()
    assert torch.equal(encode, expected)
    assert torch.equal(decode, (1 / expected.double()).float())


@DTYPES
@pytest.mark.parametrize("pow2", [True, False])
def test_no_value_overflows_after_scaling(dtype, pow2):
    amax = _every_bfloat16()[1:0x7F80].float()
    encode, _ = reference.encode_decode_scales(amax, dtype, pow2)
    codes = reference.round_to_float8(amax * encode, dtype).double()
    assert codes.isfinite().all()
    assert (codes <= reference.FLOAT8_MAX[dtype]).all()


@pytest.mark.parametrize("pow2", [True, False])
def test_unusable_amax_has_scale_one(pow2):
    encode, decode = reference.encode_decode_scales(torch.tensor([0.0, torch.inf, torch.nan]), E4M3, pow2)
    assert encode.tolist() == decode.tolist() == [1, 1, 1]


def test_mx_scale_is_the_block_scale_of_32_values():
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, scale = ops.cast_mx(x)
    for block in range(4):
        part = x[:, block * 32 : block * 32 + 32]
        expected_q, expected_scale = ops.cast_block(part)
        assert torch.equal(scale[:, block].float(), expected_scale[:, 0])
        assert torch.equal(q[:, block * 32 : block * 32 + 32].float(), expected_q[:, :32].float())


def test_grouped_cast_of_aligned_groups_is_the_plain_cast():
    x = torch.randn(384, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    offs = torch.tensor([128, 128, 384], dtype=torch.int32)
    q, scale, qt, scale_t, offs_padded = ops.cast_grouped(x, offs)
    plain = ops.cast_block_dual(x)
    assert offs_padded.tolist() == [128, 128, 384]
    for got, expected in zip((q, scale, qt[:, :384], scale_t[:, :3]), plain, strict=True):
        assert torch.equal(got.float(), expected.float())
    assert not qt[:, 384:].float().any()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block1x128", "mx32"])
@pytest.mark.parametrize("ends", [(30, 30, 170), (0, 0, 200), (0, 0, 0), (1, 129, 200)])
def test_grouped_products_equal_products_group_by_group(scaling, ends):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(200, n, generator=generator).bfloat16() for n in (256, 128))
    offs = torch.tensor(ends, dtype=torch.int32)
    q, scale, xt, xt_scale, padded = ops.cast_grouped(x, offs, scaling=scaling)
    _, _, gt, gt_scale, _ = ops.cast_grouped(g, offs, scaling=scaling)
    transposed = "mx32" if scaling == "mx32" else "block1x128"
    wgrad = ops.grouped_scaled_mm_wgrad(gt, gt_scale, xt, xt_scale, padded, transposed, torch.float32)
    values = reference.dequantize(q, scale, scaling)
    start = 0
    for expert, end in enumerate(ends):
        # e4m3 rounds a value by at most 2^-4 of itself; the errors of two operands add in quadrature to at most 0.088 of
        # the norm, and are 0.037 where values are spread evenly between codes.
        expected = g[start:end].float().t() @ x[start:end].float()
        assert (wgrad[expert] - expected).norm() <= 0.08 * expected.norm()
        start = end
    weight, weight_scaling, weight_scale = torch.randn(3, 128, 256, generator=generator).bfloat16(), scaling, None
    if scaling == "block1x128":
        weight_scaling, (b, weight_scale, *_) = "block128", ops.cast_weight_block(weight)
    else:
        cast = {"tensor": ops.cast_tensor, "row": ops.cast_row, "mx32": ops.cast_mx}[scaling]
        b, weight_scale = (torch.stack(parts) for parts in zip(*(cast(expert) for expert in weight), strict=True))
    product = ops.grouped_scaled_mm(q, scale, b, weight_scale, offs, scaling, weight_scaling, torch.float32)
    start = 0
    for expert, end in enumerate(ends):
        left = values[start:end].double()
        right = reference.dequantize(b, weight_scale, weight_scaling)[expert].double().t()
        # A float32 sum of 256 products, relative to the sum of magnitudes.
        assert ((product[start:end] - left @ right).abs() <= 256 * 2**-24 * (left.abs() @ right.abs())).all()
        start = end
    assert not product[start:].any()


@pytest.mark.parametrize(("dtype", "floor_db"), [(E4M3, 31.0), (E5M2, 25.0)], ids=["e4m3", "e5m2"])
def test_block_cast_of_gaussian_values_keeps_its_signal(dtype, floor_db):
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = reference.dequantize(*ops.cast_block(x, dtype), "block1x128").double() - x.double()
    sqnr_db = 10 * torch.log10(x.double().square().sum() / error.square().sum())
    assert sqnr_db >= floor_db  # 3 (2) mantissa bits: 31.5 (25.6) dB for a Gaussian


def test_products_are_as_wide_inside_autocast():
    a, b = (torch.randn(20, 128, generator=torch.Generator().manual_seed(i)) for i in range(2))
    ends = torch.tensor([5, 20], dtype=torch.int32)
    operands = [part for x in (a, b) for part in reference.cast_row(x, torch.float8_e4m3fn, True)]
    q, scale, qt, scale_t, padded = reference.cast_grouped(a, ends, torch.float8_e4m3fn, True, "block1x128")
    weight, w_scale = reference.cast_weight_rows(torch.stack([b, b]), torch.float8_e4m3fn, True)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(
                [
                    reference.scaled_mm(*operands, "row", "row", torch.float32),
                    reference.grouped_scaled_mm(
                        q, scale, weight, w_scale, ends, "block1x128", "block128", torch.float32
                    ),
                    reference.grouped_scaled_mm_wgrad(qt, scale_t, qt, scale_t, padded, "block1x128", torch.float32),
                ]
            )
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_emulated_products_are_bfloat16_inside_autocast_of_float16():
    x = torch.full((16, 128), 2.0**17)
    q, scale = reference.cast_row(x, torch.float8_e4m3fn, True)
    with torch.autocast("cpu", torch.float16):
        got = scaled_mm_bf16(q, scale, q, scale, "row", "row", torch.float32, False, None)
    assert torch.equal(got, torch.full((16, 16), 2.0**41))
