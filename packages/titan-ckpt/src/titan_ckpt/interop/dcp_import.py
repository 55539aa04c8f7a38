"""Make a step from a checkpoint of torch's distributed checkpointing (DCP), without a model or other ranks.

Tensors keep their names. Optimizer state is stored by parameter and state name, and parameter groups by their settings, so
a model in any layout can continue from it. Everything else (schedulers, counters, data position) becomes ``extra``. No
pickle is trusted: metadata is read with an allow list (`read_metadata`), items with torch's ``weights_only`` loader. DCP
has no digests, so damage in a readable file is not detected.
"""

import collections
import io
import logging
import pathlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.serialization import _get_layout

from titan_ckpt.format.boxes import Box, intersect, is_tiling
from titan_ckpt.interop.stream import write_step
from titan_ckpt.interop.views import View
from titan_ckpt.load.copies import narrow
from titan_ckpt.state.dtypes import DTYPES, dtype_name
from titan_ckpt.state.leaves import encode_plain
from titan_ckpt.storage.paths import StorePath, as_path

_log = logging.getLogger("titan_ckpt")


def import_dcp(
    folder: Path | str,
    root: StorePath | Path | str,
    *,
    step: int = 0,
    model: str | None = None,
    optim: str | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> StorePath:
    """Make a step from a DCP checkpoint, in one process. Needs memory for the largest tensor.

    Args:
        folder: The DCP checkpoint: a folder with ``.metadata`` and ``.distcp`` files.
        root: The root of the steps.
        step: The step's number.
        model: The entry of the saved state dict that is the model; "" if its weights are at the top level, beside entries
            that are dicts (as torchtitan saves them). None takes "model" if it exists, else "".
        optim: The entry that is the optimizer's state. None takes "optim" or "optimizer".
        progress: Called with the bytes about to be written.

    Returns:
        The step's folder. Restore it with ``TrainState(model=, optim=, rng=False, extra={})``. Everything else is in ``extra``,
        under its name in the DCP checkpoint (``extra["train_state.step"]``). A log line lists it.

    Raises:
        ValueError: If this is not a DCP checkpoint, there is no such model, a file is missing or damaged, a dtype is none of
            safetensors, a pickle holds anything but plain data and tensors, or the optimizer's state is nested or by number.
    """
    source = _Source(Path(folder))
    paths = source.paths()
    model = _entry(paths.values(), ("model",), "") if model is None else model
    optim = _entry(paths.values(), ("optim", "optimizer"), "optim") if optim is None else optim
    parts = _Parts(model, optim)
    for name, kind in source.metadata.state_dict_metadata.items():
        try:
            if isinstance(kind, TensorStorageMetadata):
                parts.add_tensor(name, paths[name], _DcpView(source, name, kind))
            else:
                parts.add_value(name, paths[name], source.load(MetadataIndex(name), name))
        except TypeError as err:  # of a dtype or a value that a step cannot hold
            raise ValueError(f"{folder}: {err}") from err
    if parts.views["extra"] and not parts.views["model"]:
        tops = sorted({path[0] for path in paths.values()})
        raise ValueError(
            f"{folder} holds no weights {f'in {model!r}' if model else 'at the top'}; its entries are {tops[:8]}. Name "
            "the model: import_dcp(..., model=...)."
        )
    numbered = [key for key in parts.views["optim"] if key.partition("/")[0].isdigit()]
    if numbered:
        raise ValueError(
            f"{folder} holds optimizer state by number ({numbered[0]!r}), without names of parameters. Save it with "
            "torch.distributed.checkpoint.state_dict.get_state_dict, or import without it: import_dcp(..., optim='')."
        )
    if parts.extra:
        _log.info("%s: kept as extra, neither model nor optimizer: %s", folder, sorted(parts.extra))
    return write_step(as_path(root), step, parts.views, parts.shared(), progress)


@dataclass(slots=True)
class _Parts:
    """The entries of a state dict, sorted into the parts of a step."""

    model: str
    """The entry that is the model; "" if weights are at the top level."""
    optim: str
    """The entry that is the optimizer's state."""
    views: dict[str, dict[str, View]] = field(default_factory=lambda: {"model": {}, "optim": {}, "extra": {}})
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    leaves: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    hypers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Settings by the group's number, or by parameter in DCP's flattened form."""

    def add_tensor(self, name: str, path: tuple[str, ...], view: View) -> None:
        if inside := self._inside("state", name, path):
            param, key = inside
            self.views["optim"][f"{param}/{key}"] = view
        elif inside := self._inside("param_groups", name, path):  # a learning rate
            value = torch.empty(view.shape, dtype=DTYPES[view.dtype])
            view.fill(((0,) * len(view.shape), view.shape), value)
            owner, key = inside
            self.hypers.setdefault(owner, {})[key] = encode_plain(value, name, ValueError)
        elif path[0] == self.model and len(path) > 1:
            self.views["model"][name.removeprefix(f"{self.model}.")] = view
        elif not self.model and len(path) == 1:
            self.views["model"][name] = view
        else:
            self.views["extra"][f"extra.{name}"] = view
            self.extra[name] = {"$stored": f"extra.{name}"}

    def add_value(self, name: str, path: tuple[str, ...], value: Any) -> None:
        encoded = encode_plain(value, name, ValueError)
        groups = f"{self.optim}.param_groups"
        if inside := self._inside("state", name, path):
            param, key = inside
            self.leaves.setdefault(param, {})[key] = encoded
        elif inside := self._inside("param_groups", name, path):
            owner, key = inside
            self.hypers.setdefault(owner, {})[key] = value if key == "params" else encoded
        elif name == groups:
            for number, group in enumerate(value):
                plain = {
                    k: v if k == "params" else encode_plain(v, f"{name}.{k}", ValueError) for k, v in group.items()
                }
                self.hypers.setdefault(str(number), {}).update(plain)
        else:
            self.extra[name] = encoded

    def _inside(self, part: str, name: str, path: tuple[str, ...]) -> tuple[str, str] | None:
        """Parameter (or number of the group) and key of an entry of the optimizer's ``part``; None if it is none.

        Raises:
            ValueError: If it is nested below a key.
        """
        if not name.startswith(f"{self.optim}.{part}."):
            return None
        first, *rest = path[1:] if path[0] == self.optim else (name.removeprefix(f"{self.optim}."),)
        if first != part:  # flattened: ``state.<parameter>.<key>``
            owner, _, key = first.removeprefix(f"{part}.").rpartition(".")
            rest = [owner, key, *rest]
        if len(rest) != 2:
            raise ValueError(
                f"{name!r} is nested in the optimizer's {part}, where a step has one value or tensor for each key of a parameter "
                "or group. Make it a key of its own before it is saved, or import without the optimizer: "
                "import_dcp(..., optim='')."
            )
        return rest[0], rest[1]

    def shared(self) -> dict[str, Any]:
        """Plain state for `titan_ckpt.interop.stream.write_step`."""
        groups: list[dict[str, Any]] = []
        for owner, settings in self.hypers.items():
            hyper = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
            groups.append({"hyper": hyper, "params": list(settings.get("params", [owner]))})
        has = ["model", "optim"] if groups else ["model"]
        return {"has": has, "optim": {"groups": groups, "leaves": self.leaves, "others": []}, "extra": self.extra}


class _Source:
    """A DCP checkpoint's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: Metadata = read_metadata(folder)
        self._places: Mapping[MetadataIndex, Any] = self.metadata.storage_data

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Each item's name to its path in the nested state dict.

        DCP joins the path with dots for the name, and keeps it in ``planner_data``. If it did not (flattening was
        disabled), nothing was nested.
        """
        kept: Any = self.metadata.planner_data
        known: dict[str, Any] = kept if isinstance(kept, dict) else {}
        return {name: tuple(map(str, known.get(name) or (name,))) for name in self.metadata.state_dict_metadata}

    def load(self, index: MetadataIndex, name: str) -> Any:
        """A stored item: a part of a tensor, or a value."""
        place = self._places.get(index)
        if place is None:
            raise ValueError(f"{self.folder}: the metadata has no place of {name!r}.")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(
                f"{self.folder}: {name!r} was transformed with {place.transform_descriptors}. Save it without."
            )
        path = self.folder / place.relative_path
        if "/" in place.relative_path or not path.is_file():
            raise ValueError(f"{self.folder} is missing {place.relative_path!r}, which holds {name!r}.")
        with path.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as err:
            reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
            raise ValueError(f"{path}: {name!r} is damaged or not plain data and tensors: {reason}") from err


class _DcpView(View):
    """A tensor of a DCP checkpoint. It is read by rows, and its parts are kept until the last row."""

    def __init__(self, source: _Source, name: str, kind: TensorStorageMetadata) -> None:
        super().__init__(dtype_name(kind.properties.dtype, name), kind.size)
        self.source, self.name = source, name
        self.boxes: list[Box] = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in kind.chunks]
        self._kept: dict[Box, Tensor] = {}
        _check_boxes(source.folder, name, self.shape, self.boxes)

    def fill(self, box: Box, into: Tensor) -> None:
        for stored in self.boxes:
            common = intersect(box, stored)
            if common is not None:
                values = self._kept[stored] = self._kept[stored] if stored in self._kept else self._part(stored)
                narrow(into, box[0], common).copy_(narrow(values, stored[0], common))
        if all(at + n == size for at, n, size in zip(*box, self.shape, strict=True)):
            self._kept = {}

    def _part(self, box: Box) -> Tensor:
        loaded = self.source.load(MetadataIndex(self.name, box[0]), self.name)
        if not isinstance(loaded, Tensor) or (tuple(loaded.shape), loaded.dtype) != (box[1], DTYPES[self.dtype]):
            raise ValueError(
                f"{self.source.folder}: the part of {self.name!r} at {list(box[0])} is not as the metadata says."
            )
        return loaded


def _check_boxes(folder: Path, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Check that parts are within the tensor and hold each element once."""
    inside = all(
        len(offsets) == len(sizes) == len(shape)
        and all(min(at, n) >= 0 and at + n <= length for at, n, length in zip(offsets, sizes, shape, strict=True))
        for offsets, sizes in boxes
    )
    offsets, sizes = ([[box[side][d] for box in boxes] for d in range(len(shape))] if inside else [] for side in (0, 1))
    if not inside or not is_tiling(shape, offsets, sizes, len(boxes)):
        raise ValueError(
            f"{folder}: the {len(boxes)} parts of {name!r} do not cover its shape {list(shape)}: an element is in none "
            "of them, or in several. Save it again; the metadata is damaged or was crafted."
        )


def _entry(paths: Iterable[tuple[str, ...]], candidates: tuple[str, ...], default: str) -> str:
    tops = {path[0] for path in paths if len(path) > 1}
    return next((candidate for candidate in candidates if candidate in tops), default)


METADATA_NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)


