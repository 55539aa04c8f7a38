"""Images with captions, as `titan-train data prepare` reads them.

- JSONL files: one object per line with ``image``, a path beside the file, and ``text``, its caption.
- tar files of the webdataset form: ``KEY.jpg`` (png, webp) beside ``KEY.txt``.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from itertools import groupby
from pathlib import Path

import numpy as np

from titan_train.data.sources.malformed import BadDocument
from titan_train.tasks.diffusion.flow import FloatArray
from titan_train.tasks.image_files import BrokenImage, as_shown, open_image, read_json_lines, read_range, tar_members

_KINDS = ("jpg", "jpeg", "png", "webp")
_MOST_BYTES = 2**28
"""Of one image file."""
_MOST_PIXELS = 2**28


class TooSmallError(ValueError):
    """An image with fewer pixels than the model's."""


@dataclass(frozen=True, slots=True)
class Captioned:
    """One image file, not decoded yet."""

    file: Path
    """The JSONL or tar file."""
    number: int
    """Line of a JSONL file, or sample of a tar file, from 1."""
    byte: int
    """First byte of the line; -1 in a tar file."""
    name: str
    caption: str
    content: bytes

    def bad(self, reason: str) -> BadDocument:
        """The same as an image that cannot be used."""
        return _bad(self.file, self.number, self.byte, reason)


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


def read_images(path: Path) -> Iterator[Captioned | BadDocument]:
    """The images of a file, in its order; what cannot be used says why."""
    return _of_tar(path) if path.suffix == ".tar" else _of_lines(path)


def decode_image(content: bytes, side: int, name: str = "image") -> FloatArray:
    """A square of ``side`` pixels from the middle of an image, its shorter side resized: ``[3, side, side]``, -1 to 1.

    Raises:
        TooSmallError: It is smaller than that.
        BrokenImage: It cannot be decoded, or is too large.
    """
    with open_image(io.BytesIO(content), name) as opened:
        width, height = opened.size
        if width * height > _MOST_PIXELS:
            raise BrokenImage(f"{name}: {width} x {height} pixels are more than {_MOST_PIXELS:,}")
        large_enough = min(width, height) >= side
        image = as_shown(opened) if large_enough else None
    if image is None:
        raise TooSmallError(f"{name} has {width} x {height} pixels, and diffusion.grid needs {side} x {side}")
    scale = side / min(image.size)
    size = tuple(max(side, round(length * scale)) for length in image.size)
    left, top = ((length - side) // 2 for length in size)
    resized = image.resize(size, resample=3).crop((left, top, left + side, top + side))  # bicubic
    pixels = np.asarray(resized, dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _bad(file: Path, number: int, byte: int, reason: str) -> BadDocument:
    return BadDocument(str(file), number, byte, "bad_image", reason, b"")


def _of_lines(path: Path) -> Iterator[Captioned | BadDocument]:
    for number, byte, entry in read_json_lines(path):
        image, text = (entry.get("image"), entry.get("text")) if isinstance(entry, dict) else (None, None)
        if not isinstance(image, str) or not isinstance(text, str):
            detail = f" ({entry})" if isinstance(entry, ValueError) else ""
            yield _bad(path, number, byte, f'not an object with the strings "image" and "text"{detail}')
            continue
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            yield _bad(path, number, byte, 'its "text" holds half of a character (a lone surrogate)')
            continue
        found = path.parent / image
        try:
            if found.stat().st_size > _MOST_BYTES:
                yield _bad(path, number, byte, f"{found} is larger than {_MOST_BYTES:,} bytes")
            else:
                yield Captioned(path, number, byte, str(found), text, found.read_bytes())
        except (OSError, ValueError) as err:
            yield _bad(path, number, byte, f"{found} cannot be read ({err})")


def _of_tar(path: Path) -> Iterator[Captioned | BadDocument]:
    """A sample's files stand next to each other, as the webdataset form asks."""
    number, key = 0, ""
    try:
        for key, members in groupby(tar_members(path), key=lambda member: _split(member[0])[0]):
            files = {
                kind: read_range(path, start, size)
                for name, start, size in members
                if (kind := _split(name)[1]) in (*_KINDS, "txt") and size <= _MOST_BYTES
            }
            if files:
                number += 1
                yield _joined(path, number, f"sample {key!r}", files)
    except ValueError as err:
        yield _bad(path, number + 1, -1, f"after sample {key!r}: {err}")


def _split(name: str) -> tuple[str, str]:
    """A sample's key, which ends at the first dot of a file's name, and the kind of the file."""
    folder, slash, file = name.rpartition("/")
    stem, _, kind = file.partition(".")
    return folder + slash + stem, kind.lower()


def _joined(path: Path, number: int, name: str, files: dict[str, bytes]) -> Captioned | BadDocument:
    image = next((files[kind] for kind in _KINDS if kind in files), None)
    if image is None or "txt" not in files:
        missing = "image beside its caption" if image is None else "caption (KEY.txt)"
        return _bad(path, number, -1, f"{name} has no {missing}")
    try:
        return Captioned(path, number, -1, name, files["txt"].decode().strip(), image)
    except UnicodeDecodeError as err:
        return _bad(path, number, -1, f"{name}: its caption is not UTF-8 (byte {err.start})")
