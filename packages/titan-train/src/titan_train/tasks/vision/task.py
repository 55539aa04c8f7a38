"""The task of vision-language models: answers to prompts about images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from titan_mesh import Mesh
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.data import cache_folder, check_sources
from titan_train.data.sources.encoding import begin_ids
from titan_train.files import read_text, write_atomic
from titan_train.inputs import has_tokenizer, learned_tokenizer, run_tokenizer, vocab_size_without_training
from titan_train.models.arguments import model_args
from titan_train.models.common.loss import count_valid, whole_vocabulary_loss
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.models.vision_language.encoder import patch_places
from titan_train.parallel.context import ContextParallelism, Heads
from titan_train.run_folder import check_writable
from titan_train.task import Task, TaskInputs
from titan_train.tasks.diffusion.sampling import image_grid, write_png
from titan_train.tasks.vision.answers import guessed, score_answers
from titan_train.tasks.vision.batches import ImageTextBatches
from titan_train.tasks.vision.context import ImageTextContext
from titan_train.tasks.vision.jsonl import (
    IndexedLines,
    index_name,
    is_indexed,
    keep_index_name,
    list_lines,
    prepare_index,
    token_counts,
)
from titan_train.tasks.vision.rows import ImageTextSet
from titan_train.tasks.vision.shapes import ShapeQuestions
from titan_train.tokenizers import LabelBytes, Tokenizer

TOKENIZER_FOLDER = "tokenizer"
_SHOWN = 40
"""Images in the grid of a validation."""
_SIDE = 192
"""Pixels of one of them, about."""


class VisionTask(Task):
    """Predict the answers to prompts about images."""

    keywords = (
        "positions", "cu_seqlens", "attention_plan", "padding", "pixels", "patches", "image_bounds", "image_source",
    )  # fmt: skip

    def prepare(self, config: Config, *, quiet: bool = False) -> None:
        """Make the tokenizer, and index the images of JSONL files."""
        args = _args(config)
        tokenizer = run_tokenizer(config)
        begin_ids(config.data, tokenizer)
        if config.vision.source == "jsonl":
            index = prepare_index(config, args, again=True)
            token_counts(read_text(index), index.parent, tokenizer, keep=True)

    def check_inputs(self, config: Config) -> None:
        if config.vision.source == "jsonl":
            list_lines(config.vision.paths)
        if learned_tokenizer(config).trains_here:
            check_sources(config.data)  # the tokenizer is trained on them
        else:
            begin_ids(config.data, run_tokenizer(config))
        check_writable(cache_folder(config.data), "data.cache_dir")

    def vocab_size(self, config: Config) -> int | None:
        """The tokenizer's and the tokens of images; None before its file is there."""
        args, found = _args(config), vocab_size_without_training(config)
        return None if found is None else args.vocabulary(found)

    def check(self, config: Config, model: nn.Module) -> None:
        """Refuse sequence parallelism, rows without a mask of documents, and image tokens that are tokens of text."""
        args, parallel = _args(config), config.parallel
        if not config.data.document_mask:
            raise ValueError(
                "data.document_mask=false: documents with images never see each other in a row: it would change nothing. Leave "
                "data.document_mask=true."
            )
        if parallel.tp > 1 and parallel.sequence_parallel:
            raise ValueError(
                f"parallel.tp={parallel.tp} with sequence_parallel: the patches of images are not split over tensor-parallel "
                "ranks. Set parallel.sequence_parallel=false."
            )
        if config.tokenizer.kind == "bytes":
            used = {args.image_token, args.image_start_token, args.image_end_token} & set(range(259))
            if used:
                raise ValueError(
                    f"model.args: the image token {min(used)} is a byte of the tokenizer 'bytes'. Use tokens from 259 on."
                )

    def is_prepared(self, config: Config) -> bool:
        return has_tokenizer(config) and (config.vision.source != "jsonl" or is_indexed(config, _args(config)))

    def open(self, config: Config) -> TaskInputs:
        return VisionInputs(config)

    def loss(self, config: Config, vocab_size: int | None) -> Callable[[Tensor, Any], Tensor]:
        """The sum of the cross-entropy over answers, in nats."""
        return whole_vocabulary_loss(vocab_size or 0, z_loss=config.train.z_loss)

    def count(self, batch: Any) -> Tensor:
        """Tokens of answers; those of images and prompts are not predicted."""
        return count_valid(batch.target)

    def example(
        self, config: Config, part: nn.Module, rows: int
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]] | None:
        """One microbatch of a rank, half of whose tokens stand for images."""
        args: Any = _args(config)
        tokens = config.model.seq_len // config.parallel.cp
        dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
        keywords = {"positions": torch.zeros(rows, tokens, 3, dtype=torch.int64)}
        if getattr(part, "vision", None) is None:
            return (torch.zeros(rows, tokens, args.dim, dtype=dtype),), keywords
        wide = max(1, round(rows * config.model.seq_len * args.image_share))
        patches, bounds = patch_places([(args.merge, args.merge * wide)], args.merge)
        keywords |= {
            "pixels": torch.zeros(len(patches), args.patch_values, dtype=dtype),
            "patches": patches,
            "image_bounds": bounds,
            "image_source": torch.zeros(rows, tokens, dtype=torch.int64),
        }
        return (torch.zeros(rows, tokens, dtype=torch.int64),), keywords

    def context(self, config: Config, mesh: Mesh, model: nn.Module, dtype: torch.dtype) -> ImageTextContext:
        heads = Heads.of(model, config.parallel.tp)
        return ImageTextContext(
            ContextParallelism(config.context, mesh, heads, seq_len=config.model.seq_len, dtype=dtype)
        )


