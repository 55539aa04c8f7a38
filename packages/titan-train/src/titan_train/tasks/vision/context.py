"""Context parallelism: rows are cut as text is, after it is known which feature stands where.

Every rank of a group runs the encoder on all images of its rows and takes the features of its own tokens. So an image may lie
across a cut: no feature is lost, and the gradients of the ranks add up to the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.data import Batch
from titan_train.data.loader.source import TensorBatch
from titan_train.parallel.context import ContextParallelism


@dataclass(slots=True)
class ImageTextContext:
    """See `titan_train.task.ContextCut` and `WholeCut`."""

    rows: ContextParallelism
    _last: tuple[Any, torch.Size] | None = None
    """The plan of the rows that were cut last, and their shape."""

    def apply(self, model: nn.Module) -> None:
        """Replace the attention of the decoder; that inside images stays."""
        self.rows.apply(model)

    def cut(self, batch: TensorBatch) -> TensorBatch:
        """The tokens of this rank, with their places and features; the patches of all images stay."""
        inputs, keywords, target = self._cut(batch.inputs, batch.keywords, batch.target)
        return TensorBatch(inputs=inputs, keywords=keywords, target=target, samples_consumed=batch.samples_consumed)

    def cut_inputs(
        self, inputs: Sequence[Tensor], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        taken, kept, _ = self._cut(inputs, keywords, inputs[0])
        self._last = (kept["attention_plan"], inputs[0].shape)
        return taken, kept

    def join(self, output: Tensor) -> Tensor:
        """The logits of the rows that were cut last, ``[B, S, V]``."""
        assert self._last is not None
        plan, shape = self._last
        return self.rows.join(output, plan).view(*shape, -1)

    def _cut(
        self, inputs: Sequence[Tensor], keywords: Mapping[str, Any], target: Tensor
    ) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
        (tokens,) = inputs
        numbers = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        flat = Batch(
            tokens=tokens,
            labels=target,
            positions=numbers,
            cu_seqlens=keywords["cu_seqlens"],
            max_seqlen=tokens.shape[1],
            samples_consumed=0,
            padding=keywords.get("padding"),
        )
        here = self.rows.cut(flat)
        kept: dict[str, Any] = {**keywords, **here.keywords}
        kept["positions"] = keywords["positions"].flatten(0, 1)[here.positions]
        kept["image_source"] = keywords["image_source"].flatten()[here.positions]
        return (here.tokens,), kept, here.labels
