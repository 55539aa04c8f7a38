"""Rendered shapes with questions, in closed form: the data of tests and of the example. Nothing is downloaded.

An image shows one to five equal shapes, each outlined, in a cell of its own and moved by up to a pixel. Even numbers ask how
many there are, odd numbers what they are. Neither question says anything about its answer.
"""

import hashlib

import numpy as np

from titan_train.models.vision_language.args import EncoderArgs
from titan_train.tasks.vision.images import FloatArray, Pixels, to_patches
from titan_train.tasks.vision.rows import Grid
from titan_train.tokenizers import Tokenizer

CELLS = 3
"""Cells along one side of an image."""
COLOURS = {
    "red": (230, 40, 40), "green": (40, 200, 60), "blue": (60, 80, 240),
    "yellow": (235, 225, 50), "white": (240, 240, 240), "purple": (180, 60, 220),
}  # fmt: skip
SHAPES = ("disc", "bar", "triangle", "cross")
HOW_MANY, WHAT = "How many?", "What is it?"

_MOST = 5
_BACKGROUND = 128
_RADIUS = 6.5 / 16  # of a cell


class ShapeQuestions:
    """Images by number, each with its question."""

    def __init__(self, count: int, args: EncoderArgs, *, first: int = 0) -> None:
        """Take ``count`` images from number ``first`` on; a cell of an image is a token of the model."""
        self._count, self._first, self._args = count, first, args
        self._cell = args.patch * args.merge
        self._grid: Grid = (CELLS * args.merge, CELLS * args.merge)
        self.fingerprint = hashlib.sha256(repr(("shapes 3", count, first, self._cell)).encode()).hexdigest()

    def __len__(self) -> int:
        return self._count

    def grids(self, item: int) -> list[Grid]:
        return [self._grid]

    def texts(self, item: int) -> tuple[str, str]:
        count, colour, shape, _ = _scene(self._first + item)
        return (HOW_MANY, str(count)) if (self._first + item) % 2 == 0 else (WHAT, f"{colour} {shape}")

    def count_tokens(self, item: int, tokenizer: Tokenizer) -> int:
        return sum(len(tokenizer.encode(text)) for text in self.texts(item))

    def name(self, item: int) -> str:
        return f"shape image {self._first + item}"

    def thumbnail(self, item: int) -> Pixels:
        return draw(self._first + item, self._cell)

    def patches(self, item: int) -> list[FloatArray]:
        return [to_patches(self.thumbnail(item), self._args)]


def draw(number: int, cell: int = 16) -> Pixels:
    """The image of a number, ``[3 * cell, 3 * cell, 3]``."""
    count, colour, shape, rng = _scene(number)
    image = np.full((CELLS * cell, CELLS * cell, 3), _BACKGROUND, dtype=np.uint8)
    for place in rng.choice(CELLS**2, size=count, replace=False):
        row, column = divmod(int(place), CELLS)
        shift = rng.integers(-1, 2, size=2)
        y, x = np.mgrid[0:cell, 0:cell] + 0.5
        y, x = (y - cell / 2 - shift[0]) / (_RADIUS * cell), (x - cell / 2 - shift[1]) / (_RADIUS * cell)
        here = image[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
        here[_inside(shape, y, x)] = 0  # the outline, the same in every colour
        here[_inside(shape, y, x, margin=0.25)] = COLOURS[colour]
    return image


def _scene(number: int) -> tuple[int, str, str, np.random.Generator]:
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([48, number])))
    count, colour, shape = rng.integers(1, _MOST + 1), rng.integers(len(COLOURS)), rng.integers(len(SHAPES))
    return int(count), list(COLOURS)[colour], SHAPES[shape], rng


def _inside(
    shape: str, y: FloatArray, x: FloatArray, *, margin: float = 0.0
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which pixels a shape of radius 1 covers, less a margin."""
    tall, wide = np.abs(y), np.abs(x)
    box = np.maximum(tall, wide) <= 1.0 - margin
    return {
        "disc": np.hypot(y, x) <= 1.0 - margin,
        "bar": box & (tall <= 0.55 - margin),
        "triangle": (y <= 0.9 - margin) & (wide <= 0.6 * (y + 1.0) - margin),
        "cross": box & (np.minimum(tall, wide) <= 0.5 - margin),
    }[shape]
