"""A message of a shape that both ranks know: key and tensors in one piece, without a header.

Problem: every message of gloo wakes a thread on both ranks, which costs more than what a small one holds. A header doubles
their number.

Idea: the shapes of a key rarely change from step to step. What a key had last is what its next message is laid out for, on
both ranks; the receiver takes room for it, or for a header if that is longer, and the first number says which of the two
came. A message of other shapes, or too large to be worth a copy, comes with a header as ever.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from titan_pipeline.runtime.transport.messages import Key, Payload, Specs
from titan_pipeline.runtime.transport.tree import as_bytes

PACKED = 3
"""First number of such a message; headers have others."""
_PREFIX = 64
"""Bytes of the kind of message and its key. Tensors begin at multiples of it, so that each may be viewed as its data type."""
_MOST = 2**20
"""Bytes of the largest message that is packed: a copy of more costs as much as a header."""


class MessageLayout(NamedTuple):
    """Where the tensors of a message lie in it."""

    specs: Specs
    structure: bytes
    starts: Sequence[int]
    num_bytes: int
    prefix: Tensor

    def pack(self, payload: Payload) -> Tensor:
        """The message, uint8."""
        whole = torch.empty(self.num_bytes, dtype=torch.uint8)
        whole[:_PREFIX] = self.prefix
        for tensor, start in zip(payload, self.starts, strict=True):
            if tensor is not None:
                whole[start : start + tensor.nbytes] = as_bytes(tensor)
        return whole

    def unpack(self, whole: Tensor, key: Key) -> Payload:
        """The tensors of a message; they share its memory.

        Raises:
            RuntimeError: If it has another key.
        """
        _, *got = whole[:32].view(torch.int64).tolist()
        if tuple(got) != key:
            raise RuntimeError(f"expected message {key}, got {tuple(got)}")
        return tuple(
            None if spec is None
            else whole[start : start + spec[0].itemsize * spec[1].numel()].view(spec[0]).view(spec[1])
            for spec, start in zip(self.specs, self.starts, strict=True)
        )  # fmt: skip


def layout_of(key: Key, specs: Specs, structure: bytes) -> MessageLayout | None:
    """How the next message with this key is laid out, if it is like this one; None for one that is too large."""
    sizes = [0 if spec is None else spec[0].itemsize * spec[1].numel() for spec in specs]
    *starts, end = accumulate((-(-size // _PREFIX) * _PREFIX for size in sizes), initial=_PREFIX)
    if end > _MOST:
        return None
    prefix = torch.tensor([PACKED, *key, 0, 0, 0, 0], dtype=torch.int64).view(torch.uint8)
    return MessageLayout(specs, structure, starts, end, prefix)
