"""What all kernels share: scales from integer bits, rounding to float8, and one 128×128 tile written in both layouts.

Rounding exists twice. On a device, `to_float8` is the hardware conversion (``cvt.rn.satfinite``: nearest even,
saturating, NaN to 0x7F). With ``HARDWARE=False`` it is the same rule in integers, which Triton's interpreter runs on a
CPU: the interpreter's own conversions drop carries and misread subnormals (triton 3.6 to 3.9). The tests
compare the integer rule with the reference on every value; the GPU tests compare the hardware's.

Infinities must become NaN, not the 448 that saturation would make of them, and must not enter a block's amax. One fused
multiply-add does both: ``fma(x, 0, x)`` is ``x`` for finite values and NaN otherwise, and a float maximum drops NaN.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor


def row_major(x: Tensor) -> Tensor:
    """``x`` with contiguous rows, at a distance of which 128 fit 32 bits, as offsets in a tile must."""
    return x if x.stride(-1) == 1 and x.shape[-1] <= x.stride(0) < 2**24 else x.contiguous()


@triton.jit
def load_finite(pointers, mask, MASKED: tl.constexpr, HARDWARE: tl.constexpr):
    """Load as float32, infinities as NaN, zeros where ``mask`` is off."""
    x = widen(tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers), HARDWARE)
    return tl.fma(x, 0.0, x)


@triton.jit
def load_tile(x, M, K, stride, tile_m, tile_k, MASKED: tl.constexpr, HARDWARE: tl.constexpr):
    """A 128×128 tile of ``x[M, K]`` as `load_finite` gives it; tile numbers are int64."""
    # Offsets from the tile's corner fit 32 bits: fewer registers.
    lanes = tl.arange(0, 128)
    mask = (lanes < (M - tile_m * 128).to(tl.int32))[:, None] & (lanes < (K - tile_k * 128).to(tl.int32))[None, :]
    x += tile_m * 128 * stride + tile_k * 128
    return load_finite(x + (lanes[:, None] * stride + lanes[None, :]), mask, MASKED, HARDWARE)


@triton.jit
def widen(x, HARDWARE: tl.constexpr):
    """Float32 of a 16- or 32-bit float."""
    if x.dtype == tl.bfloat16 and not HARDWARE:  # the interpreter misreads bfloat16 subnormals
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def scales_of(amax, E4M3: tl.constexpr, POW2: tl.constexpr):
    """Encode and decode scales of blocks with these amaxes; NaN (a block of nothing finite) and zero give 1."""
    usable = (amax > 0.0) & (amax < float("inf"))
    if POW2:
        bits = amax.to(tl.int32, bitcast=True)
        emax: tl.constexpr = 8 if E4M3 else 15
        k = emax + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        k = tl.where(usable, tl.minimum(k, 126), 0)
        encode = ((k + 127) << 23).to(tl.float32, bitcast=True)
        decode = ((127 - k) << 23).to(tl.float32, bitcast=True)
    else:
        largest: tl.constexpr = 448.0 if E4M3 else 57344.0
        encode = tl.div_rn(tl.full(amax.shape, largest, tl.float32), tl.where(usable, amax, 1.0))
        encode = tl.where(usable, tl.minimum(encode, 8.507059173023462e37), 1.0)  # 2^126
        decode = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode)
    return encode, decode


@triton.jit
def to_float8(y, E4M3: tl.constexpr, HARDWARE: tl.constexpr):
    """Round float32 (no infinities) to float8 codes, uint8."""
    if HARDWARE:
        # Four at a time. `y.to(tl.float8e4nv)` converts pairs, and ptxas 12.8 then takes a pair apart before it has converted.
        convert: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32" if E4M3 else "cvt.rn.satfinite.e5m2x2.f32"
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high;" + convert + " low, $2, $1;" + convert + " high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        mantissa: tl.constexpr = 3 if E4M3 else 2
        bias: tl.constexpr = 7 if E4M3 else 15
        max_code: tl.constexpr = 0x7E if E4M3 else 0x7B
        # 2^(24 - bias - mantissa): the float32 whose last place is the subnormal step
        magic: tl.constexpr = 16384.0 if E4M3 else 128.0
        magic_bits: tl.constexpr = 0x46800000 if E4M3 else 0x43000000
        bits = y.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        half = (1 << (22 - mantissa)) - 1 + ((magnitude >> (23 - mantissa)) & 1)
        normal = ((magnitude + half) >> (23 - mantissa)) - ((127 - bias) << mantissa)
        subnormal = (tl.abs(y) + magic).to(tl.int32, bitcast=True) - magic_bits
        code = tl.where(magnitude < ((128 - bias) << 23), subnormal, normal)
        code = tl.minimum(code, max_code) | ((bits >> 24) & 0x80)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)
    return code


@triton.jit
def round_like(y, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """Float32 rounded to what ``dtype`` can hold, as float32 again."""
    if dtype == tl.float32:
        rounded = y
    elif dtype == tl.bfloat16 and not HARDWARE:  # the interpreter rounds ties away from zero
        bits = y.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        rounded = tl.where(y == y, rounded, y)
    else:
        rounded = y.to(dtype).to(tl.float32)
    return rounded


@triton.jit
def store_block_tile(
    x, q, scale, qt, scale_t, tile_m, tile_k, stride_q, stride_qt,
    DUAL: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write one 128×128 tile of 1×128 blocks: rows to ``q``, and with ``DUAL`` columns to ``qt``.

    Args:
        x: The tile, float32, infinities already NaN.
        q: Codes ``[Mp, Kp]``.
        scale: Decode scales, ``[Mp, Kp/128]`` stored column by column.
        qt: Codes ``[Kp, Mp]``.
        scale_t: Decode scales, ``[Kp, Mp/128]`` stored column by column.
        tile_m: Row of tiles, int64: offsets pass 2^31 at large shapes.
        tile_k: Column of tiles, int64.
        stride_q: Kp.
        stride_qt: Mp.
        DUAL: Whether to write the transpose.
        E4M3: The format; e5m2 otherwise.
        POW2: Power-of-two scales.
        HARDWARE: Hardware conversion.
    """
    # Offsets from the tile's corner fit 32 bits: fewer registers.
    lanes = tl.arange(0, 128)
    magnitude = tl.abs(x)
    encode, decode = scales_of(tl.max(magnitude, axis=1), E4M3, POW2)
    codes = to_float8(x * encode[:, None], E4M3, HARDWARE)
    q += tile_m * 128 * stride_q + tile_k * 128
    tl.store(q + (lanes[:, None] * stride_q + lanes[None, :]), codes)
    tl.store(scale + tile_k * stride_qt + tile_m * 128 + lanes, decode)
    if DUAL:
        encode_t, decode_t = scales_of(tl.max(magnitude, axis=0), E4M3, POW2)
        codes_t = to_float8(x * encode_t[None, :], E4M3, HARDWARE)
        qt += tile_k * 128 * stride_qt + tile_m * 128
        tl.store(qt + (lanes[:, None] * stride_qt + lanes[None, :]), tl.trans(codes_t))
        tl.store(scale_t + tile_m * stride_q + tile_k * 128 + lanes, decode_t)
