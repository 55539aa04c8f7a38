"""Context parallelism: rows are cut as text is, after it is known which feature stands where.

Every rank of a group runs the encoder on all images of its rows and takes the features of its own tokens. So an image may lie
across a cut: no feature is lost, and the gradients of the ranks add up to the whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titan_train.data import Batch
from titan_train.data.loader.source import TensorBatch
from titan_train.parallel.context import ContextParallelism


@dataclass(frozen=True, slots=True)
class ImageTextContext:
    """See `titan_train.task.ContextCut`."""

    rows: ContextParallelism

    def apply(self, model: nn.Module) -> None:
        """Replace the attention of the decoder; that inside images stays."""
        self.rows.apply(model)

    def cut(self, batch: TensorBatch) -> TensorBatch:
        """The tokens of this rank, with their places and features; the patches of all images stay."""
        (tokens,) = batch.inputs
        numbers = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        flat = Batch(
            tokens=tokens,
            labels=batch.target,
            positions=numbers,
            cu_seqlens=batch.keywords["cu_seqlens"],
            max_seqlen=tokens.shape[1],
            samples_consumed=batch.samples_consumed,
        )
        here = self.rows.cut(flat)
        keywords: dict[str, Any] = {**batch.keywords, "cu_seqlens": None, "attention_plan": here.attention_plan}
        keywords["positions"] = batch.keywords["positions"].flatten(0, 1)[here.positions]
        keywords["image_source"] = batch.keywords["image_source"].flatten()[here.positions]
        return TensorBatch(
            inputs=(here.tokens,), keywords=keywords, target=here.labels, samples_consumed=batch.samples_consumed
        )
