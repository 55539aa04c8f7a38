"""Custom ops: casts of one matrix."""

import torch
from torch import Tensor

from titan_fp8.dispatch import implementation
from titan_fp8.ops.checks import check_float8, check_input
from titan_fp8.ops.direct import custom_op
from titan_fp8.reference import round_up

E4M3 = torch.float8_e4m3fn


@custom_op("titan_fp8::amax")
def amax(x: Tensor, backend: str = "auto") -> Tensor:
    """The largest finite magnitude of ``x`` (any shape), float32 ``[]``; 0 where there is none."""
    return implementation("amax", x.device, backend)(x)


@amax.register_fake
def _(x: Tensor, backend: str = "auto") -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@custom_op("titan_fp8::cast_tensor")
def cast_tensor(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, amax: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """One scale: ``x[M, K]`` → ``q[Mp, Kp], scale[]``. Values beyond a given ``amax`` (float32 ``[]``) saturate."""
    _check(x, dtype)
    return implementation("cast_tensor", x.device, backend)(x, dtype, pow2, amax)


@cast_tensor.register_fake
def _(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, amax: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    _check(x, dtype)
    rows, columns = padded_shape(x, 16)
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty((), dtype=torch.float32)


@custom_op("titan_fp8::cast_tensor_dual")
def cast_tensor_dual(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, amax: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """One scale: ``x[M, K]`` → ``q[Mp, Kp], qt[Kp, Mp], scale[]``. Values beyond a given ``amax`` saturate."""
    _check(x, dtype)
    return implementation("cast_tensor_dual", x.device, backend)(x, dtype, pow2, amax)


@cast_tensor_dual.register_fake
def _(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, amax: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, dtype)
    rows, columns = padded_shape(x, 16)
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(columns, rows, dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )


@custom_op("titan_fp8::cast_row")
def cast_row(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """One scale per row: ``x[M, K]`` → ``q[Mp, Kp], scale[Mp, 1]``."""
    _check(x, dtype)
    return implementation("cast_row", x.device, backend)(x, dtype, pow2)


@cast_row.register_fake
def _(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    _check(x, dtype)
    rows, columns = padded_shape(x, 16)
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(rows, 1, dtype=torch.float32)


@custom_op("titan_fp8::cast_row_dual")
def cast_row_dual(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One scale per row and per column: ``x[M, K]`` → ``q[Mp, Kp], scale[Mp, 1], qt[Kp, Mp], scale_t[Kp, 1]``."""
    _check(x, dtype)
    return implementation("cast_row_dual", x.device, backend)(x, dtype, pow2)


@cast_row_dual.register_fake
def _(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, dtype)
    rows, columns = padded_shape(x, 16)
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(rows, 1, dtype=torch.float32),
        x.new_empty(columns, rows, dtype=dtype),
        x.new_empty(columns, 1, dtype=torch.float32),
    )


@custom_op("titan_fp8::cast_block")
def cast_block(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """1×128 blocks: ``x[M, K]`` → ``q[Mp, Kp], scale[Mp, Kp/128]`` with strides ``(1, Mp)``."""
    _check(x, dtype)
    return implementation("cast_block", x.device, backend)(x, dtype, pow2)


@cast_block.register_fake
def _(x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    _check(x, dtype)
    return empty_block_dual(x, dtype, dual=False)[:2]


@custom_op("titan_fp8::cast_block_dual")
def cast_block_dual(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1×128 blocks both ways, one read: ``q, scale[Mp, Kp/128], qt[Kp, Mp], scale_t[Kp, Mp/128]``."""
    _check(x, dtype)
    return implementation("cast_block_dual", x.device, backend)(x, dtype, pow2)


@cast_block_dual.register_fake
def _(
    x: Tensor, dtype: torch.dtype = E4M3, pow2: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, dtype)
    return empty_block_dual(x, dtype)


@custom_op("titan_fp8::cast_mx")
def cast_mx(x: Tensor, dtype: torch.dtype = E4M3, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """1×32 blocks: ``x[M, K]`` → ``q[Mp, Kp]``, e8m0 ``scale[Mp, Kp/32]`` (row-major)."""
    _check(x, dtype)
    return implementation("cast_mx", x.device, backend)(x, dtype)


@cast_mx.register_fake
def _(x: Tensor, dtype: torch.dtype = E4M3, backend: str = "auto") -> tuple[Tensor, Tensor]:
    _check(x, dtype)
    return _empty_mx_dual(x, dtype)[:2]


@custom_op("titan_fp8::cast_mx_dual")
def cast_mx_dual(x: Tensor, dtype: torch.dtype = E4M3, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1×32 blocks both ways: ``q, scale[Mp, Kp/32], qt[Kp, Mp], scale_t[Kp, Mp/32]``, scales e8m0."""
    _check(x, dtype)
    return implementation("cast_mx_dual", x.device, backend)(x, dtype)


@cast_mx_dual.register_fake
def _(x: Tensor, dtype: torch.dtype = E4M3, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, dtype)
    return _empty_mx_dual(x, dtype)


def padded_shape(x: Tensor, multiple: int) -> tuple[int, int]:
    """Rows and columns of a matrix, each rounded up."""
    return round_up(x.shape[0], multiple), round_up(x.shape[1], multiple)


def empty_block_dual(x: Tensor, dtype: torch.dtype, dual: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of a 1×128 cast, with the strides of the real ones; empty transposes without ``dual``."""
    rows, columns = padded_shape(x, 128)
    rows_t, columns_t = (rows, columns) if dual else (0, 0)
    strided = x.new_empty_strided
    return (
        x.new_empty(rows, columns, dtype=dtype),
        strided((rows, columns // 128), (1, rows), dtype=torch.float32),
        x.new_empty(columns_t, rows_t, dtype=dtype),
        strided((columns_t, rows_t // 128), (1, columns_t), dtype=torch.float32),
    )


def _empty_mx_dual(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = padded_shape(x, 128)
    return (
        x.new_empty(rows, columns, dtype=dtype),
        x.new_empty(rows, columns // 32, dtype=torch.float8_e8m0fnu),
        x.new_empty(columns, rows, dtype=dtype),
        x.new_empty(columns, rows // 32, dtype=torch.float8_e8m0fnu),
    )


def _check(x: Tensor, dtype: torch.dtype) -> None:
    check_input(x, "x")
    check_float8(dtype)
