"""Train a SentencePiece tokenizer: `titan-train data tokenizer --out DIR [FILE ...]`.

Reads text files, .jsonl, .jsonl.gz and .jsonl.zst; without files, the source text of Python's standard library. Judges
the result on held-out documents: bytes per token, round trip.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from titan_train.cli.parser import CommandParser, integer, number

if TYPE_CHECKING:
    from rich.console import Console

    from titan_train.config import SourceConfig
    from titan_train.tokenizers import Tokenizer

# Held-out text that a new tokenizer is judged on, at most.
_JUDGED_BYTES = 8 * 2**20


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("files", metavar="FILE", nargs="*", help="text or JSON lines; folders and globs too")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the tokenizer; tokenizer.path can name it"
    )
    parser.add_argument("--vocab-size", type=integer(1, 10**7), default=8192, metavar="N", help="pieces (default 8192)")
    parser.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe", help="default bpe")
    parser.add_argument("--text-key", default="text", help="key of the document in a JSON line (default text)")
    parser.add_argument(
        "--max-mb", type=number(0, 1e6), default=32.0, metavar="MB", help="text to train on, at most (default 32)"
    )
    arguments = parser.parse_intermixed_args(words)  # files may stand after options

    from titan_train.config import SourceConfig

    if arguments.files:
        lines = [file for file in arguments.files if ".jsonl" in file]
        texts = [file for file in arguments.files if ".jsonl" not in file]
        sources: list[SourceConfig] = []
        if lines:
            sources.append(SourceConfig(name="lines", kind="jsonl", paths=tuple(lines), text_key=arguments.text_key))
        if texts:
            sources.append(SourceConfig(name="texts", kind="text", paths=tuple(texts)))
    else:
        sources = [SourceConfig(name="stdlib", kind="stdlib")]
    train_tokenizer(
        sources,
        output_dir=arguments.out,
        vocab_size=arguments.vocab_size,
        model_type=arguments.model_type,
        max_bytes=int(arguments.max_mb * 1e6),
    )
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerReport:
    """Quality of a trained tokenizer on held-out text."""

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


def train_tokenizer(
    sources: "Sequence[SourceConfig]",
    *,
    output_dir: str | Path,
    vocab_size: int = 8192,
    model_type: Literal["bpe", "unigram"] = "bpe",
    max_bytes: int = 32 * 2**20,
    held_out_fraction: float = 0.05,
    console: "Console | None" = None,
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
    from rich.table import Table

    from titan_train.config import DataConfig
    from titan_train.data import show_progress
    from titan_train.data.sources.texts import held_out_texts, training_texts
    from titan_train.terminal import clean_console
    from titan_train.tokenizers import train_sentencepiece

    console = console or clean_console()
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


def _judge(tokenizer: "Tokenizer", texts: Sequence[str], *, folder: str, train_s: float) -> TokenizerReport:
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
