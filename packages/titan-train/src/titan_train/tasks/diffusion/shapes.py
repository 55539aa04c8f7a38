"""Coloured shapes with captions, in closed form: the data of tests and of the example. Nothing is downloaded or trained.

A caption names a colour, a shape and a place: "a red disc at the top left", 200 in all. The image follows from it, but for a
shift of one pixel. Patches of 4 x 4 pixels become tokens by an orthogonal cosine transform of each colour channel: exact and
invertible, it stands where an autoencoder would. Words become fixed random vectors, a caption's pooled vector is their mean:
they stand for text encoders. Everything after that is what real data goes through.
"""

import hashlib
import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_train.tasks.diffusion.batches import Features
from titan_train.tasks.diffusion.flow import FloatArray, generator

PATCH = 4
"""Pixels along one side of a token."""
CHANNELS = 3 * PATCH**2
"""Values of a token: ``model.args.in_channels``."""
COLOURS = {
    "red": (0.9, -0.8, -0.8), "green": (-0.8, 0.8, -0.8), "blue": (-0.8, -0.8, 0.9), "yellow": (0.9, 0.9, -0.8),
    "magenta": (0.9, -0.8, 0.9), "cyan": (-0.8, 0.9, 0.9), "white": (0.9, 0.9, 0.9), "orange": (0.9, 0.1, -0.8),
}  # fmt: skip
SHAPES = ("disc", "square", "triangle", "cross", "ring")
PLACES = {
    "top left": (0.25, 0.25), "top right": (0.25, 0.75), "bottom left": (0.75, 0.25), "bottom right": (0.75, 0.75),
    "centre": (0.5, 0.5),
}  # fmt: skip
CAPTIONS = tuple(itertools.product(COLOURS, SHAPES, PLACES))
"""All (colour, shape, place)."""

_BACKGROUND = -0.5
_SPREAD = 2.0
"""Tokens are scaled by it: the pixels' values then spread about as wide as the noise."""


def caption_text(item: int) -> str:
    """``a red disc at the top left``."""
    colour, shape, place = CAPTIONS[item]
    return f"{'an' if colour == 'orange' else 'a'} {colour} {shape} at the {place}"


def caption_number(text: str) -> int:
    """The number of the caption with this text, in any case.

    Raises:
        ValueError: It is not a caption.
    """
    words = " ".join(text.lower().split())
    for item in range(len(CAPTIONS)):
        if words == caption_text(item):
            return item
    raise ValueError(
        f"{text!r} is not a caption of the shapes. Write 'a red disc at the top left', with a colour of {', '.join(COLOURS)}; a "
        f"shape of {', '.join(SHAPES)}; and a place of {', '.join(PLACES)}."
    )


class ShapeFeatures:
    """All captions, each with its image and features."""

    def __init__(self, *, grid: int, text_tokens: int, text_dim: int, pooled_dim: int) -> None:
        """Set the sizes.

        Args:
            grid: Tokens along one side of an image, at least 3: smaller shapes could not be told apart.
            text_tokens: Tokens of a caption; at least 3 (colour, shape, place); more are zero.
            text_dim: Width of a word's vector.
            pooled_dim: Width of a caption's pooled vector.

        Raises:
            ValueError: A caption or a shape does not fit.
        """
        if text_tokens < 3 or grid < 3:
            raise ValueError(
                f"diffusion.source='shapes' needs text_tokens and grid of at least 3, not {text_tokens} and {grid}: "
                "a caption has 3 words, and smaller shapes cannot be told apart."
            )
        self.grid = grid
        self._sizes = (text_tokens, text_dim, pooled_dim)
        self.fingerprint = hashlib.sha256(repr(("shapes 1", grid, self._sizes)).encode()).hexdigest()
        none = np.zeros((0, CHANNELS), dtype=np.float32)
        self.empty = Features(none, np.zeros((text_tokens, text_dim), np.float32), np.zeros(pooled_dim, np.float32))

    def __len__(self) -> int:
        return len(CAPTIONS)

    def read(self, item: int, *, seed: int, sample: int) -> Features:
        """A caption with an image that is shifted by up to a pixel."""
        shift = generator(seed, sample, "latent").integers(-1, 2, size=2)
        latent = to_tokens(draw_image(item, self.grid * PATCH, (int(shift[0]), int(shift[1]))))
        return Features(latent, *self.text_of(item))

    def text_of(self, item: int) -> tuple[FloatArray, FloatArray]:
        """A caption's features: its words' vectors, and their mean in other directions."""
        return _text(CAPTIONS[item], *self._sizes)


