"""Rotation of queries and keys by (index, row, column), and the features of a time.

The channels of a head are divided among the axes. On each axis, neighbouring channels are a pair, rotated by the position
times a frequency ``10000^(-2 i / axis_dim)``. Text tokens stand at (0, 0, 0): they are not rotated.
"""

import math

import torch
from torch import Tensor

_THETA = 10_000.0
TIME_FEATURES = 256
"""Width of the features of a time."""


def rope_table(positions: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair of channels.

    Args:
        positions: ``[..., S, A]`` int64, the place of each token on each axis.
        axes: Channels of each of the A axes, even.

    Returns:
        Two tensors ``[..., S, sum(axes) / 2]``, float32.
    """
    angles: list[Tensor] = []
    for axis, width in enumerate(axes):
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
        angles.append(positions[..., axis, None].double() * _THETA**-exponents)
    joined = torch.cat(angles, dim=-1)
    return joined.cos().float(), joined.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` with neighbouring channels rotated, in its own dtype; computed in float32.

    Args:
        x: ``[B, S, H, D]``.
        cos: ``[1 or B, S, D / 2]``.
        sin: As ``cos``.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).type_as(x)


def rotate_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate` of queries and of keys. Attention calls it by its attribute ``rotate``, where a kernel can take its place."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


def time_features(values: Tensor) -> Tensor:
    """Cosines, then sines of 1000 times a time (or a guidance scale) at 128 frequencies, in float32.

    They are made with the batch, not by the model: mixed precision casts a model's inputs, and a time in bfloat16 has 8
    bits where the highest frequency needs 10.

    Args:
        values: ``[B]`` float32, of a time in [0, 1].

    Returns:
        ``[B, 256]`` float32.
    """
    half = TIME_FEATURES // 2
    frequencies = torch.exp(-math.log(_THETA) * torch.arange(half, dtype=torch.float32, device=values.device) / half)
    angles = 1000.0 * values.float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def grid_positions(text_tokens: int, rows: int, columns: int) -> Tensor:
    """Places of the text tokens, then of the image tokens, row by row: ``[T + rows * columns, 3]`` int64."""
    places = torch.zeros(rows, columns, 3, dtype=torch.int64)
    places[..., 1] = torch.arange(rows)[:, None]
    places[..., 2] = torch.arange(columns)[None, :]
    return torch.cat((torch.zeros(text_tokens, 3, dtype=torch.int64), places.flatten(0, 1)))
