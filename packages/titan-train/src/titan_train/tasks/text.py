"""Text: packed documents, next-token cross-entropy, bits per byte, continued prompts. The task of every decoder.

`titan-train run` prepares the data through this module in a process without torch, which only methods of the ranks import.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np

from titan_train.config import Config
from titan_train.data.sources.encoding import begin_ids
from titan_train.files import write_atomic
from titan_train.inputs import (
    Inputs,
    check_inputs,
    has_tokenizer,
    open_inputs,
    prepare_inputs,
    vocab_size_without_training,
)
from titan_train.task import Task, TaskInputs

if TYPE_CHECKING:
    import torch
    from titan_mesh import Mesh
    from torch import Tensor, nn

    from titan_train.parallel.context import ContextParallelism

_HELD_OUT_PROMPTS, _HELD_OUT_TOKENS = 2, 16


class TextTask(Task):
    """Predict the next token of text."""

    keywords = ("positions", "cu_seqlens", "attention_plan", "padding")
    shares_documents = True

    def prepare(self, config: Config, *, quiet: bool = False) -> None:
        prepare_inputs(config, quiet=quiet)

    def check_inputs(self, config: Config) -> None:
        check_inputs(config)

    def vocab_size(self, config: Config) -> int | None:
        return vocab_size_without_training(config)

    def is_prepared(self, config: Config) -> bool:
        return has_tokenizer(config)  # shards that are not there are refused, not made

    def open(self, config: Config) -> TaskInputs:
        return cast(
            TaskInputs, TextInputs.of(open_inputs(config), config)
        )  # frozen: the protocol would let fields be set

    def loss(self, config: Config, vocab_size: int | None) -> "Callable[[Tensor, Any], Tensor]":
        """The sum of the cross-entropy over valid labels, in nats."""
        from titan_train.models.common.loss import whole_vocabulary_loss

        return whole_vocabulary_loss(vocab_size or 0, z_loss=config.train.z_loss)

    def count(self, batch: Any) -> "Tensor":
        from titan_train.models.common.loss import count_valid

        return count_valid(batch.target)

    def why_no_samples(self, config: Config, model: "nn.Module") -> str | None:
        """Pipeline and context parallelism have no forward of a few tokens, and some models no key-value cache."""
        from titan_train.generation.cache import supports_cache
        from titan_train.models import unwrap

        asked, parallel = config.validation, config.parallel
        if not (asked.sample_tokens and asked.every):
            return None
        for name, degree, why in (("pp", parallel.pp, "some of the layers"), ("cp", parallel.cp, "a part of each row")):
            if degree > 1:
                return f"parallel.{name}={degree} leaves each rank {why}"
        return None if supports_cache(model) else f"{type(unwrap(model)).__name__} does not support the key-value cache"

    def context(self, config: Config, mesh: "Mesh", model: "nn.Module", dtype: "torch.dtype") -> "ContextParallelism":
        from titan_train.models.common.delta import has_states
        from titan_train.models.common.mtp import mtp_of
        from titan_train.models.traits import traits_of
        from titan_train.parallel.context import ContextParallelism, Heads

        heads = Heads.of(model, config.parallel.tp)
        return ContextParallelism(
            config.context,
            mesh,
            heads,
            seq_len=config.model.seq_len,
            dtype=dtype,
            windows=traits_of(model).windows,
            states=has_states(model),
            mtp_depth=len(mtp_of(model) or ()),
        )


@dataclass(frozen=True, slots=True)
class TextInputs(Inputs):
    """The open data of one run, and what its validations continue."""

    samples_by_forward: ClassVar[bool] = False  # sampling keeps keys and values in the model
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt; empty where nothing is sampled."""
    sample_tokens: int
    """Tokens to add to each, as far as the model's positions allow."""
    seq_len: int
    """Tokens of a training row."""
    multiple_of: int
    """Tokens per forward are a multiple of this: under sequence parallelism, the ranks."""

    @classmethod
    def of(cls, inputs: Inputs, config: Config) -> Self:
        """Choose prompts: those of the configuration, or the beginnings of held-out samples."""
        asked = config.validation
        prompts: list[tuple[int, ...]] = []
        if asked.sample_tokens and inputs.validation is not None and asked.every:
            before = begin_ids(config.data, inputs.tokenizer)
            texts = [[*before, *inputs.tokenizer.encode(text)] for text in asked.prompts] or _beginnings(inputs)
            prompts = [tuple(int(token) for token in ids) for ids in texts if len(ids)]
        values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        parallel = config.parallel
        return cls(
            **values,
            prompts=tuple(prompts),
            sample_tokens=asked.sample_tokens,
            seq_len=config.model.seq_len,
            multiple_of=parallel.tp if parallel.sequence_parallel else 1,
        )

    def sample(self, model: "nn.Module", run_dir: Path, step: int) -> str | None:
        """Continue the prompts into ``samples/``, with the same draws at every validation of the run.

        A model without key-value cache is not sampled: each token would cost the whole text again.

        Returns:
            The first prompt and its continuation.
        """
        if not self.prompts:
            return None
        # here: `titan-train check` asks for the task of a configuration, and needs none of this
        import torch

        from titan_train.generation.cache import supports_cache
        from titan_train.generation.decode import generate
        from titan_train.generation.sampling import Sampling
        from titan_train.models.traits import traits_of

        if not supports_cache(model):
            return None
        sampling = Sampling(temperature=0.8, top_p=0.95)
        longest = min(self.seq_len, traits_of(model).max_seq_len or self.seq_len)
        added = min(self.sample_tokens, longest - 1)
        prompts = [prompt[: longest - added] for prompt in self.prompts]
        # no stop: ranks must make the same number of forwards, whatever they draw
        rows = generate(
            model, prompts, max_new_tokens=added, sampling=sampling, vocab_size=self.tokenizer.vocab_size,
            multiple_of=self.multiple_of,
        )  # fmt: skip
        rows = [row[: row.index(end)] if (end := self.tokenizer.eos_id) in row else row for row in rows]
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return None
        texts = [
            {"prompt": self.tokenizer.decode(prompt), "text": self.tokenizer.decode([*prompt, *row])}
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        folder = run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"step_{step:08}.json", json.dumps({"step": step, "texts": texts}, indent=1) + "\n")
        return texts[0]["text"]


def _beginnings(inputs: Inputs) -> list[list[int]]:
    held_out = inputs.validation
    assert held_out is not None
    count = min(_HELD_OUT_PROMPTS, held_out.num_windows or _HELD_OUT_PROMPTS)
    return [row.tokens[:_HELD_OUT_TOKENS].tolist() for row in held_out.rows(np.arange(count, dtype=np.int64))]
