"""Shards in the folder form: safetensors files whose tensors have one row per sample.

The metadata may hold ``captions``, a JSON list.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_train.tasks.diffusion.shards.fields import FIELDS, Sample, check_fields


class SafetensorsShard:
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ValueError: It is damaged, lacks a field, or fields differ in their number of samples.
        """
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file: Any = safe_open(path, "pt")
        except (SafetensorError, OSError) as err:
            raise ValueError(f"{path} is not a complete safetensors file: {err}. Prepare or fetch it again.") from err
        found = {name: self._file.get_slice(name) for name in self._file.keys() if name in FIELDS}  # noqa: SIM118
        check_fields(str(path), found)
        sizes = {name: list(part.get_shape()) for name, part in found.items()}
        counts = {size[0] if size else 0 for size in sizes.values()}
        if len(counts) > 1 or not min(counts):
            raise ValueError(
                f"{path}: its tensors hold {_listed({name: size[:1] for name, size in sizes.items()})} samples, but a shard has "
                "one row per sample in each. Prepare or fetch it again."
            )
        dtypes = {name: part.get_dtype() for name, part in found.items()}
        if wrong := {name: dtype for name, dtype in dtypes.items() if dtype not in ("F16", "BF16", "F32")}:
            raise ValueError(f"{path}: {_listed(wrong)} is no floating-point dtype of 16 or 32 bits. Store it as one.")
        self.count = counts.pop()
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(size[1:]) for name, size in sizes.items()}
        self.content = hashlib.sha256(repr(sorted((sizes | {"": list(dtypes.items())}).items())).encode()).hexdigest()

    def read(self, number: int) -> Sample:
        """The arrays of a sample."""
        return {name: self._file.get_slice(name)[number].float().numpy() for name in self.shapes}

    def name_of(self, number: int) -> str:
        """The file and the row."""
        return f"{self.path}, sample {number}"

    def captions(self, numbers: Sequence[int]) -> list[str]:
        """From the metadata."""
        try:
            found: Any = json.loads((self._file.metadata() or {}).get("captions", "[]"))
        except (ValueError, RecursionError):
            found = []
        known = isinstance(found, list) and len(found) == self.count
        return [str(found[number]) if known else self.name_of(number) for number in numbers]


def read_tensors(path: Path, names: Sequence[str]) -> Sample:
    """Single arrays of a safetensors file, float32.

    Raises:
        ValueError: It is damaged, or lacks one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).float().numpy() for name in names}
    except (SafetensorError, OSError) as err:
        raise ValueError(
            f"{path} is not a safetensors file with {', '.join(names)}: {err}. Prepare or fetch it again."
        ) from err


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
