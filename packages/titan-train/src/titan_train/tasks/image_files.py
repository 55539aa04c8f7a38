"""Files that images come in: JSON lines that name them, tar files that hold them, and Pillow, which opens them.

An image is taken as a viewer shows it: turned as its EXIF says, on white where it is transparent, 16 bits reduced to 8, an
animation's first frame.
"""

import codecs
import errno
import json
import tarfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from titan_train.lazy import require

# Those that Pillow decodes itself: for others (EPS) it starts programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "AVIF", "JPEG2000")

# An error of the name, of its permissions, or of a place in the file that damaged bytes name. Others are the disk's.
_OF_THE_FILE = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EACCES, errno.EPERM,
}  # fmt: skip


class BrokenImage(Exception):
    """An image that cannot be used; the message names it and says why."""


def read_json_lines(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Number, first byte and value of each line that is not empty; the value is a ValueError if the line is not JSON.

    Raises:
        ValueError: The file cannot be read.
    """
    byte = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if content.strip():
                    try:
                        value: Any = json.loads(content.decode())
                    except (ValueError, RecursionError) as err:
                        value = ValueError(f"not JSON: {err}")
                    yield number, byte, value
                byte += len(line)
    except OSError as err:
        raise ValueError(f"{path} cannot be read: {err.strerror}. Correct the path.") from err


def tar_members(path: Path, *, to_its_end: bool = True) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of each regular file of a tar file. Links are left out: they may lead out of it.

    Args:
        path: The tar file.
        to_its_end: Refuse one that is damaged behind its last file that can be read; else those before are given.

    Raises:
        ValueError: It is compressed, damaged or cut.
    """
    try:
        size = path.stat().st_size
        with tarfile.open(path, "r:") as members:
            for member in members:
                if member.isreg():
                    if member.offset_data + member.size > size:
                        raise ValueError(f"{path} ends inside {member.name}: it was not copied whole. Fetch it again.")
                    yield member.name, member.offset_data, member.size
            if to_its_end:
                _check_end(path, members.offset)
    except (tarfile.TarError, OSError, EOFError) as err:
        raise ValueError(f"{path} is not a complete tar file without compression: {err}. Fetch it again.") from err


def _check_end(path: Path, end: int) -> None:
    """Refuse what is not the end of a tar file, zeros alone: `tarfile` ends without a word at a header that it cannot read."""
    with path.open("rb") as file:
        file.seek(end)
        content = file.read(tarfile.BLOCKSIZE)
        whole = len(content) == tarfile.BLOCKSIZE
        while content:
            if content.strip(b"\0"):
                raise ValueError(
                    f"{path} is damaged, or several tar files in one: at byte {end} there is neither a file nor the end. Fetch "
                    "it again, or pack its files anew."
                )
            content = file.read(2**20)
    if not whole:
        raise ValueError(
            f"{path} ends at byte {end} without a tar file's end: it was not copied whole. Fetch it again."
        )


def read_range(path: Path, start: int, size: int) -> bytes:
    """Bytes of a file, such as a member of a tar file."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


@contextmanager
def open_image(file: Any, name: str) -> Generator[Any]:
    """The image in a binary file, with its header read but not its pixels; a failure inside is a `BrokenImage`.

    Raises:
        BrokenImage: It is missing, may not be read, or cannot be decoded.
        ValueError: Pillow is not installed.
        OSError: The disk does not answer, which says nothing about the image.
        MemoryError: There is too little memory to decode it; the message names it.
    """
    Image = require("PIL.Image", extra="vision", purpose="decoding images")
    Image.init()
    known = [name for name in _FORMATS if name in Image.OPEN]
    try:
        with file as opened:
            try:
                image = Image.open(opened, formats=known)
            except MemoryError as err:  # a header is small: damaged bytes say that a part of it is not
                raise BrokenImage(f"{name}: its header asks for more memory than there is") from err
            with image:
                yield image
    except BrokenImage:
        raise
    except MemoryError as err:
        raise MemoryError(f"{name} cannot be decoded in the memory that is left") from err
    except Exception as err:  # decoders raise what they like on damaged files
        if isinstance(err, OSError) and err.errno and err.errno not in _OF_THE_FILE:
            err.filename = err.filename or name
            raise
        raise BrokenImage(f"{name}: {type(err).__name__}: {err}") from err


def as_shown(image: Any) -> Any:
    """An open image, decoded to RGB of 8 bits."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("pixels are floating-point numbers of an unknown range")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip
        values = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
