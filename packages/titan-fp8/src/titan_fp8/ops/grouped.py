"""Custom op: the cast of tokens sorted by expert."""

import torch
from torch import Tensor

from titan_fp8.dispatch import implementation
from titan_fp8.ops.checks import check_float8, check_input, check_offsets
from titan_fp8.ops.direct import custom_op
from titan_fp8.reference import padded_tokens, round_up

E4M3 = torch.float8_e4m3fn
GROUPED_SCALINGS = ("tensor", "row", "block1x128", "mx32")


@custom_op("titan_fp8::cast_grouped")
def cast_grouped(
    x: Tensor,
    offs: Tensor,
    dtype: torch.dtype = E4M3,
    pow2: bool = True,
    scaling: str = "block1x128",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cast ``x[M, K]``, rows sorted by group, for the forward product and the weight gradient, in one read.

    Rows need no alignment in ``q``; in ``qt`` every group is padded with zeros to a multiple of 128 tokens, within the
    static bound ``Mp = round_up(M + 127·E, 128)``. ``offs`` (int32 ``[E]``, group ends) is never read on the host.

    Returns:
        ``(q[M, Kp], scale, qt[Kp, Mp], scale_t, offs_padded[E])``. ``scale``: ``[]``, ``[M, 1]``, ``[M, Kp/128]`` with
        strides ``(1, M)``, or e8m0 ``[M, Kp/32]``, by ``scaling``. ``scale_t``: ``[Kp, Mp/128]`` with strides ``(1, Kp)``, or
        e8m0 ``[Kp, Mp/32]``. ``Kp`` rounds K up to a multiple of 128.
    """
    _check(x, offs, dtype, scaling)
    return implementation("cast_grouped", x.device, backend, scaling)(x, offs, dtype, pow2, scaling)


@cast_grouped.register_fake
def _(
    x: Tensor,
    offs: Tensor,
    dtype: torch.dtype = E4M3,
    pow2: bool = True,
    scaling: str = "block1x128",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, offs, dtype, scaling)
    return empty_grouped(x, offs, dtype, scaling)


def empty_grouped(
    x: Tensor, offs: Tensor, dtype: torch.dtype, scaling: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of a grouped cast."""
    rows, columns = x.shape[0], round_up(x.shape[1], 128)
    tokens = padded_tokens(rows, offs.shape[0])
    scale_t = x.new_empty(tokens // 128, columns, dtype=torch.float32).t()
    if scaling == "tensor":
        scale = x.new_empty((), dtype=torch.float32)
    elif scaling == "row":
        scale = x.new_empty(rows, 1, dtype=torch.float32)
    elif scaling == "block1x128":
        scale = x.new_empty(columns // 128, rows, dtype=torch.float32).t()
    else:
        scale = x.new_empty(rows, columns // 32, dtype=torch.float8_e8m0fnu)
        scale_t = x.new_empty(columns, tokens // 32, dtype=torch.float8_e8m0fnu)
    return (
        x.new_empty(rows, columns, dtype=dtype),
        scale,
        x.new_empty(columns, tokens, dtype=dtype),
        scale_t,
        offs.new_empty(offs.shape, dtype=torch.int32),
    )


def _check(x: Tensor, offs: Tensor, dtype: torch.dtype, scaling: str) -> None:
    check_input(x, "x")
    check_offsets(offs)
    check_float8(dtype)
    if scaling not in GROUPED_SCALINGS:
        raise ValueError(f"scaling={scaling!r} is unknown. Use one of {', '.join(GROUPED_SCALINGS)}.")
