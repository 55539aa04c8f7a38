"""Shards in the webdataset form: tar files with one group of files per sample, ``KEY.latent.npy``, ``KEY.text.npy``, ...

A tar file has no table of contents. One pass over it notes where each array lies; what it found is kept in a cache, and
samples are then read by their number. ``KEY.txt`` is the caption; files of other names are left alone.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from titan_train.files import write_atomic
from titan_train.tasks.diffusion.shards.fields import FIELDS, Sample, check_fields

_HEADER_BYTES = 2**16
"""The most bytes of an .npy header that are read."""
_CAPTION_BYTES = 2**12


class TarShard:
    """A tar file of the webdataset form."""

    def __init__(self, path: Path, cache_dir: Path) -> None:
        """Read the table of contents, or make it.

        Raises:
            ValueError: It is damaged, a sample lacks a field, or samples differ in their shapes.
        """
        self.path = path
        status = path.stat()
        stamp = hashlib.sha256(repr((path.name, status.st_size, status.st_mtime_ns)).encode()).hexdigest()
        table = cache_dir / "latent-shards" / f"{path.stem}-{stamp[:16]}.json"
        try:
            found = json.loads(table.read_bytes())
            self._keys, self._places, shapes = found["keys"], found["places"], found["shapes"]
        except (OSError, ValueError, KeyError, TypeError):
            self._keys, self._places, shapes = _scan(path)
            write_atomic(table, json.dumps({"keys": self._keys, "places": self._places, "shapes": shapes}))
        self.count = len(self._keys)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in shapes.items()}
        self.content = hashlib.sha256(json.dumps([self._keys, self._places, shapes]).encode()).hexdigest()

    def read(self, number: int) -> Sample:
        """The arrays of a sample."""
        with self.path.open("rb") as file:
            return {
                name: self._array(
                    file, self._places[name][number], self.shapes[name], f"{self._keys[number]}.{name}.npy"
                )
                for name in self.shapes
            }

    def name_of(self, number: int) -> str:
        """The file and the key."""
        return f"{self.path}, sample {self._keys[number]!r}"

    def captions(self, numbers: Sequence[int]) -> list[str]:
        """From the files KEY.txt."""
        with tarfile.open(self.path, mode="r:") as members:
            texts = {member.name.removesuffix(".txt"): member for member in members if member.name.endswith(".txt")}
            found: list[str] = []
            for number in numbers:
                member = texts.get(self._keys[number])
                file = None if member is None else members.extractfile(member)
                text = "" if file is None else file.read(_CAPTION_BYTES).decode(errors="replace").strip()
                found.append(text or self.name_of(number))
        return found

    def _array(self, file: IO[bytes], place: int, shape: tuple[int, ...], name: str) -> npt.NDArray[np.float32]:
        file.seek(place)
        found, dtype = _npy_header(file, f"{self.path}, {name}")
        content = file.read(dtype.itemsize * int(np.prod(shape)))
        if found != shape or len(content) < dtype.itemsize * int(np.prod(shape)):
            raise ValueError(f"{self.path}, {name}: the file has changed since it was indexed. Start the run again.")
        return np.frombuffer(content, dtype=dtype).reshape(shape).astype(np.float32)


def _scan(path: Path) -> tuple[list[str], dict[str, list[int]], dict[str, list[int]]]:
    """Keys of all samples, where each field of each lies, and the shapes that all have."""
    samples: dict[str, dict[str, int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    first: dict[str, str] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as members:
            size = os.fstat(file.fileno()).st_size
            for member in members:
                key, name = _field_of(member)
                if name is None:
                    continue
                if name in samples.setdefault(key, {}):
                    raise ValueError(f"{path}: {member.name} is in it twice. Give each sample a key of its own.")
                if member.offset_data + member.size > size:
                    raise ValueError(f"{path} ends inside {member.name}: it was not copied whole. Fetch it again.")
                samples[key][name] = member.offset_data
                shape = _member_shape(file, member, path)
                if shapes.setdefault(name, shape) != shape:
                    raise ValueError(
                        f"{path}: {member.name} has the shape {list(shape)}, but {first[name]} has {list(shapes[name])}. Put "
                        "images of another size into another data set."
                    )
                first.setdefault(name, member.name)
    except (tarfile.TarError, OSError) as err:
        raise ValueError(f"{path} is not a complete tar file without compression: {err}. Fetch it again.") from err
    if not samples:
        raise ValueError(f"{path} holds no sample: there is no file KEY.latent.npy in it.")
    for key, found in samples.items():
        check_fields(f"{path}, sample {key!r}", found)
        if found.keys() != shapes.keys():
            raise ValueError(f"{path}, sample {key!r} has no logvar, but others have. Encode all samples alike.")
    places = {name: [found[name] for found in samples.values()] for name in shapes}
    return list(samples), places, {name: list(shape) for name, shape in shapes.items()}


def _field_of(member: tarfile.TarInfo) -> tuple[str, str | None]:
    """A sample's key, which ends at the first dot of a file's name, and which field this is; None if it is another file."""
    folder, _, name = member.name.rpartition("/")
    key, _, rest = name.partition(".")
    field = rest.removesuffix(".npy")
    known = member.isreg() and rest.endswith(".npy") and field in FIELDS
    return (f"{folder}/{key}" if folder else key), field if known else None


def _member_shape(file: IO[bytes], member: tarfile.TarInfo, path: Path) -> tuple[int, ...]:
    file.seek(member.offset_data)
    where = f"{path}, {member.name}"
    shape, dtype = _npy_header(file, where)
    if file.tell() - member.offset_data + dtype.itemsize * int(np.prod(shape)) != member.size:
        raise ValueError(f"{where}: its size is not that of its array. It was not written whole; encode it again.")
    return shape


def _npy_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array in .npy form; nothing is unpickled."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_HEADER_BYTES)
    except (ValueError, OSError, SyntaxError) as err:
        raise ValueError(f"{where} is not an array in .npy form: {err}. Encode it again.") from err
    if dtype not in (np.dtype("<f2"), np.dtype("<f4")) or fortran:
        raise ValueError(
            f"{where} holds {dtype}{' in Fortran order' if fortran else ''}, but a field is float16 or float32, row by row. "
            "Store it so."
        )
    return tuple(shape), dtype
