"""Names and byte layouts of the files of a step: the part of the format that needs nothing but the standard library.

A step is a folder ``step-00000100`` with plain safetensors files, one per rank and section, JSON state files, an index
and a manifest. FORMAT.md describes all of it byte by byte; this module is its first half in code: file names and the
safetensors header. `titan_ckpt.format.index` and `titan_ckpt.format.manifest` are the other half.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 3
"""Highest version of the format this code reads. A step is written in the lowest that can hold it: 3 if a tensor has more
than 64 boxes, else 2 if anything in it is compressed, else 1."""

BLOCK_BYTES = 4 << 20
"""Bytes of a file covered by one digest: 16 bytes of digest for 4 MiB, so 4 MB for a terabyte."""

DATA_ALIGN = 4096
"""Data of a safetensors file starts at a multiple of this (header padded with spaces), so that it maps page by page."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors limit on a header."""

MANIFEST_NAME = "MANIFEST.json"
COMMIT_NAME = "COMMIT.json"
"""The commit's place in the order of commits, beside the manifest: a copy, so that no list of thousands of files need be
parsed for it. Not part of the step."""

INDEX_NAME = "INDEX.json.zst"
STATE_NAME = "state/state.json"

SECTIONS = ("model", "optim", "extra")
"""Where a tensor belongs. Only ``model`` lies in the step's root, so that other readers of safetensors see weights."""

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Safetensors dtype name to bytes per element."""

_STEP = re.compile(r"step-(\d{8,})(?:\.r(\d+)(?:\.[0-9a-f]{16})?)?")
_TURN = re.compile(r"commit-(\d{8,})\.json")
_FILE = re.compile(r"(?:(?:optim|state)/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")


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


def turn_name(serial: int) -> str:
    """The object by which a writer takes its place in the order of commits, in a store that cannot rename."""
    return f"commit-{serial:08d}.json"


def parse_turn_name(name: str) -> int | None:
    """The serial of `turn_name`; None where the name is not one."""
    match = _TURN.fullmatch(name)
    return int(match[1]) if match else None


def parse_step_name(name: str) -> tuple[int, int] | None:
    """``(step, revision)`` of a folder name, or None where the name is not a step's."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def check_step(step: int) -> None:
    """Refuse what cannot be the number of a step.

    Raises:
        ValueError: If it is negative.
    """
    if step < 0:
        raise ValueError(f"step={step} is negative. Count steps from 0.")


def is_file_name(name: object) -> bool:
    """Whether a manifest or an index may list a file of this name: one in the step's folder, ``optim/`` or ``state/``.

    Anything else (an absolute path, ``..``, a deeper folder) would have a reader open what is not part of the step.
    """
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def parse_object(data: bytes | memoryview, name: str) -> dict[str, Any]:
    """A JSON object from untrusted bytes; ``name`` says what they are, for errors.

    Raises:
        ValueError: If it is not JSON, nested too deep to be read, or not an object.
    """
    try:
        value = json.loads(bytes(data))
    except RecursionError as err:
        raise ValueError(f"{name} is not JSON that can be read: it is nested too deep.") from err
    except ValueError as err:
        raise ValueError(f"{name} is not JSON ({err}).") from err
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object, but a {type(value).__name__}.")
    return value


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

    ``entries`` come in the order of their data. The result has at least ``at_least`` bytes, a multiple of `DATA_ALIGN`.

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
