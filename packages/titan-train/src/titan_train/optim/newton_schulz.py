"""Muon's update of one matrix: the nearest orthogonal matrix to its momentum, by matrix products alone.

Problem: the momentum of a hidden matrix has few large singular values, so that a step along it moves few directions. Muon
(https://kellerjordan.github.io/posts/muon) sets all of them to about 1 and keeps the directions: of M = U S V^T it takes U V^T.

Idea: an odd polynomial of a matrix acts on its singular values alone. Five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X bring
all values from (0, 1] near 1. "quintic" has one triple (a, b, c), steepest at zero; "polar_express" (arXiv:2505.16932) has the
best triple for each step.

Cost: 5 (4 m^2 n + 2 m^3) FLOPs for m x n with m <= n, in bf16, next to 6 m n for each token of the step.

NorMuon (arXiv:2510.05491) then divides each row by the root of a running mean of its squares, as rows of U V^T still differ.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scale = Literal["moonlight", "original"]
Coefficients = Literal["quintic", "polar_express"]

_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "quintic": (_QUINTIC,) * 5,
    # for five steps, singular values from 1e-3 on; the margin of 2 % is in the numbers
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
_MARGIN = {"quintic": 1.0, "polar_express": 1.02}
_EPS = 1e-7  # as torch.optim.Muon
_ROW_EPS = 1e-10  # as the authors' NorMuon


class Rule(NamedTuple):
    """How Muon turns a matrix's momentum into its update."""

    coefficients: Coefficients = "quintic"
    scale: Scale = "moonlight"
    dtype: torch.dtype = torch.bfloat16
    """Of the Newton-Schulz steps, and of the update."""
    beta2: float | None = None
    """NorMuon's decay; None is plain Muon."""


def orthogonalize(matrix: Tensor, coefficients: Coefficients = "quintic") -> Tensor:
    """Set the singular values of a matrix to about 1: U V^T of U S V^T.

    Args:
        matrix: ``[..., m, n]`` of the dtype to compute in; unchanged.
        coefficients: Of the polynomials.

    Returns:
        The same shape and dtype. A matrix of zeros stays one.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    x = matrix / (norm * _MARGIN[coefficients]).clamp(min=_EPS)
    short = min(x.shape[-2:])
    # all products go into the same four tensors; out of a tall matrix from its right side, for products into a transposed
    # tensor have no fast kernel in bf16 on a CPU
    into, gram = torch.empty_like(x), x.new_empty((*x.shape[:-2], short, short))
    polynomial = torch.empty_like(gram)
    multiply, multiply_add = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    for a, b, c in _STEPS[coefficients]:
        multiply(*((x.mT, x) if tall else (x, x.mT)), out=gram)
        multiply_add(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        multiply_add(x, *((x, polynomial) if tall else (polynomial, x)), beta=a, out=into)
        x, into = into, x
    return x


def update_of(momentum: Tensor, row_mean: Tensor | None, rule: Rule, parts: tuple[int, ...]) -> Tensor:
    """The update of one matrix, or of a stack of experts', before its scale.

    Args:
        momentum: ``[E, m, n]`` in ``rule.dtype``; E is 1 for a plain matrix.
        row_mean: NorMuon's running mean of each row's squares, ``[E, m, 1]`` float32: changed in place. None for Muon.
        rule: What to compute.
        parts: Rows of each part that is a matrix of its own; they add up to m.

    Returns:
        ``[E, m, n]`` in ``rule.dtype``.
    """
    if len(set(parts)) == 1 and len(parts) > 1:  # heads, all in one batch
        flat = momentum.reshape(-1, parts[0], momentum.shape[-1])
        means = None if row_mean is None else row_mean.view(-1, parts[0], 1)
        return _of_part(flat, means, rule).view_as(momentum)
    if len(parts) == 1:
        return _of_part(momentum, row_mean, rule)
    means = [None] * len(parts) if row_mean is None else row_mean.split(parts, dim=1)
    pieces = zip(momentum.split(parts, dim=1), means, strict=True)
    return torch.cat([_of_part(piece, mean, rule) for piece, mean in pieces], dim=1)


def _of_part(momentum: Tensor, row_mean: Tensor | None, rule: Rule) -> Tensor:
    single = momentum.shape[0] == 1  # a batch of one rounds otherwise than a matrix
    found = orthogonalize(momentum[0] if single else momentum, rule.coefficients)
    found = found[None] if single else found
    if row_mean is None or rule.beta2 is None:
        return found
    update = found.float()
    rows, columns = update.shape[-2:]
    squares = torch.linalg.vector_norm(update, dim=-1, keepdim=True).square()  # of each row, in all
    row_mean.lerp_(squares / columns, 1 - rule.beta2)
    factors = 1 / (row_mean.sqrt() + _ROW_EPS)
    # the paper: an RMS of 0.2 in all; original: the norm stays
    wanted = squares.sum(-2, keepdim=True).sqrt() if rule.scale == "original" else math.sqrt(min(rows, columns))
    now = (squares * factors.square()).sum(-2, keepdim=True).sqrt()
    return (update * (factors * (wanted / (now + _ROW_EPS)))).to(rule.dtype)


def update_scale(scale: Scale, rows: int, columns: int) -> float:
    """What the update of a matrix is multiplied by, besides the learning rate.

    "moonlight" (arXiv:2502.16982) gives it an RMS of 0.2, about AdamW's. "original" keeps its spectral norm, and more for tall
    matrices.
    """
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "moonlight" else math.sqrt(max(1.0, rows / columns))


def flops(rows: int, columns: int) -> float:
    """FLOPs of the five steps for one matrix."""
    short, long = min(rows, columns), max(rows, columns)
    return 5.0 * (4.0 * short * short * long + 2.0 * short**3)
