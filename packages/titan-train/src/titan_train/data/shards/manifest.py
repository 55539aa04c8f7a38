"""The manifest of a prepared source: what its shards hold, where the text came from, what was left out.

It is written last. A folder without it is unfinished, and is never read.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from titan_train.data.prepared import content_key
from titan_train.data.shards.format import ShardInfo
from titan_train.files import read_text, write_atomic

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataManifest:
    """One prepared source."""

    source: str
    """Name of the source."""
    tokenizer: str
    """Fingerprint of the tokenizer (hex)."""
    vocab_size: int
    bos_id: int | None
    """Token that begins every document, None if none was added."""
    eos_id: int
    """Token that ends every document."""
    splits: Mapping[str, tuple[ShardInfo, ...]]
    """Shards of "train" and of "validation", in order."""
    text_bytes: Mapping[str, int]
    """UTF-8 bytes of the documents of each split: with the tokens, bytes per token."""
    options: Mapping[str, Any]
    """Settings that decided the tokens."""
    files: tuple[Mapping[str, Any], ...]
    """Files read: path, size (bytes) and sha256 of each."""
    bad: Mapping[str, int]
    """Malformed documents left out, by class."""
    label_mask: bool = False
    """Whether ids that are not learned are stored with ``vocab_size`` added, as those of a chat's other turns are."""

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the tokens and document ends; file names, times and machines do not enter."""
        content: dict[str, Any] = {
            "format": _FORMAT,
            "tokenizer": self.tokenizer,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "splits": {
                split: [[s.tokens, s.documents, s.tokens_sha256, s.index_sha256] for s in shards]
                for split, shards in self.splits.items()
            },
        }
        if self.label_mask:
            content["label_mask"] = True
        return content_key(content)

    def num_tokens(self, split: str) -> int:
        """Tokens of one split."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    def num_documents(self, split: str) -> int:
        """Documents of one split."""
        return sum(shard.documents for shard in self.splits.get(split, ()))


_ADAPTER = TypeAdapter(DataManifest)


def write_manifest(folder: Path, manifest: DataManifest) -> None:
    """Write it under its final name in one step, after the shards are on disk."""
    content = {"format": _FORMAT, "fingerprint": manifest.fingerprint, **asdict(manifest)}
    write_atomic(folder / MANIFEST_NAME, json.dumps(content, indent=1, ensure_ascii=False), sync=True)


def read_manifest(folder: Path) -> DataManifest:
    """Read and check a manifest.

    Raises:
        ValueError: If there is none, or it is not what `write_manifest` wrote.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {MANIFEST_NAME}: it is not a prepared source, or its preparation did not finish. "
            "Run `titan-train data prepare` (it continues where it stopped)."
        )
    try:
        content = json.loads(read_text(path))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}, but this release reads format {_FORMAT}")
        noted = content["fingerprint"]
        manifest = _ADAPTER.validate_python(content)
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        problem = _first_problem(err) if isinstance(err, ValidationError) else f"{type(err).__name__}: {err}"
        raise ValueError(
            f"{path} is not a readable manifest ({problem}). Delete its folder and prepare it again."
        ) from err
    for shard in (shard for shards in manifest.splits.values() for shard in shards):
        if Path(shard.name).name != shard.name:
            raise ValueError(
                f"{path} names the shard {shard.name!r}, which is not a file of its folder. Prepare it again."
            )
    if manifest.fingerprint != noted:
        raise ValueError(f"{path} was edited: its fingerprint does not match. Delete its folder and prepare it again.")
    return manifest


def _first_problem(err: ValidationError) -> str:
    item = err.errors(include_url=False)[0]
    return f"{'.'.join(map(str, item['loc']))}: {item['msg']}"
