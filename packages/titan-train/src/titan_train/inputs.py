"""Tokenizer and token shards of a run: prepared once, then opened by every rank.

Preparing needs neither torch nor a process group. The first process (the command line, or any rank under torchrun)
locks what it makes, the tokenizer or a source's shards; others that need the same wait for it and find the work done. No
collective waits, so none times out while a large corpus is tokenized.
"""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_train.config import Config, TokenizerConfig
from titan_train.data import (
    PackedDataset,
    ProgressCallback,
    build_chat_template,
    build_tokenizer,
    cache_folder,
    check_sources,
    open_datasets,
    prepare,
    show_progress,
)
from titan_train.data.tokenizer import is_trained
from titan_train.files import local_path, read_text, write_atomic
from titan_train.run_folder import check_writable, continued_folder, in_folder
from titan_train.task import Task, TaskInputs, task_name
from titan_train.tokenizers import ChatTemplate, LabelBytes, SentencePieceTokenizer, Tokenizer, load_tokenizer
from titan_train.tokenizers.huggingface import TEMPLATE_NAME
from titan_train.tokenizers.protocol import SAVED_NAME
from titan_train.tokenizers.sentencepiece_model import read_pieces

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKENIZER_FOLDER = "tokenizer"
"""Where a run's folder keeps its tokenizer."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a rank reads: the `titan_train.task.TaskInputs` of text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """Writes conversations; None if there is none."""
    train: PackedDataset
    validation: PackedDataset | None
    """None if nothing is held out."""
    label_bytes: LabelBytes
    """Counts the bytes of text that labels stand for."""

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.vocab_size

    def keep(self, run_dir: Path) -> None:
        """Keep the tokenizer."""
        save_tokenizer(run_dir, self.tokenizer, self.template)

    def text_bytes(self, batch: Any) -> "Tensor":
        """UTF-8 bytes of the labels that count."""
        return self.label_bytes(batch.target)

    def sample(self, model: "nn.Module", run_dir: Path, step: int) -> str | None:
        """None: `titan_train.tasks.text` samples."""


def check_same_inputs(inputs: TaskInputs) -> None:
    """Refuse ranks that read other data: what machines hold, or prepared on their own, may differ. Collective.

    Of a stream, the names and sizes of its files are compared.

    Raises:
        ValueError: On every rank, naming those that differ from rank 0.
    """
    from titan_train.exchange import gather_values

    own = {
        "tokenizer": getattr(inputs.train, "tokenizer", ""),
        "data": getattr(inputs.train, "fingerprint", ""),
        "held-out data": getattr(inputs.validation, "fingerprint", ""),
    }
    if isinstance(inputs.train, PackedDataset):
        own |= {f"stream {name!r}": files for name, files in inputs.train.streamed_files().items()}
    every = gather_values(own)
    for what, first in every[0].items():
        found = [of_rank.get(what, "") for of_rank in every]
        if unlike := [rank for rank, value in enumerate(found) if value != first]:
            ranks = f"rank {unlike[0]}" if len(unlike) == 1 else f"{len(unlike)} ranks ({unlike[0]} to {unlike[-1]})"
            raise ValueError(
                f"the {what} of {ranks} of {len(found)} is not that of rank 0: {str(found[unlike[0]])[:16]!r} and "
                f"{str(first)[:16]!r} (fingerprints). Their machines hold or prepared other data. Give every machine the same "
                "files at the same paths (of a glob and of vision.paths the whole path counts), or, of prepared text, one "
                'data.cache_dir that all share; kind="stdlib" reads the library of each machine\'s own Python.'
            )


class GivenInputs(TaskInputs):
    """The inputs of a run whose batches a program gives. The tokenizer of text is still the configuration's."""

    def __init__(self, config: Config, task: Task, train: Any, validation: Any) -> None:
        """Open the tokenizer; ``train`` and ``validation`` are what `titan_train.train.given.build_loader` takes.

        Raises:
            ValueError: The configuration would train one on its own sources, which are not read.
        """
        self.train, self.validation = train, validation
        self.tokenizer, self._template, self._label_bytes = None, None, None
        self.vocab_size = task.vocab_size(config)
        if "cu_seqlens" in task.keywords:  # text
            if config.tokenizer.trains_here:
                raise ValueError(
                    f"tokenizer.kind={config.tokenizer.kind!r} would be trained on data.sources, and data is given instead. Set "
                    "the section tokenizer to the one that made the ids: 'bytes', or a path."
                )
            self.tokenizer = build_tokenizer(config.tokenizer, config.data)
            self._template = build_chat_template(config.tokenizer, self.tokenizer)
            self._label_bytes = LabelBytes(self.tokenizer)
            if self.vocab_size is None:  # a task may have tokens beside the tokenizer's, those of images
                self.vocab_size = self.tokenizer.vocab_size

    def keep(self, run_dir: Path) -> None:
        if self.tokenizer is not None:
            save_tokenizer(run_dir, self.tokenizer, self._template)

    def text_bytes(self, batch: Any) -> "Tensor | None":
        return None if self._label_bytes is None else self._label_bytes(batch.target)


