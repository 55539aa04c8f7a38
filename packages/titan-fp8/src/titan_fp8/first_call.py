"""Kernels of experts and of one weight are compared with the reference at the first call of each kind of operands.

Problem: a kernel that is right for the shapes of every test can be wrong for others on a device: few rows among many experts,
sizes below a tile, a dtype that a compiler gets wrong. On one H100 tiny models of experts got gradients that were not finite, and
no CPU showed why; this comparison then named the op (a miscompiled cast, `kernels.triton.round`).

Idea: the first call with given sizes and dtypes runs the reference too, on the host, with the caller's own operands. Casts must
give its codes and scales, products its values within the rounding of their sums. Where they do not, a warning says so once and
plain torch runs for these operands from then on.

Cost: a call of each kind, and a wait for the device. Operands of over `_MOST` elements are not compared: on the host they would
take long, and large shapes are those that the tests on a device have. Nothing is compared while a CUDA graph is captured, or
for an op whose backend the caller names.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

_MOST = 1 << 24
_ROUNDING = 2.0**-5
"""Of the norm of a product. The tensor core's partial sums have 14 bits, results 8."""

_OF_WEIGHTS = ("cast_weight_rows", "cast_weight_block")
COMPARED = ("cast_grouped", "grouped_scaled_mm", "grouped_scaled_mm_wgrad", *_OF_WEIGHTS)

Op = Callable[..., Any]


def compared_at_first(op: str, kernel: Op, reference: Op) -> Op:
    """``kernel``, or ``reference`` for operands of a kind in which they differed."""
    chosen: dict[tuple[Any, ...], Op] = {}

    def run(*operands: Any) -> Any:
        kind = _kind(op, operands)
        found = chosen.get(kind)
        if found is not None:
            return found(*operands)
        results = kernel(*operands)
        if _capturing(operands) or 0 in _results_of(results)[0].shape:
            return results
        chosen[kind] = kernel
        if sum(x.numel() for x in operands if isinstance(x, Tensor)) > _MOST:
            return results
        try:
            expected = reference(*(x.cpu() if isinstance(x, Tensor) else x for x in operands))
            problem = _difference(op, _results_of(results), _results_of(expected))
        except Exception as err:  # whatever stops the comparison must not stop a training that it only watches
            _logger.warning("%s could not be compared with plain torch: %s: %s", op, type(err).__name__, err)
            return results
        if problem is None:
            return results
        chosen[kind] = reference
        _logger.warning(
            "%s: the kernel is wrong here (%s) for operands %s; plain torch runs instead, which is slower. Please report it.",
            op, problem, kind,
        )  # fmt: skip
        return reference(*operands)

    return run


def _results_of(found: Any) -> tuple[Tensor, ...]:
    """An op's results, one or several."""
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _kind(op: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """What may decide how a kernel computes. Tokens come in any number: only whether they fill a tile counts."""
    first = cast(Tensor, operands[0])
    if op in _OF_WEIGHTS:
        return (first.dtype, tuple(first.shape), *operands[1:])
    others = tuple(x for x in operands if not isinstance(x, Tensor))
    if op == "cast_grouped":
        return (first.dtype, first.shape[0] < 128, first.shape[1], operands[1].shape[0], *others)
    if op == "grouped_scaled_mm":
        return (first.dtype, first.shape[0] < 128, tuple(operands[2].shape), *others)
    return (first.dtype, operands[2].dtype, first.shape[0], operands[2].shape[0], operands[4].shape[0], *others)


def _difference(op: str, results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str | None:
    if "mm" not in op:
        same = all(torch.equal(_bits(got), _bits(want)) for got, want in zip(results, expected, strict=True))
        return None if same else "codes or scales differ"
    got, want = results[0].double().cpu(), expected[0].double()
    if not bool(torch.isfinite(want).all()):
        return None  # the operands were not finite
    apart = float((got - want).norm()) / max(float(want.norm()), 1e-300)
    return None if apart <= _ROUNDING else f"off by {apart:.1e} of the norm"


def _bits(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return x.view(torch.uint8) if x.element_size() == 1 else x  # float8 has no comparison; scales are never NaN


def _capturing(operands: tuple[Any, ...]) -> bool:
    return operands[0].is_cuda and torch.cuda.is_current_stream_capturing()
