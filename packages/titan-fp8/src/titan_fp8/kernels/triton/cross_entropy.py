"""Softmax cross-entropy of logits in half precision: each kernel reads them once, and the gradient takes their place.

For a head that computes its loss from some tokens' logits. Plain torch widens them to float32 and passes over memory some ten
times; here it is 2 bytes an element for the sums, and 4 for the gradient. Between the two the caller may add what other
ranks know of the same tokens, and scale each token. Computed in float32 and rounded once.

Shapes: T tokens, V entries of the vocabulary on this rank.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.kernels.triton.round import round_like, row_major, widen

_SUMS_BLOCK = 8192  # its loop waits for each block: four loads of 128 bits a thread are on their way at once
_GRADIENT_BLOCK = 4096
_WARPS = 8


@triton.jit
def softmax_sums_kernel(
    logits, labels, largest, total, at_label, V, stride, BLOCK: tl.constexpr, HARDWARE: tl.constexpr
):
    """One token per program: a running maximum, and in each lane a sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    source = logits + row * stride
    top = -float("inf")
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = widen(tl.load(source + start + columns, mask=start + columns < V, other=-float("inf")), HARDWARE)
        higher = tl.maximum(top, tl.max(x, axis=0))
        sums = sums * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    tl.store(largest + row, top)
    tl.store(total + row, tl.sum(sums, axis=0))
    tl.store(at_label + row, widen(tl.load(source + tl.load(labels + row)), HARDWARE))


@triton.jit
def softmax_gradient_kernel(
    logits, labels, largest, factor, hit, V, stride, BLOCK: tl.constexpr, HARDWARE: tl.constexpr
):
    """Replace ``BLOCK`` logits of one token by ``exp(logit - largest) * factor``, less ``hit`` at the label."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * stride + columns
    x = widen(tl.load(place, mask=columns < V, other=-float("inf")), HARDWARE)
    gradient = tl.exp(x - tl.load(largest + row)) * tl.load(factor + row)
    gradient -= tl.where(columns == tl.load(labels + row), tl.load(hit + row), 0.0)
    rounded = round_like(gradient, logits.dtype.element_ty, HARDWARE).to(logits.dtype.element_ty)
    tl.store(place, rounded, mask=columns < V)


def softmax_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a token's cross-entropy is made of.

    Args:
        logits: ``[T, V]``.
        labels: ``[T]`` int64, each at least 0 and less than V.

    Returns:
        Three ``[T]`` in float32: the largest logit; the sum of ``exp(logit - largest)``; the label's logit.

    Raises:
        ValueError: The logits are of a subclass, such as DTensor.
    """
    tokens, vocab = logits.shape
    logits, labels = row_major(logits), labels.contiguous()
    largest, total, at_label = logits.new_empty((3, tokens), dtype=torch.float32)
    if _has_values(logits) and tokens:
        launch(
            softmax_sums_kernel, (tokens,), logits, labels, largest, total, at_label, vocab, logits.stride(0),
            BLOCK=min(_SUMS_BLOCK, triton.next_power_of_2(vocab)), HARDWARE=logits.is_cuda, num_warps=_WARPS,
        )  # fmt: skip
    return largest, total, at_label


def softmax_gradient_(logits: Tensor, labels: Tensor, largest: Tensor, factor: Tensor, hit: Tensor) -> None:
    """Put the gradient of the logits in their place: ``exp(logit - largest) * factor``, less ``hit`` at the label.

    Args:
        logits: ``[T, V]``, rows contiguous; overwritten, rounded once.
        labels: ``[T]`` int64.
        largest: ``[T]`` float32, of `softmax_sums`.
        factor: ``[T]`` float32: one over the sum of exponentials of all ranks, times the token's weight; 0 leaves it out.
        hit: ``[T]`` float32: the token's weight if its label is here, else 0.

    Raises:
        ValueError: Rows are not contiguous, and could not be overwritten; or the logits are of a subclass.
    """
    if logits.stride(-1) != 1:
        raise ValueError(
            f"logits of strides {logits.stride()} cannot be overwritten in place: rows must be contiguous."
        )
    tokens, vocab = logits.shape
    if _has_values(logits) and tokens:
        block = min(_GRADIENT_BLOCK, triton.next_power_of_2(vocab))
        launch(
            softmax_gradient_kernel, (tokens, triton.cdiv(vocab, block)), logits, labels.contiguous(), largest.contiguous(),
            factor.contiguous(), hit.contiguous(), vocab, logits.stride(0), BLOCK=block, HARDWARE=logits.is_cuda,
            num_warps=_WARPS,
        )  # fmt: skip


def _has_values(logits: Tensor) -> bool:
    """Whether there is something to compute: of fake and meta tensors only the memory counts."""
    if logits.is_meta or isinstance(logits, FakeTensor):
        return False
    if type(logits) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"logits are a {type(logits).__name__}, whose memory a kernel cannot read as it is; pass the plain tensor of this "
            "rank, such as a DTensor's to_local()."
        )
    return True
