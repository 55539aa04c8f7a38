"""Custom ops: 128×128 casts of weights."""

import torch
from torch import Tensor

from titan_fp8.dispatch import implementation
from titan_fp8.ops.checks import check_float8, check_input
from titan_fp8.ops.direct import custom_op
from titan_fp8.reference import round_up

E4M3 = torch.float8_e4m3fn


@custom_op("titan_fp8::cast_weight_block")
def cast_weight_block(
    w: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """128×128 tiles of ``w[N, K]`` or ``w[E, N, K]``: ``q[Np, Kp], scale[Np/128, L4], qt[Kp, Np], scale_t[Kp/128, L4]``."""
    _check([w], dtype)
    return implementation("cast_weight_block", w.device, backend)(w, dtype, pow2)


@cast_weight_block.register_fake
def _(
    w: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check([w], dtype)
    return empty_weight_block(w, dtype)


@custom_op("titan_fp8::cast_weight_rows")
def cast_weight_rows(
    w: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """`cast_weight_block` without the transpose: ``q[Np, Kp], scale[Np/128, L4]``."""
    _check([w], dtype)
    return implementation("cast_weight_rows", w.device, backend)(w, dtype, pow2)


@cast_weight_rows.register_fake
def _(w: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    _check([w], dtype)
    return empty_weight_rows(w, dtype)


@custom_op("titan_fp8::transpose_codes")
def transpose_codes(codes: Tensor, multiple: int = 128, backend: str = "auto") -> Tensor:
    """Bytes ``codes[N, K]`` (uint8) to their transpose ``[Kp, Np]``, contiguous, sizes rounded up to ``multiple`` with zeros."""
    _check_codes(codes, multiple)
    return implementation("transpose_codes", codes.device, backend)(codes, multiple)


@transpose_codes.register_fake
def _(codes: Tensor, multiple: int = 128, backend: str = "auto") -> Tensor:
    _check_codes(codes, multiple)
    return codes.new_empty(round_up(codes.shape[1], multiple), round_up(codes.shape[0], multiple))


@custom_op("titan_fp8::cast_weights_block")
def cast_weights_block(
    weights: list[Tensor], dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> list[Tensor]:
    """`cast_weight_block` of every weight in one launch: the four results of the first, of the second, …"""
    _check(weights, dtype)
    return implementation("cast_weights_block", weights[0].device, backend)(weights, dtype, pow2)


@cast_weights_block.register_fake
def _(weights: list[Tensor], dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto") -> list[Tensor]:
    _check(weights, dtype)
    return [tensor for w in weights for tensor in empty_weight_block(w, dtype)]


def empty_weight_rows(w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised results of a 128×128 cast without the transpose."""
    *batch, rows, columns = w.shape
    rows, columns = round_up(rows, 128), round_up(columns, 128)
    return (
        w.new_empty(*batch, rows, columns, dtype=dtype),
        w.new_empty(*batch, rows // 128, round_up(columns // 128, 4), dtype=torch.float32),
    )


def empty_weight_block(w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of a 128×128 cast."""
    *batch, rows, columns = w.shape
    rows, columns = round_up(rows, 128), round_up(columns, 128)
    return (
        w.new_empty(*batch, rows, columns, dtype=dtype),
        w.new_empty(*batch, rows // 128, round_up(columns // 128, 4), dtype=torch.float32),
        w.new_empty(*batch, columns, rows, dtype=dtype),
        w.new_empty(*batch, columns // 128, round_up(rows // 128, 4), dtype=torch.float32),
    )


def _check_codes(codes: Tensor, multiple: int) -> None:
    if codes.dtype != torch.uint8 or codes.dim() != 2 or multiple < 1:
        raise ValueError(
            f"transpose_codes got {codes.dtype} {tuple(codes.shape)} and multiple={multiple}: it takes float8 codes as bytes, "
            "[N, K], and a positive multiple. Pass codes.view(torch.uint8)."
        )


def _check(weights: list[Tensor], dtype: torch.dtype) -> None:
    check_float8(dtype)
    if not weights:
        raise ValueError("weights is empty: there is nothing to cast, and no device to cast on.")
    for index, w in enumerate(weights):
        check_input(w, f"weights[{index}]", dims=(2, 3))
        if w.device != weights[0].device:
            raise ValueError(
                f"weights[{index}] is on {w.device} and weights[0] on {weights[0].device}: one launch casts "
                "weights of one device. Group them by device."
            )
