"""Documents of images and text, and rows that hold several of them whole.

A document is images, a prompt and an answer. It is never cut: rows are packed once, by lengths alone, and a document that no
row can hold is refused. Images stand before the prompt, each between two special tokens, as many tokens as
`titan_train.models.vision_language.encoder.image_tokens` counts; with ``data.add_bos`` that token comes first. Only the answer
is learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from titan_train.models.vision_language.args import EncoderArgs
from titan_train.models.vision_language.encoder import image_tokens
from titan_train.tasks.vision.images import FloatArray, Pixels
from titan_train.tokenizers import Tokenizer

IntArray = npt.NDArray[np.int64]
Grid = tuple[int, int]

_OPEN_ROWS = 64
"""Rows that a document may still be put into; more would pack hardly tighter."""


class ImageTextSet(Protocol):
    """Documents by number."""

    fingerprint: str
    """Hash of the content."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def grids(self, item: int) -> Sequence[Grid]:
        """Rows and columns of patches of each image."""
        ...

    def texts(self, item: int) -> tuple[str, str]:
        """Prompt and answer."""
        ...

    def count_tokens(self, item: int, tokenizer: Tokenizer) -> int:
        """Tokens of prompt and answer together, without one that ends them."""
        ...

    def name(self, item: int) -> str:
        """Its name in error messages."""
        ...

    def patches(self, item: int) -> list[FloatArray]:
        """Its images ``[P, values]``. Raises `BrokenImage`."""
        ...

    def thumbnail(self, item: int) -> Pixels:
        """Its first image for display, ``[side, side, 3]``, equally large for every item; white where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class ImageTextDocument:
    """The tokens of one document and what the model must know of each."""

    tokens: IntArray
    """``[L]``."""
    learned: npt.NDArray[np.bool_]
    """Whether the token is predicted, ``[L]``."""
    positions: IntArray
    """Time, row and column, ``[L, 3]``; three times the place, for a decoder that knows no rows and columns."""
    image: IntArray
    """Number of the token among those of the document's images, or -1, ``[L]``."""


def write_document(
    tokenizer: Tokenizer,
    args: EncoderArgs,
    grids: Sequence[Grid],
    prompt: str,
    answer: str | None,
    *,
    begin: Sequence[int] = (),
) -> ImageTextDocument:
    """The tokens of images, prompt and answer behind ``begin``; ``answer`` None ends after the prompt, for generation."""
    tokens: list[int] = []
    image: list[int] = []
    positions: list[IntArray] = []
    place = features = 0

    def text(ids: Sequence[int]) -> None:
        nonlocal place
        tokens.extend(ids)
        image.extend([-1] * len(ids))
        positions.append(np.repeat(np.arange(place, place + len(ids))[:, None], 3, axis=1))
        place += len(ids)

    text(begin)
    for rows, columns in grids:
        text([args.image_start_token])
        count = image_tokens(rows, columns, args.merge)
        tokens += [args.image_token] * count
        image += range(features, features + count)
        row, column = np.divmod(np.arange(count), columns // args.merge)
        positions.append(place + np.stack((np.zeros_like(row), row, column), axis=1))
        place += max(rows, columns) // args.merge
        features += count
        text([args.image_end_token])
    text(tokenizer.encode(prompt).tolist())
    asked = len(tokens)
    if answer is not None:
        text([*tokenizer.encode(answer).tolist(), tokenizer.eos_id])
    learned = np.arange(len(tokens)) >= asked
    where = np.concatenate(positions)
    if not args.grid_positions:
        where = np.repeat(np.arange(len(tokens))[:, None], 3, axis=1)
    return ImageTextDocument(np.array(tokens), learned, where, np.array(image))


def document_length(args: EncoderArgs, grids: Sequence[Grid], text_tokens: int, *, begin: Sequence[int] = ()) -> int:
    """Places of a row that a document takes: all tokens but the last, which is only predicted."""
    images = sum(image_tokens(*grid, args.merge) + 2 for grid in grids)
    return len(begin) + images + text_tokens


def pack_rows(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Which documents each row holds: the first of the open rows that has room, else a new one.

    Args:
        lengths: Places of each document, at most ``seq_len``.
        seq_len: Places of a row.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    first = 0
    for item, length in enumerate(lengths):
        found = next((row for row in range(first, len(rows)) if free[row] >= length), None)
        if found is None:
            found = len(rows)
            rows.append([])
            free.append(seq_len)
            first = max(first, len(rows) - _OPEN_ROWS)
        rows[found].append(item)
        free[found] -= length
    return rows
