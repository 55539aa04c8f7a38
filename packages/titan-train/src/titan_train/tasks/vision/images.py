"""From image files to patches: bounded sizes, one order of patches, one count of tokens.

Pillow decodes (extra ``[vision]``); a file is opened, its size is checked, and only then its pixels are read.
"""

import io
import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_train.models.qwen3_vl.args import Qwen3VLArgs

FloatArray = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

_MOST_ELONGATED = 200


class BrokenImage(Exception):
    """An image that cannot be used; the message names it and says why."""


def fit_grid(height: int, width: int, args: Qwen3VLArgs, *, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches that an image of this size is resized to: its aspect, within bounds of tokens.

    Args:
        height: Pixels.
        width: Pixels.
        args: Of the model.
        least: Tokens.
        most: Tokens.

    Raises:
        BrokenImage: It is over 200 times as long as wide.
    """
    if max(height, width) > _MOST_ELONGATED * min(height, width):
        raise BrokenImage(f"{width} x {height} pixels are over {_MOST_ELONGATED} times as long as wide")
    cell = args.patch * args.merge
    rows, columns = max(1, round(height / cell)), max(1, round(width / cell))
    bound, to_whole = (most, math.floor) if rows * columns > most else (least, math.ceil)
    if not least <= rows * columns <= most:
        scale = math.sqrt(bound / (height * width))
        rows, columns = max(1, to_whole(height * scale)), max(1, to_whole(width * scale))
    while rows * columns > most:  # a side of one cell cannot shrink, and rounding up overshoots close bounds
        rows, columns = (rows - 1, columns) if rows >= columns else (rows, columns - 1)
    return rows * args.merge, columns * args.merge


def to_patches(image: Pixels, args: Qwen3VLArgs) -> FloatArray:
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
    image = _open(path)
    width, height = image.size
    if width * height > most:
        raise BrokenImage(f"{path}: {width} x {height} pixels are more than vision.max_pixels={most}")
    return height, width


def read_image(path: str, grid: tuple[int, int], args: Qwen3VLArgs, *, most: int) -> Pixels:
    """Decode an image file and resize it to a grid of patches.

    Args:
        path: A file, or a member of a tar shard.
        grid: Rows and columns of patches.
        args: Of the model.
        most: Pixels of the file.

    Returns:
        ``[rows * patch, columns * patch, 3]``.

    Raises:
        BrokenImage: It cannot be decoded, or has more pixels.
    """
    image_size(path, most=most)
    try:
        image = _open(path).convert("RGB").resize((grid[1] * args.patch, grid[0] * args.patch), resample=3)  # bicubic
        return np.asarray(image, dtype=np.uint8)
    except Exception as err:  # decoders raise what they like on damaged files
        raise BrokenImage(f"{path}: {type(err).__name__}: {err}") from err


def _open(path: str) -> Any:
    try:
        from PIL import Image
    except ImportError as err:
        raise ValueError("images are decoded by Pillow, which is not installed. Install titan-train[vision].") from err
    try:
        return Image.open(io.BytesIO(_read(path)))
    except Exception as err:  # as above
        raise BrokenImage(f"{path}: {type(err).__name__}: {err}") from err


def _read(path: str) -> bytes:
    """The bytes of a file, or of ``member`` in ``shard.tar/member``."""
    file = Path(path)
    for parent in file.parents:
        if parent.suffix == ".tar" and parent.is_file():
            with tarfile.open(parent) as shard:
                member = shard.extractfile(file.relative_to(parent).as_posix())
                if member is None:
                    raise FileNotFoundError("the shard has no such file")
                return member.read()
    return file.read_bytes()
