"""Names and byte layouts of the files of a step: the part of the format that needs nothing but the standard library.

A step is a folder ``step-00000100`` with plain safetensors files, one a rank and section, JSON state files, an index
and a manifest. FORMAT.md describes all of it byte by byte; this module is its first half in code: file names and the
safetensors header. `titan_ckpt._index` and `titan_ckpt._manifest` are the other half.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 2
"""Highest version of the format this code reads. A step is written in the lowest that can hold it: 2 if anything in it
is compressed, else 1."""

BLOCK_BYTES = 4 << 20
"""Bytes of a file covered by one digest: 16 bytes of digest for 4 MiB, so 4 MB for a terabyte."""

DATA_ALIGN = 4096
"""Data of a safetensors file starts at a multiple of this (header padded with spaces), so that it maps page by page."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors limit on a header."""

MANIFEST_NAME = "MANIFEST.json"
INDEX_NAME = "INDEX.json.zst"
STATE_NAME = "state/state.json"

SECTIONS = ("model", "optim", "extra")
"""Where a tensor belongs. Only ``model`` lies in the step's root, so that other readers of safetensors see weights."""

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Safetensors dtype name to bytes an element."""

_STEP = re.compile(r"step-(\d{8,})(?:\.r(\d+)(?:\.[0-9a-f]{16})?)?")


def shard_name(section: str, rank: int) -> str:
    """The file that rank ``rank`` writes for ``section``, relative to the step's folder."""
    folder = {"model": "", "optim": "optim/", "extra": "state/"}[section]
    return f"{folder}{section}-r{rank:05d}.safetensors"


def rank_state_name(rank: int) -> str:
    """The JSON file with the state that belongs to one rank (random generators, data position)."""
    return f"state/rank-r{rank:05d}.json"


def step_name(step: int, revision: int = 0) -> str:
    """The folder of a step; ``revision`` counts how often the same step was saved again."""
    return f"step-{step:08d}" + (f".r{revision}" if revision else "")


def remote_step_name(step: int, revision: int, save_id: str) -> str:
    """The folder of a step in a store that cannot rename: no other save writes there."""
    return f"step-{step:08d}.r{revision}.{save_id}"


def parse_step_name(name: str) -> tuple[int, int] | None:
    """``(step, revision)`` of a folder name, or None where the name is not a step's."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


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
        header = json.loads(bytes(head[8 : 8 + length]))
    except ValueError as err:
        raise ValueError(f"{name} is not a safetensors file: its header is not JSON ({err}).") from err
    if not isinstance(header, dict):
        raise ValueError(f"{name} is not a safetensors file: its header is not a JSON object.")
    start = 8 + length
    for key, value in header.items():
        if key != "__metadata__":
            _check_tensor(key, value, file_bytes - start, name)
    return start, header


def _check_tensor(key: str, value: Any, data_bytes: int, name: str) -> None:
    try:
        begin, end = value["data_offsets"]
        entry = Entry(key, value["dtype"], tuple(value["shape"]))
        known = entry.dtype in ITEM_BYTES
        fits = 0 <= begin <= end <= data_bytes and (not known or end - begin == entry.nbytes)
    except (KeyError, TypeError, ValueError) as err:
        raise ValueError(f"{name}: tensor {key!r} has a malformed header entry {value!r}.") from err
    if not fits:
        raise ValueError(
            f"{name}: tensor {key!r} of dtype {entry.dtype} and shape {list(entry.shape)} cannot lie at bytes "
            f"{begin}:{end} of {data_bytes}. The file is damaged or was not written whole."
        )
