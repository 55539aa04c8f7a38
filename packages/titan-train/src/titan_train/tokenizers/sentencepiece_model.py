"""Read the pieces of a SentencePiece ``.model`` file: the few fields of its protocol buffer that an export needs.

The file is a ``ModelProto``: field 1 holds the pieces (1 text, 2 score, 3 type), field 2 the trainer's settings (3 the kind
of model), field 3 the normalizer's (2 a map of characters, 4 whether white space is squeezed). The library reads these files
but does not say which pieces a user defined.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2
SCORE_STEP = 2.0**-10
"""Scores of the unigram models trained here are multiples of it: float32 adds them exactly up to 16,384, some thousand pieces
of a line."""


@dataclass(frozen=True, slots=True)
class VocabPiece:
    """One entry of the vocabulary."""

    text: str
    score: float
    kind: int
    """NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model's vocabulary."""

    pieces: tuple[VocabPiece, ...]
    kind: str
    """unigram, bpe, or other."""
    normalizes: bool
    """Whether the model changes a text before it cuts it: maps characters, or squeezes white space."""

    @property
    def adds_exactly(self) -> bool:
        """Whether it is a unigram model whose scores add up without rounding, line by line (see `round_scores`)."""
        newline = any(piece.text == "\n" and piece.kind == USER_DEFINED for piece in self.pieces)
        scores = (piece.score / SCORE_STEP for piece in self.pieces)
        return self.kind == "unigram" and newline and not self.normalizes and all(s.is_integer() for s in scores)


def read_pieces(model: bytes) -> Pieces:
    """The vocabulary of a model that the library has loaded."""
    pieces: list[VocabPiece] = []
    kind = _UNIGRAM
    normalizes = True
    for field, start, end in _fields(model, 0, len(model)):
        if field > 3:
            continue
        parts = {number: model[at:stop] for number, at, stop in _fields(model, start, end)}
        if field == 1:
            score = struct.unpack("<f", parts.get(2, bytes(4)))[0]
            pieces.append(VocabPiece(parts.get(1, b"").decode(), score, _integer(parts, 3, NORMAL)))
        elif field == 2:
            kind = _integer(parts, 3, _UNIGRAM)
        else:
            normalizes = bool(parts.get(2)) or bool(_integer(parts, 4, 1))
    return Pieces(tuple(pieces), {_UNIGRAM: "unigram", _BPE: "bpe"}.get(kind, "other"), normalizes)


def round_scores(model: bytes) -> bytes:
    """The model with every score rounded to a multiple of `SCORE_STEP`.

    SentencePiece adds the scores of a text in float32, other libraries in float64, and where two ways to cut it are nearly
    equal each finds another one the better. Sums that need no rounding are the same in both.
    """
    rounded = bytearray(model)
    for field, start, end in _fields(model, 0, len(model)):
        for inner, at, stop in _fields(model, start, end) if field == 1 else ():
            if inner == 2:
                (score,) = struct.unpack("<f", model[at:stop])
                rounded[at:stop] = struct.pack("<f", round(score / SCORE_STEP) * SCORE_STEP)
    return bytes(rounded)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number of every field, and where its content starts and ends."""
    while at < end:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 2:
            size, at = _varint(data, at)
            stop = at + size
        else:
            stop = at + {1: 8, 5: 4}[wire] if wire else _varint(data, at)[1]
        yield key >> 3, at, stop
        at = stop


def _integer(parts: Mapping[int, bytes], number: int, default: int) -> int:
    return _varint(parts[number], 0)[0] if number in parts else default


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
