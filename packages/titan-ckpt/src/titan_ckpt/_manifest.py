"""The manifest: the last file of a step to be written, and what makes it valid.

One rule for every reader: a step is valid if its manifest parses, matches its own digest, and every file it lists is
there with exactly the listed size. Contents are checked block by block when they are read (`titan_ckpt._read`).
Checking sizes first is what makes it safe to map the files: touching a mapped page past the end of a short file kills
the process.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt._digest import digest, root_digest
from titan_ckpt._errors import Damage, DamageError
from titan_ckpt._format import FORMAT_VERSION, INDEX_NAME, MANIFEST_NAME
from titan_ckpt._index import FileRecord, Index
from titan_ckpt._storage import StorePath, as_path


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed step's table of contents."""

    path: StorePath
    """The step's folder."""
    step: int
    save_id: str
    """Unique to this save, also of the same step saved twice."""
    world_size: int
    """Ranks that saved."""
    saved_at: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    """Of titan-ckpt and torch."""
    metrics: dict[str, float]
    """What `Retention` can choose the best step by."""
    files: tuple[tuple[str, int, str], ...]
    """Name, size in bytes and digest of each file but the index and this one."""
    index: tuple[int, str]
    """Size and digest of the index file."""

    @classmethod
    def open(cls, path: StorePath | os.PathLike[str] | str) -> "Manifest":
        """Read the manifest of a step's folder and check it: its own digest, and every file's presence and size.

        Raises:
            DamageError: If the manifest or a file is missing, short, long or altered. The error lists all of them.
        """
        folder = as_path(path)
        manifest = cls._parse(folder)
        damages = [
            damage
            for name, size in [*((n, s) for n, s, _ in manifest.files), (INDEX_NAME, manifest.index[0])]
            if (damage := _check_size(folder, name, size))
        ]
        if damages:
            raise DamageError(str(folder), damages)
        return manifest

    @classmethod
    def _parse(cls, folder: StorePath) -> "Manifest":
        try:
            value = json.loads((folder / MANIFEST_NAME).read_bytes())
        except OSError as err:
            raise DamageError(str(folder), [Damage(MANIFEST_NAME, f"cannot be read ({err.strerror})")]) from err
        except ValueError as err:
            raise DamageError(str(folder), [Damage(MANIFEST_NAME, f"is not JSON ({err})")]) from err
        told = value.pop("digest", None) if isinstance(value, dict) else None
        if told != _self_digest(value):
            raise DamageError(str(folder), [Damage(MANIFEST_NAME, "does not match its own digest")])
        if value["format"] > FORMAT_VERSION:
            raise ValueError(
                f"{folder} has format {value['format']}; this titan-ckpt reads up to {FORMAT_VERSION}. Update it."
            )
        return cls(
            path=folder,
            step=value["step"],
            save_id=value["save_id"],
            world_size=value["world_size"],
            saved_at=value["saved_at"],
            versions=value["versions"],
            metrics=value["metrics"],
            files=tuple((f["name"], f["size"], f["digest"]) for f in value["files"]),
            index=(value["index"]["size"], value["index"]["digest"]),
        )

    def read_index(self) -> Index:
        """The index, checked against this manifest's digest and file list.

        Raises:
            DamageError: If it was altered.
        """
        data = (self.path / INDEX_NAME).read_bytes()
        if len(data) != self.index[0] or digest(data) != self.index[1]:
            raise DamageError(str(self.path), [Damage(INDEX_NAME, "does not match its digest", (), 0, 0)])
        index = Index.decode(data)
        if tuple((f.name, f.size, root_digest(f.blocks)) for f in index.files) != self.files:
            raise DamageError(str(self.path), [Damage(INDEX_NAME, f"lists other files than {MANIFEST_NAME}")])
        return index

    @property
    def nbytes(self) -> int:
        """Bytes of all listed files."""
        return sum(size for _, size, _ in self.files) + self.index[0]


def encode_manifest(
    *,
    format_version: int,
    step: int,
    save_id: str,
    world_size: int,
    saved_at: str,
    versions: dict[str, str],
    metrics: dict[str, float],
    files: Sequence[FileRecord],
    index: bytes,
) -> bytes:
    """The manifest's bytes, its own digest included."""
    value: dict[str, Any] = {
        "format": format_version,
        "step": step,
        "save_id": save_id,
        "world_size": world_size,
        "saved_at": saved_at,
        "versions": versions,
        "metrics": metrics,
        "files": [{"name": f.name, "size": f.size, "digest": root_digest(f.blocks)} for f in files],
        "index": {"size": len(index), "digest": digest(index)},
    }
    return json.dumps({**value, "digest": _self_digest(value)}, indent=1).encode()


def _self_digest(value: Any) -> str:
    """Over the canonical text, so that the file may be laid out for people."""
    return digest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def _check_size(folder: StorePath, name: str, size: int) -> Damage | None:
    try:
        found = (folder / name).stat().st_size
    except OSError as err:
        return Damage(name, f"is missing ({err.strerror})")
    return None if found == size else Damage(name, f"has {found} bytes, {size} were written")
