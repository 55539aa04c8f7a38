"""Text: packed documents, next-token cross-entropy, bits per byte. The task of every decoder."""

from collections.abc import Callable
from typing import Any, cast

import torch
from titan_mesh import Mesh
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.inputs import open_inputs, prepare_inputs, vocab_size_without_training
from titan_train.models.common.loss import count_valid, whole_vocabulary_loss
from titan_train.parallel.context import ContextParallelism, Heads
from titan_train.task import Task, TaskInputs


class TextTask(Task):
    """Predict the next token of text."""

    keywords = ("positions", "cu_seqlens", "attention_plan")

    def prepare(self, config: Config, *, quiet: bool = False) -> None:
        """Train the tokenizer and tokenize the corpus, unless the cache has both."""
        prepare_inputs(config, quiet=quiet)

    def vocab_size(self, config: Config) -> int | None:
        """The tokenizer's, as far as it is known before it is trained."""
        return vocab_size_without_training(config)

    def open(self, config: Config) -> TaskInputs:
        """The tokenizer and the packed data sets."""
        return cast(TaskInputs, open_inputs(config))  # frozen, where the protocol would let fields be set

    def loss(self, config: Config, vocab_size: int | None) -> Callable[[Tensor, Any], Tensor]:
        """The sum of the cross-entropy over valid labels, in nats."""
        return whole_vocabulary_loss(vocab_size or 0, z_loss=config.train.z_loss)

    def count(self, batch: Any) -> Tensor:
        """Labels that are predicted."""
        return count_valid(batch.target)

    def context(self, config: Config, mesh: Mesh, model: nn.Module, dtype: torch.dtype) -> ContextParallelism:
        """Rows are cut over the ranks; documents of a row stay apart."""
        heads = Heads.of(model, config.parallel.tp)
        return ContextParallelism(
            config.context,
            mesh,
            heads,
            seq_len=config.model.seq_len,
            dtype=dtype,
            windows=getattr(model, "windows", ()),
        )