def draw_image(item: int, side: int, shift: tuple[int, int] = (0, 0)) -> FloatArray:
    """The image of a caption, ``[side, side, 3]``, about -1 to 1.

    Args:
        item: Number of the caption.
        side: Pixels.
        shift: Rows and columns by which the shape is moved.
    """
    colour, shape, place = CAPTIONS[item]
    down, right = PLACES[place]
    rows, columns = np.mgrid[0:side, 0:side] + 0.5
    y, x = rows - down * side - shift[0], columns - right * side - shift[1]
    radius = side * 0.19
    image = np.full((side, side, 3), _BACKGROUND, dtype=np.float32)
    image[_inside(shape, y / radius, x / radius)] = COLOURS[colour]
    return image


def to_tokens(image: npt.NDArray[Any]) -> FloatArray:
    """Patches of ``[side, side, 3]``, row by row, each channel in the cosine basis: ``[I, 48]``."""
    grid = image.shape[0] // PATCH
    patches = image.reshape(grid, PATCH, grid, PATCH, 3).transpose(0, 2, 4, 1, 3)
    basis = _cosines()
    tokens = basis @ patches @ basis.T
    return (_SPREAD * tokens.reshape(grid * grid, CHANNELS)).astype(np.float32)


def to_image(tokens: npt.NDArray[Any]) -> FloatArray:
    """The inverse of `to_tokens`."""
    grid = round(len(tokens) ** 0.5)
    basis = _cosines()
    patches = basis.T @ (tokens.astype(np.float64) / _SPREAD).reshape(grid, grid, 3, PATCH, PATCH) @ basis
    return patches.transpose(0, 3, 1, 4, 2).reshape(grid * PATCH, grid * PATCH, 3).astype(np.float32)


def read_image(image: npt.NDArray[Any]) -> tuple[str, str]:
    """The colour and the place that an image shows: what a sample is scored by, without a human eye.

    The shape is what differs from the background; its colour is the palette's nearest to its mean, its place the nearest to
    its centre of mass.
    """
    weight = np.clip(np.abs(image - _BACKGROUND).max(-1) - 0.5, 0.0, None)
    total = max(float(weight.sum()), 1e-6)
    colour = (image * weight[..., None]).sum((0, 1)) / total
    side = image.shape[0]
    rows, columns = (np.mgrid[0:side, 0:side] + 0.5) / side
    centre = np.array([(rows * weight).sum() / total, (columns * weight).sum() / total])
    near = lambda table, value: min(table, key=lambda name: float(np.square(np.subtract(table[name], value)).sum()))  # noqa: E731
    return near(COLOURS, colour), near(PLACES, centre)


def score(item: int, image: npt.NDArray[Any]) -> bool:
    """Whether an image shows the colour and the place of a caption."""
    colour, _, place = CAPTIONS[item]
    return read_image(image) == (colour, place)


def _inside(shape: str, y: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which pixels a shape of radius 1 covers."""
    distance = np.hypot(y, x)
    box = np.maximum(np.abs(y), np.abs(x))
    return {
        "disc": distance <= 1.0,
        "square": box <= 0.85,
        "triangle": (y <= 0.9) & (np.abs(x) <= 0.55 * (y + 1.1)),
        "cross": (box <= 1.0) & (np.minimum(np.abs(y), np.abs(x)) <= 0.35),
        "ring": (distance <= 1.05) & (distance >= 0.5),
    }[shape]


@lru_cache(maxsize=1)
def _cosines() -> npt.NDArray[np.float64]:
    """The orthonormal cosine basis (DCT-II), a row for each frequency."""
    k, n = np.mgrid[0:PATCH, 0:PATCH]
    basis = np.cos(np.pi * (n + 0.5) * k / PATCH) * np.sqrt(2.0 / PATCH)
    basis[0] /= np.sqrt(2.0)
    return basis


@lru_cache(maxsize=len(CAPTIONS))
def _text(
    words: tuple[str, str, str], text_tokens: int, text_dim: int, pooled_dim: int
) -> tuple[FloatArray, FloatArray]:
    text = np.zeros((text_tokens, text_dim), dtype=np.float32)
    for place, word in enumerate(words):
        text[place] = _vector(word, text_dim) + 0.3 * _vector(f"place {place}", text_dim)
    pooled = np.mean([_vector(f"pooled {word}", pooled_dim) for word in words], axis=0)
    return text, (pooled * 3**0.5).astype(np.float32)


@lru_cache(maxsize=128)
def _vector(word: str, width: int) -> FloatArray:
    """A fixed direction for each word."""
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(seed)).standard_normal(width, dtype=np.float32)
