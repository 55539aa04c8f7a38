"""The manifest: the last file of a step that is written, and what makes the step valid.

A step is valid if its manifest parses, matches its own digest, and every file in its list exists with exactly the listed
size. Contents are checked block by block when they are read (`titan_ckpt.load.reader`). Sizes are checked before a file
is mapped: to touch a mapped page past the end of a file ends the process.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import Damage, DamageError, malformed_is_damage
from titan_ckpt.format.codec import digest, root_digest
from titan_ckpt.format.index import FileRecord, Index
from titan_ckpt.format.names import COMMIT_NAME, FORMAT_VERSION, INDEX_NAME, MANIFEST_NAME, parse_step_name, step_name
from titan_ckpt.format.tagged_json import decode, encode
from titan_ckpt.format.validate import check_commit, check_manifest
from titan_ckpt.storage.files import read_regular
from titan_ckpt.storage.paths import ABSENT, StorePath, as_path, unanswered

_NUMBERS = ("step", "world_size", "serial")
_TEXTS = ("save_id", "saved_at")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed step's table of contents."""

    path: StorePath
    """The step's folder."""
    step: int
    save_id: str
    """Unique to this save, also if the same step is saved twice."""
    world_size: int
    """Number of ranks that saved."""
    serial: int
    """Counts the commits below one root, from 1. It orders the steps: a run that goes back to an older step commits
    smaller numbers later."""
    saved_at: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    """Installed versions of titan-ckpt and torch."""
    metrics: dict[str, float]
    """Numbers by which `Retention` finds the best step."""
    files: tuple[tuple[str, int, str], ...]
    """Name, size in bytes and digest of each file except the manifest and the index."""
    index: tuple[int, str]
    """Size and digest of the index file."""

    @classmethod
    def open(cls, path: StorePath | os.PathLike[str] | str) -> "Manifest":
        """Read a step's manifest. Check its digest, and that every file exists with its size.

        Raises:
            DamageError: If the manifest or a file is missing, altered or has another size, or the folder has another
                step's name. The error lists every place.
            ValueError: If the format is newer than this code.
            OSError: If the storage does not answer. This is not damage. The error names the file.
        """
        manifest = cls.read(as_path(path))
        manifest.check_files()
        return manifest

    @classmethod
    def read(cls, folder: StorePath) -> "Manifest":
        """As `open`, without a look at the other files."""
        data = read_file(folder, MANIFEST_NAME)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as err:
            raise _damaged(folder, f"is not JSON ({err})") from err
        found = value.pop("digest", None) if isinstance(value, dict) else None
        if not isinstance(value, dict) or found != _self_digest(value):
            raise _damaged(folder, "does not match its own digest")
        if isinstance(value.get("format"), int) and value["format"] > FORMAT_VERSION:
            raise ValueError(
                f"{folder} has format {value['format']}; this titan-ckpt reads up to {FORMAT_VERSION}. Update it."
            )
        with malformed_is_damage(folder, MANIFEST_NAME):
            check_manifest(value)
            manifest = cls(
                path=folder,
                **{name: value[name] for name in (*_NUMBERS, *_TEXTS, "versions")},
                metrics={name: decode(number) for name, number in value["metrics"].items()},
                files=tuple((f["name"], f["size"], f["digest"]) for f in value["files"]),
                index=(value["index"]["size"], value["index"]["digest"]),
            )
        named = parse_step_name(folder.name)
        if named is not None and named[0] != manifest.step:
            raise _damaged(
                folder,
                f"is of step {manifest.step}, but the folder is called {folder.name}: it was copied or renamed. Give it "
                f"the name {step_name(manifest.step)}",
            )
        return manifest

    def check_files(self) -> None:
        """Check that every listed file exists with its size. Raises as `open`."""
        listed = [*((name, size) for name, size, _ in self.files), (INDEX_NAME, self.index[0])]
        damages = [damage for name, size in listed if (damage := check_size(self.path, name, size))]
        if damages:
            raise DamageError(str(self.path), damages)

    def read_index(self) -> Index:
        """The index, checked against this manifest's digest and file list. Raises as `open`."""
        data = read_file(self.path, INDEX_NAME)
        if len(data) != self.index[0] or digest(data) != self.index[1]:
            raise DamageError(str(self.path), [Damage(INDEX_NAME, "does not match its digest", (), 0, 0)])
        index = Index.decode(data)
        if listed(index.files) != self.files:
            raise DamageError(str(self.path), [Damage(INDEX_NAME, f"lists other files than {MANIFEST_NAME}")])
        return index

    def encode(self, version: int) -> bytes:
        """The manifest's bytes, with its own digest, in a version of the format."""
        value: dict[str, Any] = {name: getattr(self, name) for name in (*_NUMBERS, *_TEXTS, "versions")}
        value |= {
            "format": version,
            "metrics": {name: encode(number, name) for name, number in self.metrics.items()},
            "files": [{"name": name, "size": size, "digest": found} for name, size, found in self.files],
            "index": {"size": self.index[0], "digest": self.index[1]},
        }
        return json.dumps({**value, "digest": _self_digest(value)}, indent=1, allow_nan=False).encode()

    @property
    def nbytes(self) -> int:
        """Bytes of all listed files together."""
        return sum(size for _, size, _ in self.files) + self.index[0]


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What ordering and retention need of a manifest: a few bytes, however many files the manifest lists."""

    step: int
    serial: int
    metrics: dict[str, float]

    def encode(self, manifest: bytes) -> bytes:
        """The bytes to store beside ``manifest``."""
        metrics = {name: encode(number, name) for name, number in self.metrics.items()}
        value = {"step": self.step, "serial": self.serial, "metrics": metrics, "manifest": digest(manifest)}
        return json.dumps({**value, "digest": _self_digest(value)}, allow_nan=False).encode()

    @classmethod
    def read(cls, folder: StorePath) -> "CommitRecord":
        """The record of a step; made from the manifest if no record belongs to it. Raises as `Manifest.open`."""
        named = parse_step_name(folder.name)
        with contextlib.suppress(DamageError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
            value: dict[str, Any] = json.loads(read_file(folder, COMMIT_NAME))
            found = value.pop("digest")
            if found == _self_digest(value) and value["manifest"] == digest(read_file(folder, MANIFEST_NAME)):
                metrics = {name: decode(number) for name, number in value["metrics"].items()}
                check_commit(value)
                if named is None or named[0] == value["step"]:
                    return cls(value["step"], value["serial"], metrics)
        manifest = Manifest.read(folder)
        return cls(manifest.step, manifest.serial, manifest.metrics)


def listed(files: Sequence[FileRecord]) -> tuple[tuple[str, int, str], ...]:
    """`Manifest.files` for the records of an index."""
    return tuple((f.name, f.size, root_digest(f.blocks)) for f in files)


def read_file(folder: StorePath, name: str) -> bytes:
    """A whole file of a step.

    Raises:
        DamageError: If it is missing, or is no regular file.
        OSError: If the storage does not answer. This is not damage. The error names the file.
    """
    try:
        return read_regular(folder / name)
    except ValueError as err:
        raise DamageError(str(folder), [Damage(name, "is no regular file")]) from err
    except ABSENT as err:
        raise DamageError(str(folder), [Damage(name, "is missing")]) from err
    except OSError as err:
        raise unanswered(folder / name, err) from err


def check_size(folder: StorePath, name: str, size: int) -> Damage | None:
    """The damage of a file of a step that is missing or has another size. Raises OSError as `read_file`."""
    try:
        found = (folder / name).stat().st_size
    except ABSENT:
        return Damage(name, "is missing")
    except OSError as err:
        raise unanswered(folder / name, err) from err
    return None if found == size else Damage(name, f"has {found} bytes, {size} were written")


def _damaged(folder: StorePath, what: str) -> DamageError:
    return DamageError(str(folder), [Damage(MANIFEST_NAME, what)])


def _self_digest(value: Any) -> str:
    """The digest of the canonical text: the file itself may be indented."""
    return digest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
