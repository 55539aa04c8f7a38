"""Names of files and folders, limits, and the header of a safetensors file. Standard library only."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 3
"""The newest version of the format that this code reads. FORMAT.md says which version a step is written in."""

BLOCK_BYTES = 4 << 20
"""Bytes of a file per digest: 4 MB of digests for a terabyte."""

DATA_ALIGN = 4096
"""The header of a safetensors file is padded to a multiple of this, so that data starts at a page."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors limit on a header."""

MANIFEST_NAME = "MANIFEST.json"
COMMIT_NAME = "COMMIT.json"
"""A short copy of the manifest without its list of files. Not part of the step."""

INDEX_NAME = "INDEX.json.zst"
STATE_NAME = "state/state.json"

SECTIONS = ("model", "optim", "extra")
"""The sections of a step. Only ``model`` files are in the step's folder itself, so other readers find only weights."""

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
    """The file of ``section`` that ``rank`` writes, relative to the step's folder."""
    folder = {"model": "", "optim": "optim/", "extra": "state/"}[section]
    return f"{folder}{section}-r{rank:05d}.safetensors"


def rank_state_name(rank: int) -> str:
    """The JSON file with one rank's random generators and data position."""
    return f"state/rank-r{rank:05d}.json"


def step_name(step: int, revision: int = 0) -> str:
    """The folder of a step. ``revision`` counts how often the step was saved again."""
    return f"step-{step:08d}" + (f".r{revision}" if revision else "")


def remote_step_name(step: int, revision: int, save_id: str) -> str:
    """The folder of a step in a store that cannot rename. It is unique to the save."""
    return f"step-{step:08d}.r{revision}.{save_id}"


def turn_name(serial: int) -> str:
    """The object that reserves a serial, in a store that cannot rename."""
    return f"commit-{serial:08d}.json"


def parse_turn_name(name: str) -> int | None:
    """The serial in a `turn_name`; None for any other name."""
    match = _TURN.fullmatch(name)
    return int(match[1]) if match else None


def parse_step_name(name: str) -> tuple[int, int] | None:
    """``(step, revision)`` of a step's folder name; None for any other name."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def check_step(step: int) -> None:
    """Raise a ValueError if a step's number is negative."""
    if step < 0:
        raise ValueError(f"step={step} is negative. Count steps from 0.")


def is_file_name(name: object) -> bool:
    """Whether a manifest or index may list this name: a file in the step's folder, ``optim/`` or ``state/``.

    Any other name (an absolute path, ``..``, a deeper folder) would lead a reader out of the step.
    """
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def parse_object(data: bytes | memoryview, name: str) -> dict[str, Any]:
    """Parse untrusted bytes as a JSON object. ``name`` says in errors what they are.

    Raises:
        ValueError: If they are not JSON, nested too deep, or not an object.
    """
    try:
        value = json.loads(bytes(data))
    except RecursionError as err:
        raise ValueError(f"{name} is not readable JSON: it is nested too deep.") from err
    except ValueError as err:
        raise ValueError(f"{name} is not JSON ({err}).") from err
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object, but a {type(value).__name__}.")
    return value


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file: its name there, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str], at_least: int = 0) -> bytes:
    """The length word and header of a safetensors file, padded to a multiple of `DATA_ALIGN`.

    Args:
        entries: The tensors, in the order of their data.
        metadata: Strings to store with them.
        at_least: Least number of bytes, a multiple of `DATA_ALIGN`.

    Raises:
        ValueError: If the header is over the format's limit, or two tensors share a name.
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
