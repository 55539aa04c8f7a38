"""What travels between ranks: tuples of tensors with a key, and the news of a failure.

Microbatches may differ in shape, so every message starts with a header of fixed size that says what follows: the key
(checked on arrival, so that a disorder is an error and never wrong data), the shape and dtype of each tensor, and the
structure around them. A
header can instead announce a failure; its text follows.
"""

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_pipeline.runtime.transport.tree import TensorTree, as_bytes

HEADER_LENGTH = 64
_DATA, _FAILURE = 1, 2
_FIXED = 7
"""Numbers of a header before the data types and shapes."""
_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float32", "bfloat16", "float16", "float64", "int64", "int32", "bool", "uint8", "int16", "int8", "complex64",
        "complex128", "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
)  # fmt: skip
_COMMON = frozenset(_DTYPES[:10])
"""What every backend moves; other types travel as bytes."""
TEXT_LENGTH = 2048

Key = tuple[int, int, int]
"""What a message is: kind (0 activation, 1 gradient, 2 tied gradient, 3 tied sum), stage it is for, microbatch."""

Payload = tuple[Tensor | None, ...]
"""Tensors of one message; None stands for "no gradient". A `TensorTree` also has a structure."""


Specs = list[tuple[torch.dtype, torch.Size] | None]
"""Data type and shape of each tensor that follows a header."""


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """Who failed first, where, and with what."""

    rank: int
    position: int
    """Index of the action in the rank's program; -1 outside of it."""
    action: str
    error: str
    hung: bool = False
    """Whether it stands still, rather than failed: see `titan_pipeline.runtime.watchdog`."""

    def __str__(self) -> str:
        where = (
            f"at action {self.action} (position {self.position})" if self.position >= 0 else "outside of its actions"
        )
        return f"rank {self.rank} {'hangs' if self.hung else 'failed'} {where}: {self.error}"


class PipelineAborted(RuntimeError):
    """Another rank failed, so this step was stopped. ``failure`` says which rank, where and why."""

    def __init__(self, failure: PeerFailure) -> None:
        then = (
            "The ranks cannot meet any more: restart the job"
            if failure.hung
            else "Call reset() and the optimizer's zero_grad() on every rank before the next step"
        )
        super().__init__(f"{str(failure).rstrip('.')}. This rank stopped too. {then}.")
        self.failure = failure


def specs_of(payload: Payload) -> tuple[Specs, bytes]:
    """Data types and shapes of a message, and the structure around its tensors; empty for none."""
    structure = payload.structure if isinstance(payload, TensorTree) else b""
    return [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in payload], structure


def encode_specs(specs: Specs, structure: bytes) -> bytes:
    """What `specs_of` gave, as text."""
    shapes = [None if spec is None else [_DTYPES.index(spec[0]), *spec[1]] for spec in specs]
    return json.dumps(shapes).encode() + b"\n" + structure


def decode_specs(text: bytes) -> tuple[Specs, bytes]:
    """What `encode_specs` wrote."""
    shapes, _, structure = text.partition(b"\n")
    specs = [None if shape is None else (_DTYPES[shape[0]], torch.Size(shape[1:])) for shape in json.loads(shapes)]
    return specs, structure


def encode_header(key: Key, specs: Specs, structure: bytes) -> list[Tensor]:
    """The header of a message, ``HEADER_LENGTH`` int64 as uint8, and what does not fit it as a second tensor, int64."""
    numbers: list[int] = []
    for spec in specs:
        numbers += [-1, 0] if spec is None else [_DTYPES.index(spec[0]), len(spec[1]), *spec[1]]
    values = [_DATA, *key, len(specs), _FIXED + len(numbers) + len(structure), len(structure), *numbers, *structure]
    first = torch.tensor(values[:HEADER_LENGTH] + [0] * (HEADER_LENGTH - len(values)), dtype=torch.int64).view(
        torch.uint8
    )
    rest = values[HEADER_LENGTH:]
    return [first, torch.tensor(rest, dtype=torch.int64)] if rest else [first]


def announces_failure(header: Tensor) -> bool:
    """Whether a header is that of `failure_header`."""
    return int(header[0]) == _FAILURE


def rest_of(header: Tensor) -> int:
    """How many numbers follow a header, in a tensor of their own."""
    return max(0, int(header[5]) - HEADER_LENGTH)


def decode_header(header: Tensor) -> tuple[Key, Specs, bytes]:
    """Key, what follows, and the structure around it; from a header with its rest appended."""
    values: list[int] = header.tolist()
    at = _FIXED
    specs: Specs = []
    for _ in range(values[4]):
        code, dims = values[at], values[at + 1]
        specs.append(None if code < 0 else (_DTYPES[code], torch.Size(values[at + 2 : at + 2 + dims])))
        at += 2 + dims
    return (values[1], values[2], values[3]), specs, bytes(values[at : at + values[6]])


def on_wire(tensor: Tensor) -> Tensor:
    """The tensor in a form that every backend moves; it shares the memory of a contiguous one."""
    return tensor if tensor.dtype in _COMMON else as_bytes(tensor)


def with_structure(payload: Payload, structure: bytes) -> Payload:
    """The payload as it was sent."""
    return payload if not structure else TensorTree.received([t for t in payload if t is not None], structure)


def failure_header() -> Tensor:
    """The header that announces a failure, as uint8."""
    return torch.tensor([_FAILURE] + [0] * (HEADER_LENGTH - 1), dtype=torch.int64).view(torch.uint8)


def encode_failure(failure: PeerFailure | None) -> Tensor:
    """A failure (or none) as bytes of shape ``[TEXT_LENGTH]``, uint8."""
    text = b""
    if failure is not None:
        text = f"{failure.rank}\n{failure.position}\n{failure.action}\n{failure.error}".encode()[:TEXT_LENGTH]
    return torch.tensor(list(text) + [0] * (TEXT_LENGTH - len(text)), dtype=torch.uint8)


def decode_failure(encoded: Tensor) -> PeerFailure | None:
    """What `encode_failure` made."""
    text = bytes(encoded.tolist()).rstrip(b"\0").decode(errors="replace")
    if not text:
        return None
    rank, position, action, error = text.split("\n", 3)
    return PeerFailure(int(rank), int(position), action, error)
