"""One shard of encoded images, in either form, read by sample number; and the writers of both.

- `SafetensorsShard`: tensors with one row per sample; the metadata may hold ``captions``, a JSON list.
- `TarShard`: the webdataset form: ``KEY.latent.npy``, ``KEY.text.npy``, ...; ``KEY.txt`` is the caption.

A sample holds

- ``latent``: ``[C, H, W]``, what the autoencoder returned: its mean, or a sample.
- ``logvar``: as large, the log of the variance about that mean; a sample is then drawn when it is read. Optional.
- ``text``: ``[T, text_dim]``, features of each text token. ``pooled``: ``[pooled_dim]``.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from titan_train.files import write_atomic
from titan_train.tasks.image_files import read_range, tar_members

_FIELDS = ("latent", "logvar", "text", "pooled")
_NPY_HEADER_BYTES = 2**16
_CAPTION_BYTES = 2**12

Sample = Mapping[str, npt.NDArray[np.float32]]
"""Field to array."""
Encoded = Mapping[str, npt.NDArray[np.float16]]
"""Field to array, as stored."""


class SafetensorsShard:
    """A safetensors file.

    Raises:
        ValueError: It is damaged, lacks a field, or fields differ in their number of samples.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file: Any = safe_open(path, "pt")
        except (SafetensorError, OSError) as err:
            raise ValueError(f"{path} is not a complete safetensors file: {err}. Prepare or fetch it again.") from err
        found = {name: self._file.get_slice(name) for name in self._file.keys() if name in _FIELDS}  # noqa: SIM118
        _check_fields(str(path), found)
        sizes = {name: list(part.get_shape()) for name, part in found.items()}
        counts = {size[0] if size else 0 for size in sizes.values()}
        if len(counts) > 1 or not min(counts):
            raise ValueError(
                f"{path}: its tensors hold {_listed({name: size[:1] for name, size in sizes.items()})} samples, but a shard has "
                "one row per sample in each. Prepare or fetch it again."
            )
        dtypes = {name: part.get_dtype() for name, part in found.items()}
        if wrong := {name: dtype for name, dtype in dtypes.items() if dtype not in ("F16", "BF16", "F32")}:
            raise ValueError(f"{path}: {_listed(wrong)} is not a floating-point dtype of 16 or 32 bits. Convert it.")
        self.count: int = counts.pop()
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(size[1:]) for name, size in sizes.items()}
        self.content = hashlib.sha256(repr(sorted((sizes | {"": list(dtypes.items())}).items())).encode()).hexdigest()

    def read(self, number: int) -> Sample:
        """The arrays of a sample."""
        return {name: self._file.get_slice(name)[number].float().numpy() for name in self.shapes}

    def name_of(self, number: int) -> str:
        """How messages call a sample."""
        return f"{self.path}, sample {number}"

    def captions(self, numbers: Sequence[int]) -> list[str]:
        """The captions of samples; their names where there are none."""
        try:
            found: Any = json.loads((self._file.metadata() or {}).get("captions", "[]"))
        except (ValueError, RecursionError):
            found = []
        known = isinstance(found, list) and len(found) == self.count
        return [str(found[number]) if known else self.name_of(number) for number in numbers]


class TarShard:
    """A tar file of the webdataset form.

    A tar file has no table of contents: one pass notes where each array lies, and the result is cached.

    Args:
        path: The file.
        cache_dir: Where tables of contents are kept.

    Raises:
        ValueError: It is damaged, a sample lacks a field, or samples differ in their shapes.
    """

    def __init__(self, path: Path, cache_dir: Path) -> None:
        self.path = path
        table = table_of(path, cache_dir)
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
        found: dict[str, npt.NDArray[np.float32]] = {}
        with self.path.open("rb") as file:
            for name, shape in self.shapes.items():
                where = f"{self.path}, {self._keys[number]}.{name}.npy"
                file.seek(self._places[name][number])
                stored, dtype = _npy_header(file, where)
                content = file.read(dtype.itemsize * int(np.prod(shape)))
                if stored != shape or len(content) < dtype.itemsize * int(np.prod(shape)):
                    raise ValueError(f"{where}: the file has changed since it was indexed. Start the run again.")
                found[name] = np.frombuffer(content, dtype=dtype).reshape(shape).astype(np.float32)
        return found

    def name_of(self, number: int) -> str:
        return f"{self.path}, sample {self._keys[number]!r}"

    def captions(self, numbers: Sequence[int]) -> list[str]:
        texts = {name.removesuffix(".txt"): place for name, *place in tar_members(self.path) if name.endswith(".txt")}
        found: list[str] = []
        for number in numbers:
            start, size = texts.get(self._keys[number], (0, 0))
            text = read_range(self.path, start, min(size, _CAPTION_BYTES)).decode(errors="replace").strip()
            found.append(text or self.name_of(number))
        return found


