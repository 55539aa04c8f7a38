"""Hugging Face folders of safetensors files, in and out, without building a model.

Export streams: headers are computed from the index, then each tensor is put together a few megabytes of rows at a
time out of the mapped files, cast if asked, and written where it belongs. So a model of any size takes tens of
megabytes. Import is the resharding reader on foreign files: each rank copies the ranges it holds straight into its
parameters.
"""

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_ckpt._commit import Process, begin_save, discard
from titan_ckpt._dtypes import DTYPES, dtype_name
from titan_ckpt._errors import DamageError
from titan_ckpt._format import ITEM_BYTES, SECTIONS, STATE_NAME, Entry, decode_header
from titan_ckpt._index import FileRecord, Index, StoredChunk, StoredTensor, pack_tensor
from titan_ckpt._job import Job, Lead, Shard, commit_job, write_job
from titan_ckpt._leaves import tensor_bytes
from titan_ckpt._load import box_copies, check_copies, plan_copies, read_tensor, run_copies
from titan_ckpt._model import as_modules, model_state
from titan_ckpt._names import KeyMap
from titan_ckpt._plan import Box, Held, plan_save
from titan_ckpt._read import FolderReader, StepReader
from titan_ckpt._retention import Retention
from titan_ckpt._save import index_tensors, merge_shared
from titan_ckpt._tree import dump_json
from titan_ckpt._version import VERSION
from titan_ckpt._write import fsync_folder, write_plain, write_safetensors

# A tensor is put together this many bytes at a time.
_PIECE_BYTES = 8 << 20

_INDEX_FILE = "model.safetensors.index.json"


def export_hf(
    step: Path | str,
    out: Path | str,
    *,
    names: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    config: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Path]:
    """Write a step's weights as a Hugging Face folder. The folder appears when it is complete.

    Args:
        step: The step's folder.
        out: The folder to make; must not exist.
        names: The key map of the model's family; None keeps the names.
        dtype: Convert floating-point tensors to this one (rounding to nearest); None keeps each tensor's. Integer
            and boolean tensors, and ``*.expert_bias``, are kept.
        max_shard_bytes: Start another file before one passes this size.
        config: Written as ``config.json``.
        progress: Called with the bytes just written.

    Returns:
        The safetensors files.

    Raises:
        DamageError: If the step is not what was written.
        ValueError: If ``out`` exists, or a name is not of the family.
    """
    reader, target = StepReader(step), Path(out)
    if target.exists():
        raise ValueError(f"{target} exists. Export to a new folder, so that no stale file stays in it.")
    listed = _export_list(reader, names, dtype)
    shards = _split(listed, max_shard_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.part-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards):
            file = (
                "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            )
            entries = [entry for entry, _ in shard]
            pieces = (_Pieces(reader, key, DTYPES[entry.dtype], progress) for entry, key in shard)
            write_safetensors(folder, file, entries, pieces, {"format": "pt"})
            weight_map |= {entry.name: file for entry in entries}
        if len(shards) > 1:
            _write_json(folder / _INDEX_FILE, {"metadata": _totals(listed), "weight_map": weight_map})
        if config is not None:
            _write_json(folder / "config.json", dict(config))
        fsync_folder(folder)
        folder.rename(target)
        fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sorted(target.glob("*.safetensors"))


def import_hf(
    folder: Path | str, model: nn.Module | list[nn.Module], *, names: KeyMap | None = None, strict: bool = True
) -> None:
    """Fill a model, sharded in any way, from a Hugging Face folder (or any folder of safetensors files).

    Each rank reads the ranges it holds; there is no communication. Dtypes are converted to the model's.

    Args:
        folder: Holds ``model.safetensors``, or files and their index.
        model: The model, or this rank's pieces of it under their full names.
        names: The key map of the model's family; None if names are the same.
        strict: Refuse if the model lacks a tensor of the folder or the folder one of the model. Pass False for a
            pipeline stage, which holds only some.

    Raises:
        ValueError: If names or shapes do not fit, or a file is damaged. The model is untouched then.
    """
    reader = SafetensorsReader(Path(folder), names)
    state = model_state(as_modules(model))
    available = reader.index.tensors["model"]
    aliases: dict[str, list[str]] = {name: [name] for name in state.tensors}
    for alias, first in state.tied.items():
        aliases[first].append(alias)
    found = {name: [alias for alias in listed if alias in available] for name, listed in aliases.items()}
    missing = [name for name, listed in found.items() if not listed]
    unexpected = [name for name in available if name not in aliases and name not in state.tied]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{folder} does not fit the model: {len(missing)} tensors missing {missing[:6]}, {len(unexpected)} "
            f"unexpected {unexpected[:6]}. Check the key map and the model's configuration, or pass strict=False."
        )
    copies = {}
    for name, listed in found.items():
        if not listed:
            continue
        if len(listed) > 1 and not _equal(reader, listed):
            raise ValueError(f"{listed} are one tied weight in this model, but differ in {folder}. Build it untied.")
        copies[name] = plan_copies(available[listed[0]], state.tensors[name], name, cast=True)
    run_copies(reader, copies)