def read_metadata(folder: Path) -> metadata.Metadata:
    """The metadata of a DCP checkpoint.

    Raises:
        ValueError: If there is none, it is not what DCP writes, or it names anything but DCP's own classes.
    """
    path = folder / METADATA_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {METADATA_NAME}: it is not a DCP checkpoint, or its save did not finish.")
    with path.open("rb") as file:
        try:
            found: Any = _Unpickler(file).load()
        except ValueError:
            raise
        except Exception as err:  # a damaged pickle may raise anything
            raise ValueError(f"{path} is not what DCP writes: {type(err).__name__}: {err}") from err
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not DCP's metadata of files.")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in _ALLOWED:
            raise ValueError(
                f"the metadata names {module}.{name}, which DCP does not write: to unpickle it could run code. It was "
                "crafted or damaged, or written by an extension. Do not load it with torch either."
            )
        return _ALLOWED[module, name]


def _enum_member(cls: Any, name: Any) -> Any:
    """Replaces ``getattr``, with which early Python 3.11 pickles a member of an enumeration."""
    if cls is not metadata._MEM_FORMAT_ENCODING or name not in cls.__members__:
        raise ValueError(f"the metadata asks for attribute {name!r} of {cls!r}, which DCP does not do.")
    return cls.__members__[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(_METADATA, name): getattr(metadata, name) for name in _CLASSES},
    (_OLD_METADATA, "TensorProperties"): metadata.TensorProperties,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "getattr"): _enum_member,
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
