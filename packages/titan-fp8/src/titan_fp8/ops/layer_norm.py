"""Custom ops: LayerNorm and GELU with the cast that follows."""

import torch
from torch import Tensor

from titan_fp8.dispatch import implementation
from titan_fp8.ops.casts import empty_block_dual
from titan_fp8.ops.checks import check_float8, check_input, check_same_shape
from titan_fp8.ops.direct import custom_op

E4M3 = torch.float8_e4m3fn


@custom_op("titan_fp8::layernorm_cast_block")
def layernorm_cast_block(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    dtype: torch.dtype = E4M3,
    pow2: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``layernorm(x[M, K]) · gain[G, K] + shift[G, K]``, then ``mean[M]`` and ``rstd[M]`` (float32).

    Each of the G rows of gain and shift belongs to M / G rows of ``x``.
    """
    _check_norm(x, gain, shift, dtype)
    return implementation("layernorm_cast_block", x.device, backend)(x, gain, shift, eps, dtype, pow2)


@layernorm_cast_block.register_fake
def _(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    dtype: torch.dtype = E4M3,
    pow2: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_norm(x, gain, shift, dtype)
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return *empty_block_dual(x, dtype), mean, rstd


@custom_op("titan_fp8::gelu_cast_block")
def gelu_cast_block(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_block_dual` of ``gelu(x[M, F])`` in its tanh form: ``q, scale, qt, scale_t``."""
    check_input(x, "x")
    check_float8(dtype)
    return implementation("gelu_cast_block", x.device, backend)(x, dtype, pow2)


@gelu_cast_block.register_fake
def _(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_input(x, "x")
    check_float8(dtype)
    return empty_block_dual(x, dtype)


def _check_norm(x: Tensor, gain: Tensor, shift: Tensor, dtype: torch.dtype) -> None:
    check_input(x, "x")
    check_float8(dtype)
    check_same_shape(gain, shift, ("gain", "shift"))
    if gain.ndim != 2 or gain.shape[1] != x.shape[1] or not gain.shape[0] or x.shape[0] % gain.shape[0]:
        raise ValueError(
            f"gain has shape {tuple(gain.shape)}, and x {tuple(x.shape)}: it must be [G, {x.shape[1]}] with G rows that divide "
            f"the {x.shape[0]} rows of x."
        )
