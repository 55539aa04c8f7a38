"""Tolerances with a reason, and a comparison that says which tensor is off and by how much."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Largest absolute difference allowed between two mathematically equal computations whose order of summation
# differs, for values of order one. A handful of ulps: float32 has 1.2e-7 at 1.0, bfloat16 7.8e-3.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def tolerance(dtype: torch.dtype) -> float:
    """The absolute tolerance for values of order one computed in ``dtype`` in two orders of summation."""
    return _TOLERANCE[dtype]


def max_abs_error(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference, computed in float64; NaN against NaN counts as zero."""
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    if got.numel() == 0:
        return 0.0
    difference = (got.detach().cpu().double() - want.detach().cpu().double()).abs()
    both_nan = got.detach().cpu().isnan() & want.detach().cpu().isnan()
    return float(difference.masked_fill(both_nan, 0.0).max())


def assert_close(
    got: Tensor | Mapping[str, Tensor] | Sequence[Tensor],
    want: Tensor | Mapping[str, Tensor] | Sequence[Tensor],
    *,
    atol: float | None = None,
    rtol: float = 0.0,
) -> None:
    """Assert that tensors (or mappings or sequences of them) agree.

    Args:
        got: What the code under test produced.
        want: The reference, same structure and shapes.
        atol: Allowed absolute error; the default is `tolerance` of ``want``'s dtype.
        rtol: Allowed error relative to the largest magnitude in ``want``, added to ``atol``.

    Raises:
        AssertionError: Names every tensor that is off, its error and what was allowed.
    """
    failures: list[str] = []
    for name, (a, b) in _pairs(got, want).items():
        allowed = (tolerance(b.dtype) if atol is None else atol) + rtol * (float(b.abs().max()) if b.numel() else 0.0)
        error = max_abs_error(a, b)
        if not error <= allowed:  # also catches NaN
            failures.append(f"{name}: max abs error {error:.3e} > {allowed:.3e}")
    if failures:
        raise AssertionError("tensors differ:\n  " + "\n  ".join(failures))


def _pairs(
    got: Tensor | Mapping[str, Tensor] | Sequence[Tensor], want: Tensor | Mapping[str, Tensor] | Sequence[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        return {"tensor": (got, want)}
    if isinstance(got, Mapping) and isinstance(want, Mapping):
        if got.keys() != want.keys():
            raise AssertionError(
                f"keys differ: only got {got.keys() - want.keys()}, only want {want.keys() - got.keys()}"
            )
        return {name: (got[name], want[name]) for name in want}
    if isinstance(got, Sequence) and isinstance(want, Sequence):
        if len(got) != len(want):
            raise AssertionError(f"lengths differ: got {len(got)}, want {len(want)}")
        return {f"[{i}]": pair for i, pair in enumerate(zip(got, want, strict=True))}
    raise AssertionError(f"structures differ: got {type(got).__name__}, want {type(want).__name__}")
