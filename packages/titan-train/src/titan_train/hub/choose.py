"""Which files of a repository are needed: weights as safetensors, configuration, tokenizer; or the files of a data set.

A pickle runs code when it is read, so files that may be one are never loaded, and neither is Python code.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Literal

Part = Literal["weights", "tokenizer", "config"]

_CONFIG = ("config.json", "generation_config.json")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tiktoken.model",
    "tekken.json",
)  # fmt: skip
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_INDEX = "*.safetensors.index.json"
_DATA = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".txt")
_NEVER = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".h5", ".msgpack", ".joblib", ".py", ".so")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """One file of a repository."""

    name: str
    """Path in the repository."""
    size: int
    """Bytes."""
    sha256: str
    """Of the content (hex), as the hub states it for large files; empty for small ones."""
    blob: str
    """Git's hash of the content (hex), as the hub states it."""


def choose_model_files(files: Sequence[RepoFile], parts: Sequence[Part], include: Sequence[str]) -> list[RepoFile]:
    """Files of a model.

    Args:
        files: All files of the repository.
        parts: What is wanted.
        include: Globs of further files; those that may run code are refused.

    Raises:
        ValueError: If the repository has no weights as safetensors, or no tokenizer, though they are wanted; or as
            `check_names`.
    """
    wanted: list[RepoFile] = []
    if "weights" in parts:
        wanted += _weights(files)
    if "weights" in parts or "config" in parts:
        wanted += _named(files, _CONFIG)
    if "tokenizer" in parts:
        found = _named(files, _TOKENIZER)
        if not found and parts == ["tokenizer"]:
            raise ValueError(f"the repository has no tokenizer files: it has {_listing(files)}.")
        wanted += found
        wanted += [file for file in files if _TEMPLATES.fullmatch(file.name)]
    return check_names([*wanted, *_included(files, include)])


def choose_data_files(files: Sequence[RepoFile], include: Sequence[str]) -> list[RepoFile]:
    """Files of a data set: Parquet, Arrow, JSON lines and text, or those that ``include`` names.

    Raises:
        ValueError: If there are none; or as `check_names`.
    """
    if include:
        return check_names(_included(files, include))
    found = [file for file in files if _suffix(file.name) in _DATA]
    if not found:
        raise ValueError(
            f"the repository has no files that a source can read ({', '.join(_DATA)}): it has {_listing(files)}. "
            "Convert it, or name a branch that holds Parquet with --revision."
        )
    return check_names(found)


def check_names(files: Iterable[RepoFile]) -> list[RepoFile]:
    """The files, each once, by name.

    Raises:
        ValueError: If a name leads out of the folder, or the file may run code when it is read.
    """
    for file in files:
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts or "\\" in file.name or not path.parts:
            raise ValueError(f"the repository lists the file {file.name!r}, which lies outside it. Nothing was loaded.")
        if _suffix(file.name) in _NEVER:
            raise ValueError(
                f"{file.name!r} may run code when it is read, so it is never loaded. Ask the publisher for safetensors, "
                "Parquet or JSON lines."
            )
    return sorted({file.name: file for file in files}.values(), key=lambda file: file.name)


def _weights(files: Sequence[RepoFile]) -> list[RepoFile]:
    root = [file for file in files if "/" not in file.name]
    tensors = [file for file in root if file.name.endswith(".safetensors")]
    # some repositories hold the same weights twice, under the names of two libraries
    usual = [file for file in tensors if file.name.startswith("model")]
    if not tensors:
        pickles = [file.name for file in files if _suffix(file.name) in (".bin", ".pt", ".pth", ".ckpt")]
        detail = f"only as {', '.join(pickles[:3])}, which run code when they are read" if pickles else "at all"
        raise ValueError(
            f"the repository does not have its weights as safetensors, {detail}. Use another revision, or ask for a "
            "conversion; `--only tokenizer` loads the tokenizer alone."
        )
    return (usual or tensors) + _named(files, (_INDEX,))


def _named(files: Sequence[RepoFile], patterns: Sequence[str]) -> list[RepoFile]:
    return [file for file in files if "/" not in file.name and any(fnmatch(file.name, p) for p in patterns)]


def _included(files: Sequence[RepoFile], include: Sequence[str]) -> list[RepoFile]:
    found: list[RepoFile] = []
    for pattern in include:
        matching = [file for file in files if fnmatch(file.name, pattern)]
        if not matching:
            raise ValueError(f"--include {pattern!r} matches no file: the repository has {_listing(files)}.")
        found += matching
    return found


def _suffix(name: str) -> str:
    path = PurePosixPath(name)
    return PurePosixPath(path.stem).suffix.lower() if path.suffix in (".gz", ".zst") else path.suffix.lower()


def _listing(files: Sequence[RepoFile]) -> str:
    names = [file.name for file in files]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "no files"
