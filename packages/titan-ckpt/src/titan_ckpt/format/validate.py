"""Checks on the JSON of a step before it is used.

Digests detect accidents. They do not detect an index that was crafted with matching digests: files outside of the step,
boxes outside of a file, a number of boxes that takes all memory. Every step is checked once, when it is opened. Later code
relies on that.
"""

import math
from collections.abc import Sequence
from typing import Any

from titan_ckpt.format.boxes import is_tiling
from titan_ckpt.format.codec import FRAME_BYTES
from titan_ckpt.format.columns import PACKED_FROM, PackedColumn, column_array, column_numbers
from titan_ckpt.format.index import FileRecord, Index, StoredTensor
from titan_ckpt.format.names import BLOCK_BYTES, INDEX_NAME, ITEM_BYTES, SECTIONS, is_file_name

_NO_FILE = (
    "which cannot be a file of a step: those are in its folder, in optim/ or in state/. Do not use this step: it was "
    "crafted to read other files."
)


def check_index(index: Index) -> None:
    """Check names, types, bounds and coverage of an index.

    Raises:
        ValueError: If a file's name leads out of the step, a tensor's bytes are outside of its file, or its boxes do not
            hold each element once. Values of the wrong type may also raise `TypeError`, `LookupError`,
            `AttributeError` or `ArithmeticError`.
    """
    for record in index.files:
        _check_file(record)
    if len({record.name for record in index.files}) != len(index.files):
        raise ValueError("two files have one name.")
    missing = [section for section in SECTIONS if section not in index.tensors]
    if missing:
        raise ValueError(f"it has no tensors of {missing}.")
    check = _TensorCheck(index.files)
    for section, tensors in index.tensors.items():
        for key, tensor in tensors.items():
            try:
                if section != "optim" and "frames" in tensor.columns:
                    raise ValueError("it has compressed boxes, which only optimizer state may have.")
                check(tensor)
            except ValueError as err:
                raise ValueError(f"{section} tensor {key!r}: {err}") from err
    for alias, first in index.tied.items():
        if first not in index.tensors["model"]:
            raise ValueError(f"{alias!r} is tied to {first!r}, which it does not list.")


def check_manifest(value: dict[str, Any]) -> None:
    """Check keys, types and file names of a manifest. Values of metrics are not checked.

    Raises:
        ValueError: If a key is missing or has another type, or a file's name leads out of the step. Entries of the wrong
            type may also raise `TypeError` or `LookupError`.
    """
    kinds = {"versions": dict, "metrics": dict, "files": list, "index": dict, "save_id": str, "saved_at": str}
    numbers = ("format", "step", "world_size", "serial")
    missing = [name for name in [*numbers, *kinds] if name not in value]
    if missing:
        raise ValueError(f"it is missing {', '.join(map(repr, missing))}.")
    wrong = [name for name, kind in kinds.items() if not isinstance(value[name], kind)]
    wrong += [name for name in numbers if not _ints([value[name]])]
    if wrong:
        raise ValueError(f"{', '.join(map(repr, wrong))} is not of the type that FORMAT.md says.")
    for entry in [{**value["index"], "name": INDEX_NAME}, *value["files"]]:
        if not is_file_name(entry["name"]):
            raise ValueError(f"it lists {entry['name']!r}, {_NO_FILE}")
        if not (_ints([entry["size"]]) and isinstance(entry["digest"], str)):
            raise ValueError(f"size or digest of {entry['name']} is not of the type that FORMAT.md says.")


def check_commit(value: dict[str, Any]) -> None:
    """Check the numbers of a commit record. Values of metrics are not checked.

    Raises:
        ValueError: If one has another type.
    """
    if not _ints([value["step"], value["serial"]]):
        raise ValueError("'step' or 'serial' is not of the type that FORMAT.md says.")


def check_shared_state(state: dict[str, Any]) -> None:
    """Check that the plain state of a run has all its parts.

    Raises:
        ValueError: If a part has another type. Missing parts and values of the wrong type may also raise `TypeError`,
            `LookupError` or `AttributeError`.
    """
    kinds = {"dp": list, "has": list, "model": dict, "optim": dict, "sched": list, "extra": dict}
    for name, kind in kinds.items():
        if not isinstance(state[name], kind):
            raise ValueError(f"{name!r} is a {type(state[name]).__name__}, not a {kind.__name__}.")
    if not state["dp"] or not all(_ints(place) and len(place) == 2 for place in state["dp"]):
        raise ValueError("'dp' is not [place, size] of each rank.")
    groups, leaves = state["optim"]["groups"], state["optim"]["leaves"]
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        raise ValueError("'optim' has groups that are not settings and parameters.")
    if not isinstance(leaves, dict) or not all(isinstance(values, dict) for values in leaves.values()):
        raise ValueError("'optim' has leaves that are not values by parameter.")


def _is_group(group: Any) -> bool:
    params = group["params"]
    return isinstance(group["hyper"], dict) and isinstance(params, list) and set(map(type, params)) <= {str, int}