def import_hf_step(folder: Path | str, root: Path | str, *, step: int = 0, names: KeyMap | None = None) -> Path:
    """Make a step that holds the weights of a Hugging Face folder: to start a run from, on any number of ranks.

    One process, no model. The step holds a model and nothing else: restore it with ``TrainState(model=, rng=False)``.

    Args:
        folder: The Hugging Face folder.
        root: The folder of the steps.
        step: The step's number.
        names: The key map of the model's family; None keeps the names.

    Returns:
        The step's folder.

    Raises:
        ValueError: If a name is not of the family, or a file is damaged.
    """
    reader = SafetensorsReader(Path(folder), names)
    stored = reader.index.tensors["model"]
    held = [Held("model", k, t.dtype, t.shape, ((c.offsets, c.sizes),)) for k, t in stored.items() for c in t.chunks]
    plan = plan_save([held])
    shard_names, tensors = index_tensors(plan)
    entries = tuple(Entry(p.name, held[p.held].dtype, held[p.held].shape) for p in plan.pieces[0])
    owner = Process.of(os.getpid())
    unfinished, save_id = begin_save(Path(root), step, owner)
    shared = {"dp": [0, 1], "has": ["model"], "model": {}, "optim": {"groups": [], "leaves": {}}, "sched": []}
    state = dump_json(merge_shared(step, [{**shared, "extra": {}}])).decode()
    versions = {"titan-ckpt": VERSION, "torch": torch.__version__}
    lead = Lead(shard_names, tensors, {}, versions, {}, Retention())
    job = Job(unfinished, step, save_id, 0, 1, (Shard(shard_names[0], entries),), ((STATE_NAME, state),), lead)
    try:
        spans = [
            (c.file, *reader.span(t, c)) for p in plan.pieces[0] for t in [stored[held[p.held].key]] for c in t.chunks
        ]
        return commit_job(job, write_job(job, (reader.bytes_of(file)[begin:end] for file, begin, end in spans)))
    except BaseException:
        if unfinished.exists():
            discard(unfinished)
        raise


class SafetensorsReader(FolderReader):
    """A folder of safetensors files written by anyone.

    Args:
        folder: Holds one file, or several; with an index, the files it names must be there and hold what it says.
        names: Translates names; None keeps them.

    Raises:
        ValueError: If a file is missing, not safetensors, or cut short.
    """

    def __init__(self, folder: Path, names: KeyMap | None = None) -> None:
        files = _hf_files(folder)
        records: list[FileRecord] = []
        tensors: dict[str, StoredTensor] = {}
        for number, name in enumerate(files):
            path = folder / name
            size = path.stat().st_size
            with path.open("rb") as opened:
                length = opened.read(8)
                head = length + opened.read(min(int.from_bytes(length, "little"), size))
            start, header = decode_header(head, size, str(path))
            records.append(FileRecord(name, size, (), start))
            for key, value in header.items():
                if key == "__metadata__":
                    continue
                ours = names.from_hf(key) if names else key
                if ours is None:
                    continue
                if value["dtype"] not in ITEM_BYTES:
                    raise ValueError(
                        f"{path}: tensor {key!r} has dtype {value['dtype']}, which this version cannot read."
                    )
                shape = tuple(value["shape"])
                chunk = StoredChunk(number, value["data_offsets"][0], (0,) * len(shape), shape)
                tensors[ours] = pack_tensor(value["dtype"], shape, [chunk])
        super().__init__(folder, Index(tuple(records), {section: {} for section in SECTIONS} | {"model": tensors}, {}))


