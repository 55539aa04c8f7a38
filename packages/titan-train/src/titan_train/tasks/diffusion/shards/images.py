"""Images with captions, as `titan-train prepare` reads them.

- JSONL files: one object per line with ``image``, a path beside the file, and ``text``, its caption.
- tar files of the webdataset form: ``KEY.jpg`` (png, webp) beside ``KEY.txt``.

An image that cannot be used is named with the reason; what to do about it is the caller's to decide.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from titan_train.tasks.diffusion.flow import FloatArray

_KINDS = ("jpg", "jpeg", "png", "webp")
_MOST_BYTES = 2**28
"""Of one image file."""
_MOST_PIXELS = 2**28


class TooSmallError(ValueError):
    """An image with fewer pixels than the model's."""


@dataclass(frozen=True, slots=True)
class Captioned:
    """One image file, not decoded yet."""

    place: str
    """Where it is, for messages."""
    caption: str
    content: bytes
    problem: str = ""
    """Why there is no content."""


def list_images(pattern: str) -> list[Path]:
    """The files that ``diffusion.images`` names.

    Raises:
        ValueError: There are none, or one is of another kind.
    """
    paths = sorted(Path(name) for name in glob(str(Path(pattern).expanduser()), recursive=True))  # noqa: PTH207
    if not paths:
        raise ValueError(
            f"diffusion.images={pattern!r} matches no file. Name JSONL or tar files, such as 'photos/*.jsonl'."
        )
    if wrong := [path for path in paths if path.suffix not in (".jsonl", ".tar") or not path.is_file()]:
        raise ValueError(
            f"diffusion.images={pattern!r}: {wrong[0]} is neither a JSONL file nor a tar file. Name files that end in .jsonl "
            "(image and text by line) or .tar (KEY.jpg beside KEY.txt)."
        )
    return paths


def read_images(path: Path) -> Iterator[Captioned]:
    """The images of a file, in its order."""
    return _of_tar(path) if path.suffix == ".tar" else _of_lines(path)


def decode_image(content: bytes, side: int) -> FloatArray:
    """A square of ``side`` pixels from the middle of an image, its shorter side resized: ``[3, side, side]``, -1 to 1.

    Raises:
        TooSmallError: It is smaller than that.
        ValueError: It is no image, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as opened:
            width, height = opened.size
            if width * height > _MOST_PIXELS:
                raise ValueError(f"it has {width} x {height} pixels, more than {_MOST_PIXELS:,}")
            if min(width, height) < side:
                raise TooSmallError(f"it has {width} x {height} pixels, and diffusion.grid needs {side} x {side}")
            image = opened.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, EOFError, Image.DecompressionBombError) as err:
        raise ValueError(f"it is not an image that can be decoded ({type(err).__name__}: {err})") from err
    scale = side / min(width, height)
    size = (max(side, round(width * scale)), max(side, round(height * scale)))
    left, top = ((length - side) // 2 for length in size)
    resized = image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
    pixels = np.asarray(resized, dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _of_lines(path: Path) -> Iterator[Captioned]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                entry: Any = json.loads(line)
                image, text = entry["image"], entry["text"]
                if not isinstance(image, str) or not isinstance(text, str):
                    raise TypeError("image and text must be strings")
            except (ValueError, RecursionError, KeyError, TypeError) as err:
                yield Captioned(
                    place, "", b"", f'it is not an object with "image" and "text" ({type(err).__name__}: {err})'
                )
                continue
            found = path.parent / image
            try:
                large = found.stat().st_size > _MOST_BYTES
                problem = f"{found} is larger than {_MOST_BYTES:,} bytes" if large else ""
                yield Captioned(f"{place} ({found})", text, b"" if large else found.read_bytes(), problem)
            except OSError as err:
                yield Captioned(place, text, b"", f"{found} cannot be read ({err.strerror})")


def _of_tar(path: Path) -> Iterator[Captioned]:
    """A sample's files stand next to each other, as the webdataset form asks."""
    key, files = "", dict[str, bytes]()
    try:
        with tarfile.open(path, mode="r:") as members:
            for member in members:
                if not member.isreg():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, kind = name.partition(".")
                if f"{folder}/{stem}" != key:
                    if files:
                        yield _joined(path, key, files)
                    key, files = f"{folder}/{stem}", {}
                if kind.lower() in (*_KINDS, "txt") and member.size <= _MOST_BYTES:
                    file = members.extractfile(member)
                    files[kind.lower()] = b"" if file is None else file.read()
    except (tarfile.TarError, OSError, EOFError) as err:
        yield Captioned(f"{path}, after {key!r}", "", b"", f"the file is damaged or not complete ({err})")
        return
    if files:
        yield _joined(path, key, files)


def _joined(path: Path, key: str, files: dict[str, bytes]) -> Captioned:
    place = f"{path}, sample {key.removeprefix('/')!r}"
    image = next((files[kind] for kind in _KINDS if kind in files), None)
    if image is None or "txt" not in files:
        return Captioned(
            place, "", b"", "it has no image beside its caption" if image is None else "it has no caption (KEY.txt)"
        )
    try:
        return Captioned(place, files["txt"].decode().strip(), image)
    except UnicodeDecodeError as err:
        return Captioned(place, "", b"", f"its caption is not UTF-8 (byte {err.start})")