def _check_file(record: FileRecord) -> None:
    if not is_file_name(record.name):
        raise ValueError(f"it lists {record.name!r}, {_NO_FILE}")
    if not (_ints([record.size, record.data_start]) and record.data_start <= record.size):
        raise ValueError(f"{record.name} of {record.size!r} bytes cannot have data from byte {record.data_start!r}.")
    if len(record.blocks) != -(-record.size // BLOCK_BYTES) or any(len(digest) != 32 for digest in record.blocks):
        raise ValueError(f"{record.name} of {record.size} bytes has {len(record.blocks)} digests of blocks.")


class _TensorCheck:
    """Checks the tensors of one index. Boxes that several tensors share are checked once."""

    def __init__(self, files: Sequence[FileRecord]) -> None:
        self._data_bytes = [record.size - record.data_start for record in files]
        self._known: dict[Any, Any] = {}

    def __call__(self, tensor: StoredTensor) -> None:
        columns, shape = tensor.columns, tensor.shape
        item, n, offsets, sizes = ITEM_BYTES.get(tensor.dtype), columns["count"], columns["offsets"], columns["sizes"]
        if item is None:
            raise ValueError(f"dtype {tensor.dtype!r} is unknown.")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"its boxes have {len(offsets)} and {len(sizes)} dimensions, but it has {len(shape)}.")
        every = [columns["file"], columns["start"], *offsets, *sizes]
        if not _ints([n, *shape]) or not all(map(self._is_column, every)) or item * math.prod(shape) >= 1 << 62:
            raise ValueError("its shape and the places of its boxes must be integers from 0 that a file can hold.")
        # A column that is one number takes no space in the file: its count proves nothing.
        if n > 1 and all(isinstance(column, int) for column in every):
            raise ValueError(f"it cannot have {n} equal boxes.")
        if any(not isinstance(column, int) and len(column) != n for column in every):
            raise ValueError(f"it has {n} boxes, but another number of entries in a column.")
        cut = (
            shape,
            n,
            *(tuple(c) if isinstance(c, list) else c if isinstance(c, int) else id(c) for c in (*offsets, *sizes)),
        )
        if cut not in self._known:
            _check_cut(shape, offsets, sizes, n)
            self._known[cut] = columns  # kept alive, so that no id is reused
        self._check_bytes(tensor, item)

    def _is_column(self, column: Any) -> bool:
        """Whether it holds integers from 0."""
        if not isinstance(column, PackedColumn):
            return _ints(column if isinstance(column, list) else [column])
        if id(column) not in self._known:
            self._known[id(column)] = int(column.array.min(initial=0)) >= 0
        return self._known[id(column)]

    def _check_bytes(self, tensor: StoredTensor, item: int) -> None:
        """Check that every box is within its file."""
        columns, n = tensor.columns, tensor.count
        if n > PACKED_FROM and "frames" not in columns:
            self._check_many(columns, item)
            return
        unpacked = [column_numbers(column, n) for column in (columns["file"], columns["start"], *columns["sizes"])]
        for file, start, frames, *box in zip(
            *unpacked[:2], columns.get("frames") or [None] * n, *unpacked[2:], strict=True
        ):
            nbytes = item * math.prod(box)
            if frames is not None:
                nbytes = _frame_bytes(frames, nbytes)
            if file >= len(self._data_bytes) or start + nbytes > self._data_bytes[file]:
                raise ValueError(f"{nbytes} of its bytes, from byte {start}, are not within file {file}.")

    def _check_many(self, columns: dict[str, Any], item: int) -> None:
        import numpy as np

        file, start, *sizes = (
            column_array(column) for column in (columns["file"], columns["start"], *columns["sizes"])
        )
        if np.max(file) >= len(self._data_bytes):
            raise ValueError(
                f"one of its boxes is in file {np.max(file)}, but there are {len(self._data_bytes)} files."
            )
        nbytes = item
        for size in sizes:  # no overflow: no box is larger than the tensor
            nbytes = nbytes * size
        room = np.asarray(self._data_bytes, dtype=np.int64)[file] - nbytes
        if np.any(start > room):
            worst = int(np.argmax(start - room))
            raise ValueError(f"its box {worst} is not within its file.")


def _check_cut(shape: Sequence[int], offsets: Sequence[Any], sizes: Sequence[Any], count: int) -> None:
    """Check that boxes are within the tensor and hold each element once."""
    for length, begin, size in zip(shape, offsets, sizes, strict=True):
        if count == 1 or (isinstance(begin, int) and isinstance(size, int)):
            first, n = (column if isinstance(column, int) else column_numbers(column, 1)[0] for column in (begin, size))
            outside = count > 0 and first + n > length
        else:
            begins, extents = column_array(begin), column_array(size)
            outside = bool(((begins > length) | (extents > length - begins)).any())  # type: ignore[union-attr]
        if outside:
            raise ValueError(f"one of its boxes is outside of its shape {list(shape)}.")
    begins, extents = ([c if isinstance(c, int) else column_array(c) for c in side] for side in (offsets, sizes))
    if not is_tiling(shape, begins, extents, count):
        raise ValueError(
            f"its {count} boxes do not cover its shape {list(shape)}: an element is in none of them, or in several."
        )


def _frame_bytes(lengths: Any, raw_bytes: int) -> int:
    if not _ints(lengths) or len(lengths) != -(-raw_bytes // FRAME_BYTES):
        raise ValueError(f"its {raw_bytes} bytes are not in frames of {FRAME_BYTES}.")
    return sum(lengths)


def _ints(values: Any) -> bool:
    """Whether this is a list of integers from 0."""
    return isinstance(values, list) and set(map(type, values)) <= {int} and (not values or min(values) >= 0)
