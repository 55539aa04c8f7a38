"""The header of a safetensors file: written, padded so that data starts at a page; read, from files of anyone."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.format.names import DATA_ALIGN, ITEM_BYTES, MAX_HEADER_BYTES, parse_object


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file: its name there, dtype (safetensors name), shape and size."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str], at_least: int = 0) -> bytes:
    """The length word and header of a safetensors file, padded so that data starts at a multiple of `DATA_ALIGN`.

    Args:
        entries: The tensors, in the order of their data.
        metadata: The header's ``__metadata__``; left out if empty.
        at_least: Pad to this many bytes in all, a multiple of `DATA_ALIGN`.

    Raises:
        ValueError: If the header passes the format's limit, or two tensors share a name.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        if entry.name in header:
            raise ValueError(f"two tensors of one file are called {entry.name!r}. Rename one of the modules.")
        begin, end = end, end + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = max(-(-(len(text) + 8) // DATA_ALIGN) * DATA_ALIGN, at_least) - 8
    if padded > MAX_HEADER_BYTES:
        raise ValueError(
            f"the safetensors header would be {padded} bytes, over the format's limit of {MAX_HEADER_BYTES}. "
            "Save from more ranks, so that each file holds fewer tensors."
        )
    return padded.to_bytes(8, "little") + text.ljust(padded)


def decode_header(head: bytes | memoryview, file_bytes: int, name: str) -> tuple[int, dict[str, Any]]:
    """Parse the start of a safetensors file.

    Args:
        head: The file's bytes, at least up to the end of its header.
        file_bytes: Size of the whole file.
        name: The file's name, for errors.

    Returns:
        Where data starts, and the header: tensor name to dtype, shape and data_offsets, checked against the file.

    Raises:
        ValueError: If this is not a safetensors file, or a tensor lies outside it.
    """
    length = int.from_bytes(head[:8], "little")
    if file_bytes < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise ValueError(f"{name} is not a safetensors file: it gives its header {length} bytes of {file_bytes}.")
    try:
        header = parse_object(head[8 : 8 + length], "its header")
    except ValueError as err:
        raise ValueError(f"{name} is not a safetensors file: {err}") from err
    start = 8 + length
    for key, value in header.items():
        if key != "__metadata__":
            _check_tensor(key, value, file_bytes - start, name)
    return start, header


def _check_tensor(key: str, value: Any, data_bytes: int, name: str) -> None:
    try:
        begin, end = value["data_offsets"]
        dtype, shape = value["dtype"], tuple(value["shape"])
    except (KeyError, TypeError, ValueError) as err:
        raise ValueError(f"{name}: tensor {key!r} has a malformed header entry {_short(value)}.") from err
    if not (isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (begin, end, *shape))):
        raise ValueError(f"{name}: tensor {key!r} has a malformed header entry {_short(value)}.")
    entry = Entry(key, dtype, shape)
    known = entry.dtype in ITEM_BYTES
    if not (begin <= end <= data_bytes and (not known or end - begin == entry.nbytes)):
        raise ValueError(
            f"{name}: tensor {key!r} of dtype {entry.dtype} and shape {list(entry.shape)} cannot lie at bytes "
            f"{begin}:{end} of {data_bytes}. The file is damaged or was not written whole."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
