"""Padded sizes, and uninitialised results of casts with the shapes and strides of the real ones: for kernels and fakes."""

import torch
import torch.nn.functional as F
from torch import Tensor

Dual = tuple[Tensor, Tensor, Tensor, Tensor]
"""Codes and scales of a matrix, codes and scales of its transpose."""


def round_up(size: int, multiple: int) -> int:
    """The next multiple of ``multiple`` at or above ``size``."""
    return -(-size // multiple) * multiple


def padded_shape(x: Tensor, multiple: int) -> tuple[int, int]:
    """Rows and columns of a matrix, each rounded up."""
    return round_up(x.shape[0], multiple), round_up(x.shape[1], multiple)


def pad_matrix(x: Tensor, multiple: int) -> Tensor:
    """``x[..., M, K]`` with zeros appended so that both sizes are multiples of ``multiple``."""
    rows, columns = x.shape[-2:]
    pad_rows, pad_columns = round_up(rows, multiple) - rows, round_up(columns, multiple) - columns
    return F.pad(x, (0, pad_columns, 0, pad_rows)) if pad_rows or pad_columns else x


def padded_tokens(num_rows: int, num_groups: int) -> int:
    """Columns of a grouped cast's ``qt``: enough for every group padded to a multiple of 128, for any offsets."""
    return round_up(num_rows + 127 * num_groups, 128)


def empty_block_dual(x: Tensor, dtype: torch.dtype, dual: bool = True) -> Dual:
    """The results of a 1×128 cast; empty transposes without ``dual``."""
    rows, columns = padded_shape(x, 128)
    rows_t, columns_t = (rows, columns) if dual else (0, 0)
    strided = x.new_empty_strided
    return (
        x.new_empty(rows, columns, dtype=dtype),
        strided((rows, columns // 128), (1, rows), dtype=torch.float32),
        x.new_empty(columns_t, rows_t, dtype=dtype),
        strided((columns_t, rows_t // 128), (1, columns_t), dtype=torch.float32),
    )


def empty_weight_block(w: Tensor, dtype: torch.dtype, dual: bool = True) -> Dual:
    """The results of a 128×128 cast; empty transposes without ``dual``."""
    *batch, rows, columns = w.shape
    rows, columns = round_up(rows, 128), round_up(columns, 128)
    rows_t, columns_t = (rows, columns) if dual else (0, 0)
    return (
        w.new_empty(*batch, rows, columns, dtype=dtype),
        w.new_empty(*batch, rows // 128, round_up(columns // 128, 4), dtype=torch.float32),
        w.new_empty(*batch, columns_t, rows_t, dtype=dtype),
        w.new_empty(*batch, columns_t // 128, round_up(rows_t // 128, 4), dtype=torch.float32),
    )


def empty_grouped(
    x: Tensor, offs: Tensor, dtype: torch.dtype, scaling: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of a grouped cast."""
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
