"""Tensors, arrays and dtypes in plain state: the types that `titan_ckpt.format.tagged_json` does not know.

A tensor of up to 4 KiB is stored in the JSON. A larger one becomes a tensor of the ``extra`` section, which is sharded,
balanced and checked like any other.
"""

import base64
import collections
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_ckpt.format import tagged_json
from titan_ckpt.format.codec import digest
from titan_ckpt.state.dtypes import DTYPES, dtype_name
from titan_ckpt.state.sharding import is_dtensor

_INLINE_BYTES = 4096
_MOST_EMPTY = 1 << 16


class TensorSink:
    """Encodes a tree and collects its larger tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """Key in the ``extra`` section to tensor."""
        self._uses: collections.Counter[str] = collections.Counter()

    def encode(self, value: Any, path: str) -> Any:
        """As `titan_ckpt.format.tagged_json.encode`, with tensors."""
        return tagged_json.encode(value, path, self._leaf)

    def _leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = dtype_name(value.dtype, path)
            if value.layout is not torch.strided or value.is_meta:
                raise TypeError(
                    f"{path} is a {value.layout} tensor on {value.device}. Save dense tensors that have values."
                )
            if is_dtensor(value) or value.numel() * value.element_size() > _INLINE_BYTES:
                key = self._key(path)
                self.tensors[key] = value
                return {"$stored": key}
            return {"$tensor": [name, list(value.shape), _base64(tensor_bytes(value.detach()))]}
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.kind not in "biufcSU":
                return tagged_json.UNKNOWN
            tag = "$ndarray" if isinstance(value, np.ndarray) else "$numpy"
            return {tag: [value.dtype.str, list(value.shape), _base64(np.ascontiguousarray(value).tobytes())]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        return tagged_json.UNKNOWN

    def _key(self, path: str) -> str:
        """``path``, numbered if a tensor has it: keys of one dict have one path, and so do values under keys of equal repr."""
        self._uses[path] += 1
        return path if self._uses[path] == 1 else f"{path} ({self._uses[path]})"


def encode_plain(value: Any, path: str, refusal: type[Exception] = TypeError) -> Any:
    """As `TensorSink.encode`, for a value without large tensors.

    Raises:
        Exception: ``refusal``, if it holds a tensor of more than 4 KiB.
    """
    sink = TensorSink()
    encoded = sink.encode(value, path)
    if sink.tensors:
        raise refusal(f"{path} holds tensors {list(sink.tensors)[:4]} inside plain data. Make them entries of a dict.")
    return encoded


def decode(value: Any, stored: Callable[[str], Any]) -> Any:
    """Undo `TensorSink.encode`; ``stored`` reads a tensor of the ``extra`` section by key."""

    def leaf(tag: str, body: Any) -> Any:
        if tag == "$stored":
            return stored(body)
        try:
            return built(tag, body)
        except RuntimeError as err:  # torch's own, for a shape, a number of bytes or a device
            raise ValueError(f"{tag} is malformed: {err}") from err

    def built(tag: str, body: Any) -> Any:
        if tag == "$tensor":
            data = bytearray(base64.b64decode(body[2]))
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            return flat.view(DTYPES[body[0]]).reshape(body[1])
        if tag in ("$ndarray", "$numpy"):
            data, dtype = base64.b64decode(body[2]), np.dtype(body[0])
            if not dtype.itemsize:  # empty strings: numpy cannot read their dtype
                if math.prod(body[1]) > _MOST_EMPTY:  # they take no bytes in the file: their number proves nothing
                    raise ValueError(f"an array of shape {body[1]} holds more than {_MOST_EMPTY} empty strings.")
                array = np.zeros(body[1], f"{dtype.kind}1")
            else:
                array = np.frombuffer(data, dtype).reshape(body[1])
            return array.copy() if tag == "$ndarray" else array[()]
        if tag == "$dtype" and isinstance(found := getattr(torch, body, None), torch.dtype):
            return found
        if tag == "$device":
            return torch.device(body)
        if tag == "$size":
            return torch.Size(body)
        raise ValueError(f"unknown tag {tag!r} ({body!r}) in a state file: it was written by a newer version.")

    return tagged_json.decode(value, leaf)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order on the host: a view if possible, else a copy."""
    host = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _base64(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


def rng_state() -> dict[str, Any]:
    """The random generators of this process. CUDA's is that of the current device, if CUDA is in use."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda = bytes(tensor_bytes(torch.cuda.get_rng_state())) if torch.cuda.is_initialized() else None
    return {
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys, dtype="<u4").tobytes(), int(position), int(has_gauss), float(gauss)),
        "torch": bytes(tensor_bytes(torch.get_rng_state())),
        "cuda": cuda,
        "seed": torch.initial_seed(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype="<u4"), position, has_gauss, gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))


def reseed(seed: int, step: int, rank: int) -> int:
    """Seed every generator from (seed, step, rank), for another number of ranks; return the seed used."""
    derived = int(digest(f"{seed} {step} {rank}".encode())[:15], 16)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)
    return derived