def check_inputs(config: Config) -> None:
    """Refuse what `prepare_inputs` would refuse at its start. Nothing is written.

    Raises:
        ValueError: A source has no files, the tokenizer's file is missing, or the cache cannot be written.
    """
    check_sources(config.data)
    if not learned_tokenizer(config).trains_here:
        build_chat_template(config.tokenizer, run_tokenizer(config))
    check_writable(cache_folder(config.data), "data.cache_dir")


def has_tokenizer(config: Config) -> bool:
    """Whether the tokenizer needs not be trained first."""
    asked = learned_tokenizer(config)
    return not asked.trains_here or is_trained(asked, config.data)


def learned_tokenizer(config: Config) -> TokenizerConfig:
    """The section ``tokenizer``, with the path of the vocabulary that the run's weights have learned, where it would train one.

    A vocabulary is trained once for a run. The text may change later (a stream grows, a branch takes another mix), and a
    vocabulary trained anew would give every embedding another token's meaning. So a run with a checkpoint takes the one in its
    own folder, and a branch its parent's.
    """
    run_dir = continued_folder(config) if config.tokenizer.trains_here else None
    if run_dir is None or not (run_dir / TOKENIZER_FOLDER / SAVED_NAME).is_file():
        return config.tokenizer
    return replace(config.tokenizer, path=str(run_dir / TOKENIZER_FOLDER))


def run_tokenizer(config: Config, *, progress: ProgressCallback | None = None) -> Tokenizer:
    """The tokenizer of a run: `build_tokenizer` of `learned_tokenizer`.

    Raises:
        ValueError: As `build_tokenizer`; or the weights have learned a vocabulary of another size or algorithm.
    """
    asked = learned_tokenizer(config)
    tokenizer = build_tokenizer(asked, config.data, progress=progress)
    if isinstance(tokenizer, SentencePieceTokenizer) and asked is not config.tokenizer:
        size, kind = tokenizer.vocab_size, read_pieces(tokenizer.model).kind
        fits = size == asked.vocab_size or (kind == "unigram" and size < asked.vocab_size)  # a short text gives fewer
        if kind != asked.model_type or not fits:
            run, keeps = Path(asked.path).parent, ""
            if size == asked.vocab_size:
                keeps = (
                    f" To begin that one with these weights and new embeddings, set model.init='run:{run}' and "
                    "model.init_changes=['tokenizer']."
                )
            elif size < asked.vocab_size:
                keeps = (
                    f" To begin that one with these weights and a larger vocabulary, run `titan-train export {run} --out DIR`, "
                    "and set model.name and model.init to 'hf:DIR', model.init_changes=['tokenizer', 'vocab_size'] and "
                    f"model.args.vocab_size={asked.vocab_size}."
                )
            raise ValueError(
                f"tokenizer.vocab_size={asked.vocab_size} and model_type={asked.model_type!r}, but the weights have learned "
                f"the vocabulary in {asked.path}: {size} ids, {kind}. Restore these settings, or begin from nothing under "
                f"another run.name, without checkpoint.start_from.{keeps}"
            )
    return tokenizer


