"""Tokenizer and token shards of a run: prepared once, then opened by every rank.

Preparing needs neither torch nor a process group. The first process (the command line, or any rank under torchrun)
locks the cache and does the work; the others wait for the lock and find the work done. No collective waits, so none
times out while a large corpus is tokenized.
"""

import contextlib
import math
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan_train.config import Config
from titan_train.data import (
    PackedDataset,
    ProgressCallback,
    build_chat_template,
    build_tokenizer,
    cache_folder,
    open_datasets,
    prepare,
    show_progress,
)
from titan_train.tokenizers import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a rank reads."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """Writes conversations; None if there is none."""
    train: PackedDataset
    validation: PackedDataset | None
    """None if nothing is held out."""
    bytes_per_token: float
    """UTF-8 bytes an average training token stands for; 0 where it is not known."""

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in nats per token as bits per UTF-8 byte of text, by the average token."""
        return loss / (math.log(2) * self.bytes_per_token) if self.bytes_per_token else None


def prepare_inputs(config: Config, *, quiet: bool = False) -> None:
    """Train the tokenizer and tokenize the corpus, unless the cache has both. Shows progress.

    Raises:
        ValueError: A source or the tokenizer cannot work; malformed input names file, line and byte.
    """
    with _only_one(cache_folder(config.data)), _progress(quiet) as progress:
        tokenizer = build_tokenizer(config.tokenizer, config.data, progress=progress)
        prepare(config.data, tokenizer, progress=progress, template=build_chat_template(config.tokenizer, tokenizer))


def open_inputs(config: Config) -> Inputs:
    """Open what `prepare_inputs` made.

    Raises:
        ValueError: It was not prepared, or the cache is damaged.
    """
    tokenizer = build_tokenizer(config.tokenizer, config.data)
    template = build_chat_template(config.tokenizer, tokenizer)
    train, validation = open_datasets(
        config.data, tokenizer, seq_len=config.model.seq_len, seed=config.run.seed, template=template
    )
    return Inputs(tokenizer, template, train, validation, _bytes_per_token(tokenizer, train))


def vocab_size_without_training(config: Config) -> int | None:
    """The vocabulary's size as far as it is known before the tokenizer is trained or its file is there.

    Returns:
        None where only the tokenizer's file could tell: the model's own default then holds.
    """
    if config.tokenizer.trains_here:
        return config.tokenizer.vocab_size
    if config.tokenizer.path and not Path(config.tokenizer.path).exists():
        return None
    return build_tokenizer(config.tokenizer, config.data).vocab_size


def _bytes_per_token(tokenizer: Tokenizer, dataset: PackedDataset) -> float:
    """Measured on the first samples: every token knows its bytes."""
    count = min(64, dataset.num_windows)
    ids, times = np.unique(dataset.tokens(np.arange(count, dtype=np.int64))[:, :-1], return_counts=True)
    lengths = np.array([len(tokenizer.token_bytes(int(i))) for i in ids])
    return float((lengths * times).sum() / times.sum())


@contextlib.contextmanager
def _only_one(folder: Path) -> Generator[None]:
    import fcntl  # not on Windows

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress(quiet: bool) -> Generator[ProgressCallback | None]:
    if quiet:
        yield None
    else:
        with show_progress() as callback:
            yield callback