def _hf_files(folder: Path) -> list[str]:
    index = folder / _INDEX_FILE
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        files = sorted(set(weight_map.values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in files if not (folder / name).is_file() or "/" in name]
    if missing or not files:
        raise ValueError(f"{folder} lacks {missing or 'any safetensors file'}. Fetch the whole checkpoint.")
    return files


def _equal(reader: FolderReader, keys: list[str]) -> bool:
    first, *others = (read_tensor(reader, "model", key) for key in keys)
    return all(torch.equal(first, other) for other in others)


def _export_list(reader: StepReader, names: KeyMap | None, dtype: torch.dtype | None) -> list[tuple[Entry, str]]:
    listed: list[tuple[Entry, str]] = []
    for key, stored in reader.index.tensors["model"].items():
        keep = dtype is None or not DTYPES[stored.dtype].is_floating_point or key.endswith("expert_bias")
        out_dtype = stored.dtype if keep or dtype is None else dtype_name(dtype, key)
        listed.append((Entry(names.to_hf(key) if names else key, out_dtype, stored.shape), key))
    return listed


def _split(listed: list[tuple[Entry, str]], max_shard_bytes: int) -> list[list[tuple[Entry, str]]]:
    shards: list[list[tuple[Entry, str]]] = [[]]
    size = 0
    for entry, key in listed:
        if shards[-1] and size + entry.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((entry, key))
        size += entry.nbytes
    for shard in shards:
        shard.sort(key=lambda item: -ITEM_BYTES[item[0].dtype])  # keeps every tensor aligned
    return shards


def _totals(listed: list[tuple[Entry, str]]) -> dict[str, int]:
    return {
        "total_size": sum(entry.nbytes for entry, _ in listed),
        "total_parameters": sum(math.prod(entry.shape) for entry, _ in listed),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_plain(path, json.dumps(value, indent=2, sort_keys=True).encode())


class _Pieces:
    """The bytes of one exported tensor, a few megabytes at a time."""

    def __init__(self, reader: StepReader, key: str, dtype: torch.dtype, progress: Callable[[int], None]) -> None:
        self.reader, self.key, self.dtype, self.progress = reader, key, dtype, progress

    def __iter__(self) -> Iterator[memoryview]:
        stored = self.reader.index.tensors["model"][self.key]
        for box in row_boxes(stored.shape, max(_PIECE_BYTES // ITEM_BYTES[stored.dtype], 1)):
            piece = torch.empty(box[1], dtype=DTYPES[stored.dtype])
            copies = {self.key: box_copies(stored, box, piece)}
            damages = check_copies(self.reader, copies)
            if damages:
                raise DamageError(str(self.reader.path), damages)
            run_copies(self.reader, copies)
            data = tensor_bytes(_cast(piece, self.dtype))
            self.progress(len(data))
            yield data


def _cast(piece: Tensor, dtype: torch.dtype) -> Tensor:
    return piece if piece.dtype == dtype else piece.to(dtype)


def row_boxes(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``max_elements``, in row-major order, each contiguous in the whole."""
    if not math.prod(shape):
        return
    dim = 0
    while dim < len(shape) - 1 and math.prod(shape[dim + 1 :]) > max_elements:
        dim += 1
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[dim + 1 :])
    rows = max(max_elements // row, 1)
    outer = shape[:dim]
    for flat in range(math.prod(outer)):
        at: list[int] = []
        for size in reversed(outer):
            at.insert(0, flat % size)
            flat //= size
        for begin in range(0, shape[dim], rows):
            n = min(rows, shape[dim] - begin)
            yield (*at, begin, *(0,) * (len(shape) - dim - 1)), (*(1,) * dim, n, *shape[dim + 1 :])
