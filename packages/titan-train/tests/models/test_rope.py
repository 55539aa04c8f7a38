"""Rotary angles against an independent float64 reference, far out too."""

import cmath
import math

import pytest
import torch
from titan_train.models.common.rope import RopeScaling, apply_rope, rope_cos_sin, rope_frequencies

LLAMA31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192)
LLAMA32 = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192)
POSITIONS = [0, 1, 2, 63, 8191, 8192, 40_000, 131_071]


def reference_frequency(pair: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> float:
    """Written from the Llama 3.1 description by wavelength, one number at a time, in Python's float64."""
    frequency = 1.0 / (theta ** (2 * pair / head_dim))
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_seq_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_seq_len / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize("scaling", [None, LLAMA31, LLAMA32], ids=["plain", "llama3.1", "llama3.2"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_rotation_matches_complex_multiplication_in_float64(head_dim: int, scaling: RopeScaling | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, len(POSITIONS), 2, head_dim)
    cos, sin = rope_cos_sin(torch.tensor([POSITIONS]), head_dim, 500_000.0, scaling)
    got = apply_rope(x, cos, sin)

    want = torch.empty(x.shape, dtype=torch.float64)
    half = head_dim // 2
    for s, position in enumerate(POSITIONS):
        for i in range(half):
            turn = cmath.exp(1j * position * reference_frequency(i, head_dim, 500_000.0, scaling))
            for h in range(2):
                turned = complex(float(x[0, s, h, i]), float(x[0, s, h, i + half])) * turn
                want[0, s, h, i], want[0, s, h, i + half] = turned.real, turned.imag
    # float32 rounding of values of up to 4, two products and a sum; the angles themselves are exact to 1e-10
    assert float((got.double() - want).abs().max()) < 1e-6


def test_scaling_keeps_fast_and_divides_slow_frequencies() -> None:
    plain = rope_frequencies(128, 500_000.0)
    scaled = rope_frequencies(128, 500_000.0, LLAMA31)
    assert torch.equal(scaled[:20], plain[:20])
    assert torch.allclose(scaled[-20:], plain[-20:] / 8.0, rtol=1e-15)
    assert not torch.allclose(scaled, plain)


def test_scores_depend_only_on_the_distance() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 64).double(), torch.randn(1, 1, 1, 64).double()

    def score(at: int, distance: int) -> float:
        turn = [apply_rope(t, *rope_cos_sin(torch.tensor([[p]]), 64, 1e4)) for t, p in ((q, at + distance), (k, at))]
        return float((turn[0] * turn[1]).sum())

    assert score(0, 7) == pytest.approx(score(1000, 7), abs=1e-5)  # cosines are stored in float32
    assert score(0, 7) != pytest.approx(score(0, 8), abs=1e-2)


def test_bfloat16_is_turned_in_float32() -> None:
    x = torch.randn(1, 4, 2, 64).bfloat16()
    cos, sin = rope_cos_sin(torch.arange(4)[None], 64, 1e4)
    got = apply_rope(x, cos, sin)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, apply_rope(x.float(), cos, sin).bfloat16())


# float64: two products and a sum; float32: the same of values of up to 4; bfloat16: rounded once at the end
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-6)], ids=str
)
def test_values_and_gradients_match_the_formula(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 16, dtype=dtype).requires_grad_()
    probe = torch.randn(2, 5, 3, 16, dtype=dtype)
    cos, sin = rope_cos_sin(torch.arange(5).expand(2, -1) * 100, 16, 10_000.0)
    wide = x.to(torch.promote_types(dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    want = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(dtype)
    got = apply_rope(x, cos, sin)
    assert got.dtype == dtype
    assert (got - want).abs().max().item() <= bound
    (found,), (wanted,) = (torch.autograd.grad(out, x, probe) for out in (got, want))
    assert (found - wanted).abs().max().item() <= bound
