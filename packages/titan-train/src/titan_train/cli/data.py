"""Commands on what a run reads: prepare it, show it, train a tokenizer, load from a hub. Each function is one command."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from titan_train.cli.parser import CommandParser, integer, number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from titan_train.config import DataConfig, SourceConfig, TokenizerConfig
    from titan_train.data.loader.batch import HostBatch
    from titan_train.data.shards.manifest import DataManifest
    from titan_train.inputs import Inputs

IGNORED = -100
_JUDGED_BYTES = 8 * 2**20  # held-out text that a new tokenizer is judged on, at most


def prepare(parser: CommandParser, words: Sequence[str]) -> int:
    """Train the tokenizer and tokenize the corpus of a configuration ahead of a run; or encode its images.

    `titan-train run` does this when needed; this command does it on a machine without GPUs.
    """
    parser.usage = "titan-train data prepare CONFIG [--section.key value ...]"
    parser.add_config()
    arguments, settings = parser.parse_with_settings(words)
    config = parser.read_config(arguments.config, settings)

    from titan_train.inputs import check_inputs, learned_tokenizer
    from titan_train.task import load_task, task_name

    if (task := task_name(config)) == "text":
        check_inputs(config)  # refuses a vocabulary other than the one that the run's weights have learned
        prepare_sources(config.data, learned_tokenizer(config))
    else:
        load_task(config).prepare(config)
        print(f"the data of the task {task!r} is ready")
    return 0


def prepare_sources(
    data: "DataConfig",
    tokenizer: "TokenizerConfig",
    *,
    cache_dir: str | Path | None = None,
    console: "Console | None" = None,
) -> "list[DataManifest]":
    """Tokenize all text sources of a configuration, and print the result for each.

    Args:
        data: Sources and options.
        tokenizer: Loaded, or trained first.
        cache_dir: Where shards go; None takes the configured place.
        console: Where the result is printed; None takes standard output.

    Returns:
        What each source was tokenized into.

    Raises:
        ValueError: As `titan_train.data.prepare` and `titan_train.data.build_tokenizer`.
    """
    from rich.table import Table

    from titan_train.data import build_chat_template, build_tokenizer, cache_folder, prepare, show_progress
    from titan_train.data.shards.manifest import read_manifest
    from titan_train.data.shards.prepare import TRAIN, VALIDATION
    from titan_train.terminal import clean_console

    with show_progress() as progress:
        built = build_tokenizer(tokenizer, data, cache_dir=cache_dir, progress=progress)
        template = build_chat_template(tokenizer, built)
        folders = prepare(data, built, cache_dir=cache_dir, progress=progress, verify="full", template=template)
    table = Table(title=f"prepared in {cache_folder(data) if cache_dir is None else cache_dir}")
    for heading in ("source", "train tokens", "held out", "documents", "bytes/token", "left out", "folder"):
        table.add_column(heading, overflow="fold")
    manifests = [read_manifest(folder) for folder in folders]
    for folder, found in zip(folders, manifests, strict=True):
        train, held_out = found.num_tokens(TRAIN), found.num_tokens(VALIDATION)
        table.add_row(
            found.source,
            f"{train:,}",
            f"{held_out:,}",
            f"{found.num_documents(TRAIN) + found.num_documents(VALIDATION):,}",
            f"{sum(found.text_bytes.values()) / max(1, train + held_out):.2f}",
            f"{sum(found.bad.values())}",
            folder.name,
        )
    (console or clean_console()).print(table)
    return manifests


def show(parser: CommandParser, words: Sequence[str]) -> int:
    """Show samples of a configuration as the model reads them.

    Prepares the data as `run` would, and prints the first samples as text. What the model is not trained to predict (the other
    turns of a chat, a document's first token, padding) is dim on a terminal, and in double brackets elsewhere.
    """
    parser.usage = "titan-train data show CONFIG [--samples N] [--first N] [--section.key value ...]"
    parser.add_config()
    parser.add_argument("--samples", type=integer(1, 1000), default=2, metavar="N", help="samples to show (default 2)")
    parser.add_argument("--first", type=integer(0), default=0, metavar="N", help="number of the first (default 0)")
    arguments, settings = parser.parse_with_settings(words)
    config = parser.read_config(arguments.config, settings)

    from titan_train.inputs import open_inputs, prepare_inputs
    from titan_train.task import task_name
    from titan_train.terminal import clean_console

    if (task := task_name(config)) != "text":
        raise ValueError(
            f"data show is for text, but {config.model.name} is trained on {task!r}. `titan-train data prepare` reads and checks "
            "such data; the run's folder shows what each validation samples."
        )
    prepare_inputs(config)
    inputs = open_inputs(config)
    console = clean_console(highlight=False, soft_wrap=True)
    try:
        for number in range(arguments.first, arguments.first + arguments.samples):
            for line in shown(inputs, number, marks=not console.is_terminal):
                console.print(line)
    finally:
        inputs.train.close()
    return 0


def shown(inputs: "Inputs", number: int, *, marks: bool) -> "Iterator[Text]":
    """The lines that show sample ``number``; with ``marks``, what is not learned stands in double brackets, not only dim."""
    import numpy as np
    from rich.text import Text

    dataset = inputs.train
    batch = dataset.build_batch(np.array([number], dtype=np.int64), ignore_index=IGNORED, samples_consumed=number + 1)
    source = dataset.source_names[int(dataset.locate([number]).source[0])]
    learned = int((batch.labels[0] != IGNORED).sum())
    bounds = _bounds(batch)
    yield Text(
        f"sample {number} of {source!r}: {dataset.seq_len} tokens, {learned} labels ({learned / dataset.seq_len:.0%}), "
        f"{len(bounds) - 1} documents",
        style="bold",
    )
    for start, end in pairwise(bounds):
        yield _document(inputs, batch, start, end, marks)
    yield Text("")


def _document(inputs: "Inputs", batch: "HostBatch", start: int, end: int, marks: bool) -> "Text":
    from rich.text import Text

    # the label of token i is token i + 1: a document's first token is nobody's label
    is_label = [i > start and int(batch.labels[0, i - 1]) != IGNORED for i in range(start, end)]
    text = Text().append(f"-- tokens {start} to {end}\n", style="cyan")
    for learned, places in groupby(range(start, end), key=lambda i: is_label[i - start]):
        part = _text(inputs, [int(batch.tokens[0, i]) for i in places])
        text.append(part if learned or not marks else f"[[{part}]]", style="" if learned else "dim")
    last = int(batch.labels[0, end - 1])
    if last != IGNORED:  # the label behind the last input
        text.append(_text(inputs, [last]))
    return text


def _text(inputs: "Inputs", ids: list[int]) -> str:
    """Ids as text with the names of special tokens, and control characters visible; repeated padding once."""
    names = {number: name for name, number in inputs.tokenizer.special_ids.items()}
    parts: list[str] = []
    for special, run in groupby(ids, key=names.get):
        some = list(run)
        if special is None:
            joined = b"".join(inputs.tokenizer.token_bytes(i) for i in some).decode(errors="replace")
            parts.append("".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in joined))
        else:
            parts.append(special if len(some) < 4 else f"{special} x {len(some)}")
    return "".join(parts)


def _bounds(batch: "HostBatch") -> list[int]:
    if batch.cu_seqlens is None:
        return [0, batch.tokens.shape[1]]
    return sorted({int(bound) for bound in batch.cu_seqlens[0]})


def tokenizer(parser: CommandParser, words: Sequence[str]) -> int:
    """Train a SentencePiece tokenizer on text files, .jsonl, .jsonl.gz and .jsonl.zst.

    Without files, it is trained on the source text of Python's standard library. The result is judged on held-out documents:
    bytes per token, round trip.
    """
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

    lines = tuple(file for file in arguments.files if ".jsonl" in file.lower())
    texts = tuple(file for file in arguments.files if ".jsonl" not in file.lower())
    sources = [SourceConfig(name="lines", kind="jsonl", paths=lines, text_key=arguments.text_key)] if lines else []
    sources += [SourceConfig(name="texts", kind="text", paths=texts)] if texts else []
    train_tokenizer(
        sources or [SourceConfig(name="stdlib", kind="stdlib")],
        output_dir=arguments.out,
        vocab_size=arguments.vocab_size,
        model_type=arguments.model_type,
        max_bytes=int(arguments.max_mb * 1e6),
    )
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerReport:
    """Quality of a trained tokenizer on held-out text."""

    vocab_size: int
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

    data = DataConfig(sources=tuple(sources), validation_fraction=held_out_fraction)
    started = time.monotonic()
    with show_progress() as progress:
        texts = training_texts(data.sources, data, max_bytes=max_bytes, progress=progress)
        tokenizer = train_sentencepiece(texts, vocab_size, output_dir, model_type=model_type)
    train_s = time.monotonic() - started
    judged = list(held_out_texts(data.sources, data, max_bytes=int(_JUDGED_BYTES / max(held_out_fraction, 1e-6))))
    started = time.monotonic()
    encoded = tokenizer.encode_batch(judged)
    encode_s = time.monotonic() - started
    tokens = sum(ids.size for ids in encoded)
    report = TokenizerReport(
        vocab_size=tokenizer.vocab_size,
        documents=len(judged),
        round_trips=sum(tokenizer.decode(ids) == text for ids, text in zip(encoded, judged, strict=True)),
        bytes_per_token=sum(len(text.encode()) for text in judged) / tokens if tokens else 0.0,
        tokens_per_s=tokens / encode_s if encode_s > 0 else 0.0,
    )
    table = Table(title=f"tokenizer {output_dir}", show_header=False)
    table.add_row("vocabulary", f"{report.vocab_size} pieces ({model_type}), trained in {train_s:.1f} s")
    if judged:
        table.add_row("held-out text", f"{report.bytes_per_token:.2f} bytes/token over {report.documents} documents")
        table.add_row("round trip", f"{report.round_trips} of {report.documents} documents come back unchanged")
        table.add_row("encoding", f"{report.tokens_per_s / 1e6:.2f} M tokens/s on one thread")
    else:
        table.add_row("held-out text", "none: raise held_out_fraction to judge the tokenizer")
    console = console or clean_console()
    console.print(table)
    console.print(f'use it with: [tokenizer] kind = "sentencepiece", path = "{output_dir}"', markup=False)
    return report


def download(parser: CommandParser, words: Sequence[str]) -> int:
    """Load a model, a tokenizer or a data set from the Hugging Face hub: `titan-train data download hf:ORG/NAME --out DIR`.

    Loads only what training reads: weights as safetensors (never pickles), configuration, tokenizer and chat template; of a
    data set (`hf:datasets/ORG/NAME`) its Parquet, Arrow, JSON lines and text files. An interrupted download continues. Every
    file is compared with its hash. The environment variable HF_ENDPOINT names another server, HF_TOKEN an account (extra `hf`).
    """
    parser.add_argument(
        "repository", metavar="hf:REPO", help="hf:ORG/NAME of a model, hf:datasets/ORG/NAME of a data set"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--revision", default=None, metavar="REV", help="branch, tag or commit (default: the main branch)"
    )
    parser.add_argument(
        "--only",
        choices=["weights", "tokenizer", "config"],
        default=None,
        help="of a model, this part only (default: all)",
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="further files of a model, or the only files of a data set, such as 'data/train-*'; may be repeated",
    )
    arguments = parser.parse_args(words)
    if not arguments.repository.startswith("hf:"):
        raise ValueError(f"{arguments.repository!r} is not a repository. Write hf:{arguments.repository}.")

    from titan_train.hub import download

    loaded = download(
        arguments.repository,
        arguments.out,
        revision=arguments.revision,
        parts=("weights", "tokenizer", "config") if arguments.only is None else (arguments.only,),
        include=arguments.include,
        tell=print,
    )
    for file in loaded.files:
        print(f"  {file.name}  {file.size:,} bytes  sha256 {file.sha256[:16]}")
    print(f"{loaded.folder}: {len(loaded.files)} files, {loaded.size / 1e6:,.1f} MB, every hash compared")
    return 0