class VisionInputs(TaskInputs):
    """The open data of one run."""

    samples_by_forward = True

    def __init__(self, config: Config) -> None:
        args, vision = _args(config), config.vision
        self._config = config
        self.tokenizer = run_tokenizer(config)
        self._label_bytes = LabelBytes(self.tokenizer)
        self.vocab_size = args.vocabulary(self.tokenizer.vocab_size)
        train, held_out, self._index = _documents(config, args, self.tokenizer)
        options: dict[str, Any] = {
            "seq_len": config.model.seq_len, "seed": config.run.seed, "threads": vision.threads,
            "begin": begin_ids(config.data, self.tokenizer), "max_bad_fraction": config.data.max_bad_fraction,
        }  # fmt: skip
        self.train = ImageTextBatches(train, self.tokenizer, args, part="train", **options)
        self._held_out = None
        if vision.held_out:
            self._held_out = ImageTextBatches(held_out, self.tokenizer, args, part="validation", **options)
        self.validation = self._held_out

    def keep(self, run_dir: Path) -> None:
        self.tokenizer.save(run_dir / TOKENIZER_FOLDER)
        if self._index:
            keep_index_name(run_dir, self._index)

    def text_bytes(self, batch: Any) -> Tensor:
        return self._label_bytes(batch.target)

    def sample(self, model: nn.Module, run_dir: Path, step: int) -> None:
        """Score held-out answers into ``samples/``, with their images and with shuffled ones."""
        count = self._config.vision.sample_answers
        parallel = self._config.parallel
        # a stage or a context rank gives the logits of its part of the vocabulary alone
        cut_twice = parallel.tp > 1 and (parallel.pp > 1 or parallel.cp > 1)
        if not count or self._held_out is None or cut_twice:
            return
        data, items = self._held_out, range(count)
        right = score_answers(model, data, items, shuffled=False)
        even = len({tuple(data.items.grids(item)) for item in items}) == 1
        shuffled = score_answers(model, data, items, shuffled=True) if even else None
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        texts = [data.items.texts(item) for item in items]
        found: dict[str, Any] = {
            "step": step,
            "right": sum(right),
            "images": count,
            "captions": [
                f"{prompt} {answer}{'' if good else ' (wrong)'}"
                for (prompt, answer), good in zip(texts[:_SHOWN], right, strict=False)
            ],
            "finding": "answers are right"
            + ("" if shuffled is None else f"; {sum(shuffled)} with the image of another question"),
            "right_when_shuffled": None if shuffled is None else sum(shuffled),
            "right_by_guessing": round(guessed(data, items) * count),
        }
        folder = run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        images = [data.items.thumbnail(item).astype(np.float32) / 127.5 - 1.0 for item in items[:_SHOWN]]
        grid = image_grid(images, columns=8, zoom=max(1, _SIDE // len(images[0])))
        write_png(folder / f"step_{step:08}.png", grid)
        write_atomic(folder / f"step_{step:08}.json", json.dumps(found, indent=1) + "\n")


def _documents(config: Config, args: EncoderArgs, tokenizer: Tokenizer) -> tuple[ImageTextSet, ImageTextSet, str]:
    """What is trained on, what is held out, and the name of their index, if they have one."""
    vision = config.vision
    if vision.source == "shapes":
        return ShapeQuestions(vision.items, args), ShapeQuestions(vision.held_out, args, first=vision.items), ""
    path = prepare_index(config, args)
    index = read_text(path)
    lines, counts = index.splitlines(), token_counts(index, path.parent, tokenizer)
    held_out, train = (
        IndexedLines(lines[part], counts[part], args, max_pixels=vision.max_pixels)
        for part in (slice(vision.held_out), slice(vision.held_out, None))
    )
    return train, held_out, index_name(index)


def _args(config: Config) -> EncoderArgs:
    args = None if ":" in config.model.name else model_args(config.model, vocab_size=None)
    if not isinstance(args, EncoderArgs):
        raise ValueError(
            f"model.name={config.model.name!r} has no encoder of images, and the task 'vision' trains one. Name a model that "
            "has one, such as qwen3_vl_2b or llama3_8b_vl, or leave model.task empty."
        )
    return args