def prepare_inputs(config: Config, run_dir: Path | str | None = None, *, quiet: bool = False) -> None:
    """Train the tokenizer and tokenize the corpus, unless the cache has both.

    Args:
        config: The run's configuration.
        run_dir: The run's folder, as a `titan_train.Trainer` gets it; the default is ``run.dir/run.name``.
        quiet: Show no progress.

    Raises:
        ValueError: A source or the tokenizer cannot work; malformed input names file, line and byte.
    """
    config = config if run_dir is None else in_folder(config, Path(run_dir))
    with _progress(quiet) as progress:
        tokenizer = run_tokenizer(config, progress=progress)
        prepare(config.data, tokenizer, progress=progress, template=build_chat_template(config.tokenizer, tokenizer))


def open_inputs(config: Config) -> Inputs:
    """Open what `prepare_inputs` made.

    Raises:
        ValueError: It was not prepared, or the cache is damaged.
    """
    tokenizer = run_tokenizer(config)
    template = build_chat_template(config.tokenizer, tokenizer)
    train, validation = open_datasets(
        config.data, tokenizer, seq_len=config.model.seq_len, seed=config.run.seed, template=template
    )
    return Inputs(tokenizer, template, train, validation, LabelBytes(tokenizer))


def prepared_rows(config: Config, rows: int) -> list[list[int]] | None:
    """The lengths of the documents in each of a run's first ``rows`` rows, in tokens; padding counts as a document.

    Returns:
        None where that is not known: the corpus is not prepared, or is a stream; the task is not text; documents are not kept
        apart.
    """
    data = config.data
    if task_name(config) != "text" or not data.document_mask or any(source.stream for source in data.sources):
        return None
    try:
        if not has_tokenizer(config):
            return None
        dataset = open_inputs(config).train
        starts = dataset.document_starts(range(rows))
    except ValueError:  # not prepared, or not for as many rows
        return None
    ends = [[0, *places[places < dataset.seq_len].tolist(), dataset.seq_len] for places in starts]
    return [[b - a for a, b in pairwise(row)] for row in ends]


def save_tokenizer(run_dir: Path, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
    """Keep the tokenizer and its chat template in the run's folder, so that the run can be used where its sources are not."""
    folder = tokenizer.save(run_dir / TOKENIZER_FOLDER)
    if template is not None:
        write_atomic(folder / TEMPLATE_NAME, template.source)


def load_saved_tokenizer(run_dir: Path, config: Config) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and chat template of a run: those in its folder, else those that its configuration names.

    Raises:
        ValueError: They are neither in the folder nor where the configuration says, or the run is not of text.
    """
    folder = run_dir / TOKENIZER_FOLDER
    if (task := task_name(config)) != "text" and not folder.is_dir():
        raise ValueError(
            f"{run_dir} trained {config.model.name} on {task!r}, not on text: there is no tokenizer and nothing to continue. "
            f"What it samples is in {run_dir / 'samples'}"
            + (" and `titan-train generate --out images.png` samples more." if task == "diffusion" else ".")
        )
    if not folder.is_dir():
        tokenizer = build_tokenizer(config.tokenizer, config.data)
        return tokenizer, build_chat_template(config.tokenizer, tokenizer)
    tokenizer = load_tokenizer(folder)
    template = folder / TEMPLATE_NAME
    source = read_text(template) if template.is_file() else ""
    return tokenizer, ChatTemplate.of(tokenizer, source)


def vocab_size_without_training(config: Config) -> int | None:
    """The vocabulary's size as far as it is known before the tokenizer is trained or its file is there.

    Returns:
        None where only the tokenizer's file could tell: the model's own default then holds.
    """
    if config.tokenizer.trains_here:
        return config.tokenizer.vocab_size
    if config.tokenizer.path and not local_path(config.tokenizer.path).exists():
        return None
    return build_tokenizer(config.tokenizer, config.data).vocab_size


@contextlib.contextmanager
def _progress(quiet: bool) -> Generator[ProgressCallback | None]:
    if quiet:
        yield None
    else:
        with show_progress() as callback:
            yield callback
