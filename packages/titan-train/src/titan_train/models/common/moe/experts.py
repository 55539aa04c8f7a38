"""Experts' weights in stacks, multiplied group by group.

Tokens come sorted by expert, so that each expert multiplies a contiguous group of rows. One grouped product does all of
them: on GPUs a single kernel, without a host sync, for any sizes of groups.

Shapes: R rows, E experts, d width, F hidden width, k and n the inner and outer width of one product.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titan_train.models.common.shared_input import swiglu

_ROW_BYTES = 16  # torch's kernel wants every row to start at a multiple of this


class GroupedMM(nn.Module):
    """Multiply groups of rows by a matrix each: ``torch.nn.functional.grouped_mm``, and a plain loop where it refuses.

    It has no parameters and can be replaced by anything with the same contract, a float8 product for one. Rows at and
    after ``offs[-1]`` belong to no group: their output and the gradient of their input are undefined, and the caller
    must drop both.
    """

    def __init__(self) -> None:
        """Find out what this torch can trace: older ones compile the grouped product in bfloat16 alone."""
        super().__init__()
        self._traces_all_dtypes = _traces_float32()

    def forward(self, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor) -> Tensor:
        """Multiply.

        Args:
            mat_a: Rows sorted by group, ``[R, k]``.
            mat_b: A matrix for each group, ``[E, k, n]``, of the same dtype; may be transposed.
            offs: Where each group ends, ``[E]`` int32, ascending, at most R.

        Returns:
            ``[R, n]``.
        """
        traced = self._traces_all_dtypes or mat_a.dtype == torch.bfloat16
        if mat_a.is_meta or (isinstance(mat_a, FakeTensor) and not traced and not torch.compiler.is_compiling()):
            return mat_a @ mat_b[0]  # one matrix a row: the shape and the FLOPs of any grouping
        if torch.compiler.is_compiling() and not traced:
            return grouped_mm_masked(mat_a, mat_b, offs=offs)
        if _kernel_takes(mat_a) and _kernel_takes(mat_b):
            return F.grouped_mm(mat_a, mat_b, offs=offs)
        return grouped_mm_loop(mat_a, mat_b, offs=offs)


def grouped_mm_loop(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor) -> Tensor:
    """The same in plain products, for any dtype and width; one host sync. Rows after the last group come out zero."""
    ends = [0, *offs.tolist()]
    parts = [mat_a[start:end] @ b for start, end, b in zip(ends, ends[1:], mat_b, strict=False)]
    parts.append(mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[-1]))
    return torch.cat(parts)


def grouped_mm_masked(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor) -> Tensor:
    """The same without a host sync, at E times the products. Rows after the last group come out zero."""
    group = torch.searchsorted(offs, torch.arange(mat_a.shape[0], dtype=offs.dtype, device=offs.device), right=True)
    parts = [mat_a.where((group == e).unsqueeze(-1), 0) @ b for e, b in enumerate(mat_b)]
    return torch.stack(parts).sum(0)


@functools.cache
def _traces_float32() -> bool:
    # private by nature: what torch's own shape function of the operator accepts differs between 2.11 and 2.15
    rows, weights = torch.empty(4, 4, device="meta"), torch.empty(1, 4, 4, device="meta")
    try:
        F.grouped_mm(rows, weights, offs=torch.empty(1, dtype=torch.int32, device="meta"))
    except RuntimeError:
        return False
    return True


def _kernel_takes(matrix: Tensor) -> bool:
    size = matrix.element_size()
    rows_aligned = all(width * size % _ROW_BYTES == 0 for width in matrix.shape[-2:]) if matrix.ndim == 3 else True
    return size in (2, 4) and rows_aligned and matrix.shape[-1] * size % _ROW_BYTES == 0


class Experts(nn.Module):
    """The routed experts of one layer: SwiGLU feed-forwards with stacked weights."""

    swiglu_kernel: Callable[[Tensor, Tensor], Tensor] | None = None
    """What computes the gated product instead of `swiglu`."""
    limit: float | None = None
    """The largest value that goes into SiLU, and the largest magnitude of what it is multiplied by; None: any."""
    init_std: float = 0.02
    """Standard deviation of initial weights, where the model does not fill them itself."""

    def __init__(self, num_experts: int, dim: int, ffn_dim: int) -> None:
        """Build the stacks, each expert's matrices laid out as `torch.nn.Linear` has them."""
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.grouped_mm: nn.Module = GroupedMM()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial weights."""
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=self.init_std)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            x: Rows sorted by expert, ``[R, d]``; rows beyond the counts' sum are padding.
            counts: Rows of each expert that this module holds, ``[E]`` int64.

        Returns:
            ``[R, d]``; padding rows are undefined, and so are their gradients.
        """
        offs = counts.cumsum(0).int()
        gate = self.grouped_mm(x, self.w1.transpose(-2, -1), offs=offs)
        up = self.grouped_mm(x, self.w3.transpose(-2, -1), offs=offs)
        return self.grouped_mm(self.gated(gate, up), self.w2.transpose(-2, -1), offs=offs)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up`` of tensors of one shape, within the limit."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (self.swiglu_kernel or swiglu)(gate, up)
