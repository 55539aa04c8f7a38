"""Train the tokenizer and tokenize the corpus of a configuration ahead of a run; or encode its images.

`titan-train run` does this when needed; this command does it on a machine without GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_train.cli.parser import CommandParser
from titan_train.config import DataConfig, TokenizerConfig

if TYPE_CHECKING:
    from rich.console import Console


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = "titan-train data prepare CONFIG [--section.key value ...]"
    parser.add_config()
    arguments, settings = parser.parse_with_settings(words)
    config = parser.read_config(arguments.config, settings)

    from titan_train.task import load_task, task_name

    task = task_name(config)
    if task == "text":
        prepare_sources(config.data, config.tokenizer)
    else:
        load_task(config).prepare(config)
        print(f"the data of the task {task!r} is ready")
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSource:
    """The result for one source."""

    name: str
    folder: str
    train_tokens: int
    validation_tokens: int
    documents: int
    bytes_per_token: float
    bad_documents: int


def prepare_sources(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    cache_dir: str | Path | None = None,
    console: "Console | None" = None,
) -> list[PreparedSource]:
    """Tokenize all text sources of a configuration, and print the result for each.

    Args:
        data: Sources and options.
        tokenizer: Loaded, or trained first.
        cache_dir: Where shards go; None takes the configured place.
        console: Where the result is printed; None takes standard output.

    Raises:
        ValueError: As `prepare` and `build_tokenizer`.
    """
    from rich.table import Table

    from titan_train.data import build_chat_template, build_tokenizer, cache_folder, prepare, show_progress
    from titan_train.terminal import clean_console

    console = console or clean_console()
    with show_progress() as progress:
        built = build_tokenizer(tokenizer, data, cache_dir=cache_dir, progress=progress)
        template = build_chat_template(tokenizer, built)
        folders = prepare(data, built, cache_dir=cache_dir, progress=progress, verify="full", template=template)
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


def _describe(folder: Path) -> PreparedSource:
    from titan_train.data.shards.manifest import read_manifest
    from titan_train.data.shards.prepare import TRAIN, VALIDATION

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
