"""From image files to patches: bounded sizes, one order of patches, one count of tokens.

Pillow decodes (extra ``[vision]``); a file is opened, its size is checked, and only then its pixels are read, as a viewer shows
them.
"""

import io
import math
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_train.models.vision_language.args import EncoderArgs
from titan_train.tasks.image_files import BrokenImage, as_shown, open_image, read_range, tar_members

FloatArray = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

_MOST_ELONGATED = 200
_ORIENTATION, _LYING = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values of images that are stored on their side."""


def fit_grid(height: int, width: int, args: EncoderArgs, *, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches that an image of this size is resized to: its aspect, within bounds of tokens.

    Args:
        height: Pixels.
        width: Pixels.
        args: Of the model.
        least: Tokens.
        most: Tokens.

    Raises:
        BrokenImage: It is over 200 times as long as wide, or empty.
    """
    if min(height, width) < 1:
        raise BrokenImage(f"{width} x {height} pixels are none")
    if max(height, width) > _MOST_ELONGATED * min(height, width):
        raise BrokenImage(f"{width} x {height} pixels are over {_MOST_ELONGATED} times as long as wide")
    cell = args.patch * args.merge
    rows, columns = round(height / cell), round(width / cell)
    # the expressions of transformers' `smart_resize`, whose rounding decides at whole cells
    if rows * columns > most:
        beta = math.sqrt(height * width / (most * cell**2))
        rows, columns = (max(1, math.floor(side / beta / cell)) for side in (height, width))
    elif rows * columns < least:
        beta = math.sqrt(least * cell**2 / (height * width))
        rows, columns = (math.ceil(side * beta / cell) for side in (height, width))
    while rows * columns > most:  # a side of one cell cannot shrink, and rounding up overshoots close bounds
        rows, columns = (rows - 1, columns) if rows >= columns else (rows, columns - 1)
    return rows * args.merge, columns * args.merge


def to_patches(image: Pixels, args: EncoderArgs) -> FloatArray:
    """Patches of an image whose sides are whole merged cells, in the merger's order, -1 to 1.

    Args:
        image: ``[height, width, 3]``.
        args: Of the model.

    Returns:
        ``[P, 3 * frames * patch * patch]``; an image is a video of equal frames.
    """
    m, p = args.merge, args.patch
    rows, columns = image.shape[0] // (p * m), image.shape[1] // (p * m)
    values = image.astype(np.float32) / 127.5 - 1.0
    cells = values.reshape(rows, m, p, columns, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(cells[:, :, :, :, :, None], args.frames, axis=5)
    return np.ascontiguousarray(frames.reshape(rows * columns * m * m, args.patch_values))


def image_size(path: str, *, most: int) -> tuple[int, int]:
    """Height and width of an image file, without decoding it.

    Args:
        path: A file, or a member of a tar shard.
        most: Pixels.

    Raises:
        BrokenImage: It cannot be read, or has more pixels.
    """
    with _opened(path) as image:
        return _checked_size(image, path, most)


def changed_at(path: str) -> int:
    """When an image file, or the tar shard that holds it, was last changed, in ns; 0 if it is not there."""
    file = Path(path)
    try:
        return (_shard_of(file) or file).stat().st_ctime_ns  # a copy may have any st_mtime
    except OSError:
        return 0


def read_image(
    path: str, grid: tuple[int, int], args: EncoderArgs, *, most: int, size: tuple[int, int] | None = None
) -> Pixels:
    """Decode an image file and resize it to a grid of patches.

    Args:
        path: A file, or a member of a tar shard.
        grid: Rows and columns of patches.
        args: Of the model.
        most: Pixels of the file.
        size: Height and width that it must have: those by which the grid was chosen.

    Returns:
        ``[rows * patch, columns * patch, 3]``.

    Raises:
        BrokenImage: It cannot be decoded, has more pixels or another size.
    """
    with _opened(path) as image:
        found = _checked_size(image, path, most)
        if size is not None and size != found:
            raise BrokenImage(
                f"{path} has {found[1]} x {found[0]} pixels, but had {size[1]} x {size[0]} when it was indexed. Put that image "
                "back, or begin a new run, which indexes it anew"
            )
        shown = as_shown(image).resize((grid[1] * args.patch, grid[0] * args.patch), resample=3)  # bicubic
        return np.asarray(shown, dtype=np.uint8)


def thumbnail(path: str, side: int, *, most: int) -> Pixels:
    """An image file, whole and in its aspect, in the middle of a white square ``[side, side, 3]``.

    Raises:
        BrokenImage: It cannot be decoded, or has more pixels than ``most``.
    """
    with _opened(path) as image:
        _checked_size(image, path, most)
        shown = as_shown(image)
        shown.thumbnail((side, side))
        page = np.full((side, side, 3), 255, dtype=np.uint8)
        pixels = np.asarray(shown, dtype=np.uint8)
        top, left = (side - pixels.shape[0]) // 2, (side - pixels.shape[1]) // 2
        page[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
        return page


def _checked_size(image: Any, path: str, most: int) -> tuple[int, int]:
    """Height and width as shown, by the file's header."""
    width, height = image.size
    if width * height > most:
        raise BrokenImage(f"{path}: {width} x {height} pixels are more than vision.max_pixels={most}")
    return (width, height) if image.getexif().get(_ORIENTATION) in _LYING else (height, width)


def _opened(path: str) -> Any:
    """The image, with its header read but not its pixels."""
    return open_image(_stored(path), path)


@contextmanager
def _stored(path: str) -> Generator[Any]:
    """A file, or ``member`` of ``shard.tar/member``."""
    file = Path(path)
    shard = _shard_of(file)
    if shard is not None:
        about = shard.stat()
        members = _members(shard, about.st_mtime_ns, about.st_size)
        if isinstance(members, str):
            raise ValueError(members)
        name = file.relative_to(shard).as_posix()
        if name not in members:
            raise FileNotFoundError("the shard has no such file")
        yield io.BytesIO(read_range(shard, *members[name]))
        return
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise OSError("not a regular file")
    with file.open("rb") as content:
        yield content


def _shard_of(file: Path) -> Path | None:
    return next((parent for parent in file.parents if parent.suffix == ".tar" and parent.is_file()), None)


@lru_cache(maxsize=1024)
def _members(shard: Path, _changed: int, _size: int) -> dict[str, tuple[int, int]] | str:
    """First byte and size of the regular files of a tar shard; or what is wrong with it, so that it is read once.

    One that is damaged further on has the files before that: images are asked for by name, and none is missed without a word.
    """
    try:
        members = tar_members(shard, to_its_end=False)
        return {name.removeprefix("./"): (start, size) for name, start, size in members}
    except ValueError as err:
        if isinstance(err.__cause__, OSError):  # which may pass, and is not kept
            raise err.__cause__ from None
        return str(err)
