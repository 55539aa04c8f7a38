"""One microbatch: tokens, labels, positions and document boundaries.

Shape legend: B samples of the microbatch, S tokens of a sample, D document boundaries of the fullest row.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from titan_train.data._packed import PackedDataset

if TYPE_CHECKING:
    from torch import Tensor

# Rows of `cu_seqlens` are padded to one of few lengths, so that a compiled step sees few shapes.
_MIN_BOUNDARIES = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch of one data-parallel rank."""

    tokens: "Tensor"
    """Inputs, int64 ``[B, S]``."""
    labels: "Tensor"
    """Next tokens, int64 ``[B, S]``; ``ignore_index`` where there is none to learn."""
    positions: "Tensor"
    """Positions, int64 ``[B, S]``: from 0 in each document if the document mask is on, else 0 to S - 1."""
    cu_seqlens: "Tensor | None"
    """Document boundaries of each row, int32 ``[B, D + 1]``: 0, the starts inside the row, S, and S again as padding.
    None if the document mask is off."""
    max_seqlen: int
    """Longest stretch of one document in any row; S if the document mask is off."""
    samples_consumed: int
    """Global samples consumed once the step this microbatch completes is done; unchanged within a step."""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A microbatch in host memory; fields as in `Batch`."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32] | None
    max_seqlen: int
    samples_consumed: int


def build_batch(
    dataset: PackedDataset, samples: npt.NDArray[np.int64], *, ignore_index: int, samples_consumed: int
) -> HostBatch:
    """Assemble the samples with these global numbers.

    Args:
        dataset: Where they come from.
        samples: Global sample numbers ``[B]``, int64.
        ignore_index: Label that the loss leaves out.
        samples_consumed: Passed on.
    """
    size, length = samples.size, dataset.seq_len
    both = dataset.tokens(samples)
    # Copies, also of a single row, whose two slices would share memory: labels are masked in place.
    tokens, labels = both[:, :-1].copy(), both[:, 1:].copy()
    positions = np.tile(np.arange(length, dtype=np.int64), (size, 1))
    cu_seqlens: npt.NDArray[np.int32] | None = None
    max_seqlen = length
    if dataset.document_mask or dataset.mask_boundary_labels:
        starts = dataset.document_starts(samples)
        if dataset.mask_boundary_labels:
            for row, start in enumerate(starts):
                labels[row, start - 1] = ignore_index
        if dataset.document_mask:
            bounds = [_bounds(start, length) for start in starts]
            for row, bound in enumerate(bounds):
                if bound.size > 2:
                    positions[row] -= np.repeat(bound[:-1], np.diff(bound))
            max_seqlen = max(int(np.diff(bound).max()) for bound in bounds)
            cu_seqlens = _padded(bounds, length)
    return HostBatch(tokens, labels, positions, cu_seqlens, max_seqlen, samples_consumed)


def _bounds(starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    inside = starts[starts < length]
    return np.concatenate([[0], inside, [length]])


def _padded(bounds: list[npt.NDArray[np.int64]], length: int) -> npt.NDArray[np.int32]:
    columns = _MIN_BOUNDARIES
    while columns < max(bound.size for bound in bounds):
        columns *= 2
    padded = np.full((len(bounds), columns), length, dtype=np.int32)
    for row, bound in enumerate(bounds):
        padded[row, : bound.size] = bound
    return padded


def as_tensors(batch: HostBatch) -> tuple[Any, Any, Any, Any]:
    """Tokens, labels, positions and boundaries as CPU tensors that share the arrays' memory."""
    import torch  # the data path works without torch up to this point

    boundaries = None if batch.cu_seqlens is None else torch.from_numpy(batch.cu_seqlens)
    return torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels), torch.from_numpy(batch.positions), boundaries
