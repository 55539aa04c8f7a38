"""Plain values and tensors from rank to rank, as text: torch's object collectives would unpickle what another process sends."""

import base64
import json
from typing import Any

import torch
import torch.distributed as dist
from titan_ckpt.comm import ByteComm
from titan_ckpt.format.tagged_json import UNKNOWN, decode, dump_json, encode
from torch import Tensor


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank, in the order of ranks, on every rank. Collective.

    Args:
        value: None, numbers, text, bytes, tensors, numpy's numbers and arrays; lists, tuples, sets and dicts of them.
        group: The ranks; it needs a backend for CPU tensors. None: all ranks.

    Returns:
        Values that are equal to those given; tensors are on the CPU, and numpy's numbers and arrays are Python's.

    Raises:
        TypeError: The value holds anything else.
    """
    text = dump_json(encode(value, "value", _leaf))
    return [decode(json.loads(part), _from_leaf) for part in ByteComm(group).all_gather(text)]


def from_rank_before(value: Any, group: dist.ProcessGroup) -> Any:
    """The value of the rank before in ``group``; the last one's on the first. Collective. As `gather_values` otherwise."""
    before, after = (dist.get_global_rank(group, (group.rank() + by) % group.size()) for by in (-1, 1))
    text = torch.frombuffer(bytearray(dump_json(encode(value, "value", _leaf))), dtype=torch.uint8)
    length = _shift(torch.tensor([len(text)]), 1, before, after, group)
    return decode(json.loads(_shift(text, int(length), before, after, group).numpy().tobytes()), _from_leaf)


def _shift(mine: Tensor, size: int, before: int, after: int, group: dist.ProcessGroup) -> Tensor:
    """The ``size`` elements that the rank ``before`` sends, while this one sends ``mine`` to the rank ``after``."""
    theirs = mine.new_empty(size)
    sent = dist.isend(mine, after, group)
    dist.recv(theirs, before, group)
    if sent is not None:
        sent.wait()
    return theirs


def _leaf(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {
            "$tensor": [str(whole.dtype).removeprefix("torch."), list(whole.shape), base64.b64encode(data).decode()]
        }
    if hasattr(value, "tolist"):  # numpy's
        return encode(value.tolist(), path, _leaf)
    return UNKNOWN


def _from_leaf(tag: str, body: Any) -> Any:
    if tag != "$tensor":
        raise ValueError(f"unknown tag {tag!r} in a message of another rank: the ranks run different programs.")
    name, shape, text = body
    dtype = getattr(torch, name)
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