def table_of(path: Path, cache_dir: Path) -> Path:
    """Where the table of contents of a tar file is kept."""
    status = path.stat()
    stamp = hashlib.sha256(repr((path.name, status.st_size, status.st_mtime_ns)).encode()).hexdigest()
    return cache_dir / "latent-shards" / f"{path.stem}-{stamp[:16]}.json"


ShardFile = SafetensorsShard | TarShard


def write_folder_shard(path: Path, samples: Sequence[Encoded], captions: Sequence[str]) -> None:
    """Write samples, which all have the same fields, as a safetensors file, atomically, synced."""
    stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    write_tensors(path, stacked, {"captions": json.dumps(list(captions))})


def write_tar_shard(path: Path, samples: Sequence[Encoded], captions: Sequence[str]) -> None:
    """Write samples as a tar file, atomically, synced; keys are their numbers in it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (sample, caption) in enumerate(zip(samples, captions, strict=True)):
            files: dict[str, bytes] = {"txt": caption.encode()}
            for name, values in sample.items():
                array = io.BytesIO()
                np.lib.format.write_array(array, np.ascontiguousarray(values), allow_pickle=False)
                files[f"{name}.npy"] = array.getvalue()
            for name, text in files.items():
                info = tarfile.TarInfo(f"{number:06}.{name}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
    write_atomic(path, content.getvalue(), sync=True)


def write_tensors(path: Path, values: Encoded, metadata: dict[str, str] | None = None) -> None:
    """Write arrays as a safetensors file, atomically, synced."""
    from safetensors.numpy import save

    # safetensors writes an array's memory as it lies; an autoencoder's output may lie channels last
    write_atomic(
        path, save({name: np.ascontiguousarray(array) for name, array in values.items()}, metadata=metadata), sync=True
    )


def read_tensors(path: Path, names: Sequence[str]) -> Sample:
    """Single arrays of a safetensors file, float32.

    Raises:
        ValueError: It is damaged, or lacks one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).float().numpy() for name in names}
    except (SafetensorError, OSError) as err:
        raise ValueError(
            f"{path} is not a safetensors file with {', '.join(names)}: {err}. Prepare or fetch it again."
        ) from err


def _check_fields(where: str, found: Collection[str]) -> None:
    missing = [name for name in _FIELDS if name not in found and name != "logvar"]
    if missing:
        raise ValueError(
            f"{where} lacks {', '.join(missing)}: a sample has latent, text and pooled, and may have logvar. Encode it with all "
            "of them."
        )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _scan(path: Path) -> tuple[list[str], dict[str, list[int]], dict[str, list[int]]]:
    """Keys of all samples, where each field of each lies, and the shapes that all have."""
    samples: dict[str, dict[str, int]] = {}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    with path.open("rb") as file:
        for member, start, size in tar_members(path):
            key, name = _field_of(member)
            if name not in _FIELDS:
                continue
            where = f"{path}, {member}"
            if name in samples.setdefault(key, {}):
                raise ValueError(f"{where} is in it twice. Give each sample a key of its own.")
            samples[key][name] = start
            file.seek(start)
            shape, dtype = _npy_header(file, where)
            if file.tell() - start + dtype.itemsize * int(np.prod(shape)) != size:
                raise ValueError(
                    f"{where}: its size is not that of its array. It was not written whole; encode it again."
                )
            other, first = shapes.setdefault(name, (shape, member))
            if shape != other:
                raise ValueError(
                    f"{path}: {member} has the shape {list(shape)}, but {first} has {list(other)}. Put images of another size "
                    "into another data set."
                )
    if not samples:
        raise ValueError(f"{path} holds no sample: there is no file KEY.latent.npy in it.")
    for key, found in samples.items():
        _check_fields(f"{path}, sample {key!r}", found)
        if found.keys() != shapes.keys():
            raise ValueError(f"{path}, sample {key!r} has no logvar, but others have. Encode all samples alike.")
    places = {name: [found[name] for found in samples.values()] for name in shapes}
    return list(samples), places, {name: list(shape) for name, (shape, _) in shapes.items()}


def _field_of(name: str) -> tuple[str, str]:
    """A sample's key, which ends at the first dot of a file's name, and the field that an array is."""
    folder, slash, file = name.rpartition("/")
    key, _, rest = file.partition(".")
    return folder + slash + key, rest.removesuffix(".npy") if rest.endswith(".npy") else ""


def _npy_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array in .npy form; nothing is unpickled."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_NPY_HEADER_BYTES)
    except (ValueError, OSError, SyntaxError) as err:
        raise ValueError(f"{where} is not an array in .npy form: {err}. Encode it again.") from err
    if dtype not in (np.dtype("<f2"), np.dtype("<f4")) or fortran:
        order = " in Fortran order" if fortran else ""
        raise ValueError(f"{where} holds {dtype}{order}, but a field is float16 or float32, row by row. Convert it.")
    return tuple(shape), dtype
