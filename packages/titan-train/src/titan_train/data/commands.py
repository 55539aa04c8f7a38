"""What `titan-train tokenizer train` and `titan-train prepare` do, as functions that a command line calls."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from titan_train.config.data import DataConfig, SourceConfig, TokenizerConfig
from titan_train.data.build import build_tokenizer, cache_folder, prepare
from titan_train.data.progress import show_progress
from titan_train.data.shards.manifest import read_manifest
from titan_train.data.shards.prepare import TRAIN, VALIDATION
from titan_train.data.sources.texts import held_out_texts, training_texts
from titan_train.tokenizers import Tokenizer, train_sentencepiece

# Held-out text that a new tokenizer is judged on, at most.
_JUDGED_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerReport:
    """How good a trained tokenizer is, on text it was not trained on."""

    folder: str
    vocab_size: int
    train_s: float
    """Seconds of reading and training."""
    documents: int
    """Held-out documents it was judged on."""
    round_trips: int
    """How many of them came back unchanged from encode and decode."""
    bytes_per_token: float
    tokens_per_s: float
    """Encoding on one thread."""


def train_tokenizer_command(
    sources: Sequence[SourceConfig],
    *,
    output_dir: str | Path,
    vocab_size: int = 8192,
    model_type: Literal["bpe", "unigram"] = "bpe",
    max_bytes: int = 32 * 2**20,
    held_out_fraction: float = 0.05,
    console: Console | None = None,
) -> TokenizerReport:
    """Train a SentencePiece tokenizer, judge it on held-out documents, and print the result.

    Args:
        sources: Text to train on.
        output_dir: Folder for the tokenizer; `tokenizer.path` of a run can name it.
        vocab_size: Pieces, 300 or more.
        model_type: bpe or unigram.
        max_bytes: Text to train on, at most.
        held_out_fraction: Share of the documents kept for judging it.
        console: Where the result is printed; None takes standard output.

    Raises:
        ValueError: If nothing can be read, or the text cannot give the vocabulary.
    """
    console = console or Console()
    data = DataConfig(sources=tuple(sources), validation_fraction=held_out_fraction)
    started = time.monotonic()
    with show_progress() as progress:
        texts = training_texts(data.sources, data, max_bytes=max_bytes, progress=progress)
        tokenizer = train_sentencepiece(texts, vocab_size, output_dir, model_type=model_type)
    train_s = time.monotonic() - started
    judged = list(held_out_texts(data.sources, data, max_bytes=int(_JUDGED_BYTES / max(held_out_fraction, 1e-6))))
    report = _judge(tokenizer, judged, folder=str(output_dir), train_s=train_s)
    table = Table(title=f"tokenizer {output_dir}", show_header=False)
    table.add_row("vocabulary", f"{report.vocab_size} pieces ({model_type}), trained in {report.train_s:.1f} s")
    if judged:
        table.add_row("held-out text", f"{report.bytes_per_token:.2f} bytes/token over {report.documents} documents")
        table.add_row("round trip", f"{report.round_trips} of {report.documents} documents come back unchanged")
        table.add_row("encoding", f"{report.tokens_per_s / 1e6:.2f} M tokens/s on one thread")
    else:
        table.add_row("held-out text", "none: raise held_out_fraction to judge the tokenizer")
    console.print(table)
    console.print(f'use it with: [tokenizer] kind = "sentencepiece", path = "{output_dir}"', markup=False)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSource:
    """What one source gave."""

    name: str
    folder: str
    train_tokens: int
    validation_tokens: int
    documents: int
    bytes_per_token: float
    bad_documents: int


def prepare_command(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    cache_dir: str | Path | None = None,
    console: Console | None = None,
) -> list[PreparedSource]:
    """Tokenize all text sources of a configuration, and print what came of each.

    Args:
        data: Sources and options.
        tokenizer: Loaded, or trained first.
        cache_dir: Where shards go; None takes the configured place.
        console: Where the result is printed; None takes standard output.

    Raises:
        ValueError: As `prepare` and `build_tokenizer`.
    """
    console = console or Console()
    with show_progress() as progress:
        built = build_tokenizer(tokenizer, data, cache_dir=cache_dir, progress=progress)
        folders = prepare(data, built, cache_dir=cache_dir, progress=progress)
    results = [_describe(folder) for folder in folders]
    table = Table(title=f"prepared in {cache_folder(data) if cache_dir is None else cache_dir}")
    for heading in ("source", "train tokens", "held out", "documents", "bytes/token", "left out", "folder"):
        table.add_column(heading, overflow="fold")
    for result in results:
        table.add_row(
            result.name,
            f"{result.train_tokens:,}",
            f"{result.validation_tokens:,}",
            f"{result.documents:,}",
            f"{result.bytes_per_token:.2f}",
            f"{result.bad_documents}",
            Path(result.folder).name,
        )
    console.print(table)
    return results


def _judge(tokenizer: Tokenizer, texts: Sequence[str], *, folder: str, train_s: float) -> TokenizerReport:
    started = time.monotonic()
    encoded = tokenizer.encode_batch(texts)
    encode_s = time.monotonic() - started
    tokens = sum(ids.size for ids in encoded)
    return TokenizerReport(
        folder=folder,
        vocab_size=tokenizer.vocab_size,
        train_s=train_s,
        documents=len(texts),
        round_trips=sum(tokenizer.decode(ids) == text for ids, text in zip(encoded, texts, strict=True)),
        bytes_per_token=sum(len(text.encode()) for text in texts) / tokens if tokens else 0.0,
        tokens_per_s=tokens / encode_s if encode_s > 0 else 0.0,
    )


def _describe(folder: Path) -> PreparedSource:
    manifest = read_manifest(folder)
    tokens = manifest.num_tokens(TRAIN) + manifest.num_tokens(VALIDATION)
    return PreparedSource(
        name=manifest.source,
        folder=str(folder),
        train_tokens=manifest.num_tokens(TRAIN),
        validation_tokens=manifest.num_tokens(VALIDATION),
        documents=manifest.num_documents(TRAIN) + manifest.num_documents(VALIDATION),
        bytes_per_token=sum(manifest.text_bytes.values()) / tokens if tokens else 0.0,
        bad_documents=sum(manifest.bad.values()),
    )
