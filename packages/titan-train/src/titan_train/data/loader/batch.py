"""One microbatch: tokens, labels, positions and document boundaries.

Shape legend: B samples of the microbatch, S tokens of a sample, D document boundaries of the fullest row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

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
    boundaries: npt.NDArray[np.int32] | None = None
    """``cu_seqlens`` in host memory, to plan by: reading them from the device would wait for all that is queued there."""
    padding: "Tensor | None" = None
    """Which tokens only fill a row, bool ``[B, S]``; None if there are none."""

    @property
    def inputs(self) -> "tuple[Tensor, ...]":
        return (self.tokens,)

    @property
    def keywords(self) -> "Mapping[str, Tensor | None]":
        return {"positions": self.positions, "cu_seqlens": self.cu_seqlens, "padding": self.padding}

    @property
    def target(self) -> "Tensor":
        return self.labels


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A microbatch in host memory; fields as in `Batch`."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32] | None
    max_seqlen: int
    samples_consumed: int
    padding: npt.NDArray[np.bool_] | None = None

    def tensors(self) -> "tuple[Tensor | None, ...]":
        """Tokens, labels, positions, boundaries and padding as CPU tensors that share the arrays' memory."""
        import torch  # the data path works without torch up to this point

        arrays = (self.tokens, self.labels, self.positions, self.cu_seqlens, self.padding)
        return tuple(None if array is None else torch.from_numpy(array) for array in arrays)

    def on_device(self, tensors: "Sequence[Tensor | None]") -> Batch:
        tokens, labels, positions, boundaries, padding = (cast("Any", tensor) for tensor in tensors)
        return Batch(
            tokens, labels, positions, boundaries, self.max_seqlen, self.samples_consumed, self.cu_seqlens, padding
        )


def row_boundaries(starts: list[npt.NDArray[np.int64]], length: int) -> npt.NDArray[np.int32]:
    """`Batch.cu_seqlens` of rows whose documents begin at ``starts``; a start at ``length`` reads as padding."""
    columns = _MIN_BOUNDARIES
    while columns < max(start.size for start in starts) + 2:
        columns *= 2
    boundaries = np.full((len(starts), columns), length, dtype=np.int32)
    boundaries[:, 0] = 0
    for row, start in enumerate(starts):
        boundaries[row, 1 : start.size + 1] = start
    return boundaries
