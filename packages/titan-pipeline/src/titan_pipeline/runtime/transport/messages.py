"""What travels between ranks: tuples of tensors with a key, and the news of a failure.

Microbatches may differ in shape, so every message starts with a header of fixed size that says what follows: the key
(checked on arrival, so that a disorder is an error and never wrong data) and the shape and dtype of each tensor. A
header can instead announce a failure; its text follows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

HEADER_LENGTH = 64
_MAX_TENSORS, _MAX_DIMS = 6, 8
_DATA, _FAILURE = 1, 2
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8,
    torch.int16, torch.int8,
)  # fmt: skip
TEXT_LENGTH = 2048

Key = tuple[int, int, int]
"""What a message is: kind (0 activation, 1 gradient, 2 tied gradient, 3 tied sum), stage it is for, microbatch."""

Payload = tuple[Tensor | None, ...]
"""Tensors of one message; None stands for "no gradient"."""


Specs = list[tuple[torch.dtype, tuple[int, ...]] | None]
"""Data type and shape of each tensor that follows a header."""


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """Who failed first, where, and with what."""

    rank: int
    position: int
    """Index of the action in the rank's program; -1 outside of it."""
    action: str
    error: str

    def __str__(self) -> str:
        where = (
            f"at action {self.action} (position {self.position})" if self.position >= 0 else "outside of its actions"
        )
        return f"rank {self.rank} failed {where}: {self.error}"


class PipelineAborted(RuntimeError):
    """Another rank failed, so this step was stopped. ``failure`` says which rank, where and why."""

    def __init__(self, failure: PeerFailure) -> None:
        super().__init__(f"{failure}. This rank stopped too. Call reset() on every rank before the next step.")
        self.failure = failure


def encode_header(key: Key, payload: Payload) -> Tensor:
    """The header of a message, int64 of shape ``[HEADER_LENGTH]``."""
    if len(payload) > _MAX_TENSORS:
        raise ValueError(f"a stage returns {len(payload)} tensors, but a message holds {_MAX_TENSORS}. Pack them.")
    values = [_DATA, *key, len(payload)]
    for tensor in payload:
        if tensor is None:
            values += [-1, 0]
            continue
        if tensor.dim() > _MAX_DIMS:
            raise ValueError(
                f"a stage returns a tensor of {tensor.dim()} dimensions; a message allows {_MAX_DIMS}. Reshape it."
            )
        values += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    if len(values) > HEADER_LENGTH:
        raise ValueError(f"the shapes of {len(payload)} tensors do not fit a header of {HEADER_LENGTH} numbers.")
    return torch.tensor(values + [0] * (HEADER_LENGTH - len(values)), dtype=torch.int64)


def decode_header(header: Tensor) -> tuple[Key, Specs] | None:
    """Key and what follows; None if the header announces a failure."""
    values: list[int] = header.tolist()
    if values[0] == _FAILURE:
        return None
    at = 5
    specs: Specs = []
    for _ in range(values[4]):
        code, dims = values[at], values[at + 1]
        specs.append(None if code < 0 else (_DTYPES[code], tuple(values[at + 2 : at + 2 + dims])))
        at += 2 + dims
    return (values[1], values[2], values[3]), specs


def failure_header() -> Tensor:
    """The header that announces a failure."""
    return torch.tensor([_FAILURE] + [0] * (HEADER_LENGTH - 1), dtype=torch.int64)


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
