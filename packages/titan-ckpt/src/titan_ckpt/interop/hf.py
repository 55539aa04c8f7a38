"""Export and import of Hugging Face folders.

An export needs no model and tens of megabytes of memory, from a store those of the largest tensor: headers are computed
from the index, then each tensor is read, cast and written a few megabytes at a time. A matrix that becomes float8 is read twice,
for its scales and for its codes. On import, each rank copies the boxes that it holds into its parameters. Views convert between
layouts (`titan_ckpt.interop.views`).
"""

import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import DamageError
from titan_ckpt.format.boxes import Box
from titan_ckpt.format.names import ITEM_BYTES, Entry, parse_object
from titan_ckpt.interop.float8 import SUFFIX, with_scales
from titan_ckpt.interop.key_map import KeyMap
from titan_ckpt.interop.safetensors_folder import SafetensorsReader
from titan_ckpt.interop.stream import view_bytes, write_step
from titan_ckpt.interop.translate import from_hf, to_hf
from titan_ckpt.interop.views import GrownView, StoredView, View, read_box, row_pieces, whole_box
from titan_ckpt.load.reader import StepReader
from titan_ckpt.save.write import write_safetensors
from titan_ckpt.state.dtypes import DTYPES, dtype_name
from titan_ckpt.state.model import as_modules, model_state
from titan_ckpt.state.sharding import LocalShard, local_part
from titan_ckpt.storage.files import fsync_folder, write_plain
from titan_ckpt.storage.paths import StorePath, as_path

ROUTING_BIASES = ("expert_bias", "correction_bias")
"""Ends of names of the biases by which tokens choose experts: sums of many small steps, which no narrow dtype holds."""
_log = logging.getLogger("titan_ckpt")


def export_hf(
    step: StorePath | os.PathLike[str] | str,
    out: Path | str,
    *,
    names: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    config: Mapping[str, Any] | None = None,
    stem: str = "model",
    leave_out: Sequence[str] = (),
    float8: Collection[str] = (),
    progress: Callable[[int], None] = lambda nbytes: None,
    group: dist.ProcessGroup | None = None,
) -> list[Path]:
    """Write a step's weights as a Hugging Face folder. The folder appears when it is complete.

    With ``group``, the ranks share the files between them and the result is the same: each reads and writes the tensors of
    its files, and the first writes the index.

    Args:
        step: The step's folder.
        out: The folder to make; must not exist.
        names: The key map of the model's family; None keeps the names. Tensors in ``names.left_out`` (rotary tables,
            for example) are not exported.
        dtype: Convert floating-point tensors to this dtype, rounded to nearest; None keeps each dtype. Integer and
            boolean tensors and routing biases (`ROUTING_BIASES`) keep theirs.
        max_shard_bytes: Largest size of a file.
        config: Written as ``config.json``.
        stem: How the files' names begin: "model" as transformers has it, "diffusion_pytorch_model" as diffusers has it.
        leave_out: Regular expressions. Tensors of the step whose whole name matches are not exported.
        float8: Names, in the folder, of matrices to store as e4m3 with one float32 scale per block of 128 x 128
            (``NAME_scale_inv``). Describe them in ``config``.
        progress: Called with the bytes that this process has just written.
        group: Ranks that all call this with the same arguments and see the same file system, over a backend with CPU
            tensors; the call is then collective. None: this process writes everything.

    Returns:
        The safetensors files.

    Raises:
        DamageError: If the step is damaged.
        ValueError: If ``out`` exists, the family does not have a name, a pattern of ``leave_out`` matches nothing, or
            ``float8`` names something other than a matrix.
    """
    comm = None if group is None else ByteComm(group)
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    target = Path(out)
    token = secrets.token_hex(4).encode()
    folder = target.parent / f".{target.name}.part-{(comm.broadcast(token) if comm else token).decode()}"
    reader: list[StepReader] = []
    shards: list[list[tuple[Entry, View]]] = []

    def plan() -> None:
        if target.exists():
            raise ValueError(f"{target} exists. Export to a new folder, so that no stale file stays in it.")
        reader.append(StepReader(step))
        shards.extend(_split(_export_list(reader[0], names, dtype, leave_out, float8), max_shard_bytes))
        folder.mkdir(parents=True, exist_ok=True)

    def write_mine() -> None:
        for file, shard in list(zip(_file_names(shards, stem), shards, strict=True))[rank::ranks]:
            pieces = (_checked(view, DTYPES[entry.dtype], reader[0], progress) for entry, view in shard)
            write_safetensors(folder, file, [entry for entry, _ in shard], pieces)

    def finish() -> None:
        if rank > 0:
            return
        _write_index(folder, shards, stem)
        if config is not None:
            _write_json(folder / "config.json", dict(config))
        fsync_folder(folder)
        folder.rename(target)
        fsync_folder(target.parent)

    try:
        for work in (plan, write_mine, finish):
            comm.attempt(work, f"exporting to {target}") if comm else work()
    except BaseException:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return sorted(target.glob("*.safetensors"))


def import_hf(
    folder: Path | str,
    model: nn.Module | list[nn.Module],
    *,
    names: KeyMap | None = None,
    strict: bool = True,
    shards: Mapping[str, LocalShard] | None = None,
    grow: Container[str] = (),
    check_config: bool = True,
) -> None:
    """Fill a model in any layout from a Hugging Face folder, or any folder of safetensors files.

    If a module has a method ``check_hf_config(config)``, it gets the folder's ``config.json`` first and may raise a
    ValueError: with another rotary base, epsilon or routing rule, weights of the right shapes give other logits.

    Each rank reads the boxes that it holds, without communication. Floating-point tensors are converted to the model's
    dtype; other tensors must have it. Float8 and int8 weights are multiplied with their scales (``*_scale_inv``,
    ``*_scale``, ``NAME.scale`` of ``NAME.weight``; per tensor, per row or per block), unless the model has these scales itself.

    Args:
        folder: Holds ``model.safetensors``, or files and their index.
        model: The model, or this rank's pieces with their full names.
        names: The key map of the model's family; None if the names are the same.
        strict: Refuse tensors that only the model or only the folder has. Pass False for a pipeline stage: missing and
            unknown tensors are then logged as a warning.
        shards: As `TrainState.shards`.
        grow: Names of tensors that may have more rows in the model than in the folder, such as an embedding with new
            tokens. The new rows become the mean of the folder's rows, computed in float32.
        check_config: Ask ``check_hf_config``. Pass False where settings are meant to differ, for continued training.

    Raises:
        ValueError: If names, shapes or dtypes do not fit, a file is damaged, the meaning of a weight's scales is unknown,
            or a parameter is on the meta device. The model is unchanged.
    """
    if check_config:
        _check_config(Path(folder), as_modules(model))
    state = model_state(as_modules(model))
    aliases = state.names_of()
    whole: dict[str, Any] = {**state.tensors, **(shards or {})}
    shapes = {name: tuple(whole[name].shape) for name in aliases}
    available = _views_of(Path(folder), names, dict.fromkeys(state.tied) | shapes, strict)
    found = {name: [alias for alias in listed if alias in available] for name, listed in aliases.items()}
    missing = [name for name, listed in found.items() if not listed and not (names and names.leaves_out(name))]
    unexpected = [name for name in available if name not in aliases and name not in state.tied]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{folder} does not fit the model: {len(missing)} tensors missing {missing[:6]}, {len(unexpected)} "
            f"unexpected {unexpected[:6]}. Check the key map and the model's configuration, or pass strict=False."
        )
    if missing:
        _log.warning(
            "%s is missing %d tensors of the model; they keep their values: %s", folder, len(missing), missing[:8]
        )
    fills: list[tuple[View, Box, Tensor]] = []
    made: dict[str, Tensor] = {}
    for name, listed in found.items():
        _check_readable(available, listed)
        if len(listed) > 1 and not _equal([available[alias] for alias in listed]):
            raise ValueError(f"{listed} are one tied weight in this model, but differ in {folder}. Build it untied.")
        if listed:
            view = available[listed[0]]
            if any(alias in grow for alias in listed):
                shard = (shards or {}).get(name)
                view = _grown(view, (state.tensors[name].shape if shard is None else shard.shape)[0])
            target = state.tensors[name]
            if name in state.detached:
                target = made[name] = torch.empty_like(target)
            fills += _fills(view, target, name, (shards or {}).get(name))
    _check_copies(Path(folder), names)
    with torch.no_grad():
        for view, box, into in fills:
            view.fill(box, into)
    state.load(made)


def import_hf_step(
    folder: Path | str,
    root: StorePath | os.PathLike[str] | str,
    *,
    step: int = 0,
    names: KeyMap | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> StorePath:
    """Make a step of the weights of a Hugging Face folder. It can start a run on any number of ranks.

    It needs one process and no model. Restore the step with ``TrainState(model=, rng=False)``.

    Args:
        folder: The Hugging Face folder.
        root: The root of the steps.
        step: The step's number.
        names: The key map of the model's family; None keeps the names.
        progress: Called with the bytes about to be written.

    Returns:
        The step's folder.

    Raises:
        ValueError: If the family does not have a name, a file is damaged, or two tensors differ that are one in the model.
    """
    views = _views_of(Path(folder), names)
    _check_readable(views, views)
    _check_copies(Path(folder), names)
    return write_step(as_path(root), step, {"model": views}, {}, progress)


def _check_config(folder: Path, models: Iterable[nn.Module]) -> None:
    """Let every module that can do so check the folder's ``config.json``."""
    modules = [module for model in models for module in model.modules()]
    checks: list[Any] = [check for module in modules if (check := getattr(module, "check_hf_config", None))]
    file = folder / "config.json"
    if checks and not file.is_file():
        _log.warning("%s has no config.json, so the model's arguments are not checked", folder)
    elif checks:
        config = parse_object(file.read_bytes(), str(file))
        for check in checks:
            check(config)


def _views_of(
    folder: Path, names: KeyMap | None, wanted: Container[str] | None = None, strict: bool = True
) -> dict[str, View]:
    """The folder's tensors by native names."""

    def kept(name: str) -> bool:
        if names is None:
            return wanted is not None and name in wanted
        found = names.match_hf(name) if names.maps(name) else []
        return any(wanted is None or pair.native.format(**letters) in wanted for pair, letters in found)

    views = SafetensorsReader(folder).views(kept)
    if names is None:
        return views
    unknown = [] if strict else [name for name in views if not names.maps(name) and not names.ignores(name)]
    if unknown:
        text = "%s: %d tensors are ignored, no names of the %s family: %s"
        _log.warning(text, folder, len(unknown), names.family, unknown[:8])
        views = {name: view for name, view in views.items() if name not in unknown}
    return from_hf(views, names, wanted)


def _check_copies(folder: Path, names: KeyMap | None) -> None:
    """Raise where two tensors of the folder differ that are one in the model."""
    if names is None or not names.copies:
        return
    views = SafetensorsReader(folder).views()
    for copy, other in names.copies:
        if copy in views and other in views:
            _check_readable(views, (copy, other))
            if not _equal([views[copy], views[other]]):
                raise ValueError(f"{copy} and {other} are one weight in this model, but differ in {folder}.")


def _check_readable(views: Mapping[str, View], names: Iterable[str]) -> None:
    """Raise for tensors that cannot be read."""
    for name in names:
        views[name].check(whole_box(views[name].shape))


def _fills(view: View, target: Tensor, name: str, shard: LocalShard | None) -> list[tuple[View, Box, Tensor]]:
    """The boxes that fill this rank's part of ``target``."""
    part = local_part(target, name, shard)
    if part.shape != view.shape:
        raise ValueError(
            f"{name} has shape {list(part.shape)}, but {list(view.shape)} was saved. Build the same model."
        )
    saved = DTYPES[view.dtype]
    if saved != target.dtype and not (saved.is_floating_point and target.dtype.is_floating_point):
        raise ValueError(
            f"{name} is {target.dtype}, but {saved} was saved: a conversion would change the values. Build it in {saved}; "
            "only floating-point tensors are converted."
        )
    return [(view, box, part.view(i)) for i, (box, _) in enumerate(part.boxes)]


def _grown(view: View, rows: int) -> View:
    return GrownView(view, rows) if view.shape and rows > view.shape[0] else view


def _equal(views: list[View]) -> bool:
    first, *others = views
    for other in others:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            return False
        for box in row_pieces(first):
            if not torch.equal(read_box(first, box), read_box(other, box)):
                return False
    return True


def _export_list(
    reader: StepReader,
    names: KeyMap | None,
    dtype: torch.dtype | None,
    leave_out: Sequence[str],
    float8: Collection[str],
) -> list[tuple[Entry, View]]:
    saved = reader.index.tensors["model"]
    for pattern in leave_out:
        try:
            matches = any(re.fullmatch(pattern, name) for name in saved)
        except re.error as err:
            raise ValueError(f"leave_out={pattern!r} is not a regular expression: {err}.") from err
        if not matches:
            raise ValueError(
                f"leave_out={pattern!r} matches no tensor of {reader.path} as a whole. Write a regular "
                f"expression of the names there: {[*saved][:6]}."
            )
    patterns = [*leave_out, *(names.left_out if names else ())]
    native: dict[str, View] = {
        key: StoredView(reader, stored)
        for key, stored in saved.items()
        if not any(re.fullmatch(pattern, key) for pattern in patterns)
    }
    exact = {key for key in native if key.endswith(ROUTING_BIASES)}
    exact |= {names.to_hf(key) for key in exact} if names else set()
    listed: list[tuple[Entry, View]] = []
    views = to_hf(native, names) if names else native
    if float8:
        views = with_scales(views, frozenset(float8))
        exact |= {*float8, *(name + SUFFIX for name in float8)}
    for name, view in views.items():
        keep = dtype is None or not DTYPES[view.dtype].is_floating_point or name in exact
        out_dtype = view.dtype if keep or dtype is None else dtype_name(dtype, name)
        listed.append((Entry(name, out_dtype, view.shape), view))
    return listed


def _split(listed: list[tuple[Entry, View]], max_shard_bytes: int) -> list[list[tuple[Entry, View]]]:
    shards: list[list[tuple[Entry, View]]] = [[]]
    size = 0
    for entry, view in listed:
        if shards[-1] and size + entry.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((entry, view))
        size += entry.nbytes
    for shard in shards:
        shard.sort(key=lambda item: -ITEM_BYTES[item[0].dtype])  # keeps every tensor aligned
    return shards


def _file_names(shards: Sequence[Any], stem: str) -> list[str]:
    if len(shards) == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]


def _write_index(folder: Path, shards: list[list[tuple[Entry, View]]], stem: str) -> None:
    """Name the file of each tensor, where there are several."""
    names = _file_names(shards, stem)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {missing[:4]}, which other ranks have written: not all ranks see the same file system. Export to "
            "a shared one, or from one machine."
        )
    if len(shards) == 1:
        return
    entries = [entry for shard in shards for entry, _ in shard]
    totals = {
        "total_size": sum(entry.nbytes for entry in entries),
        "total_parameters": sum(math.prod(entry.shape) for entry in entries),
    }
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry, _ in shard}
    _write_json(folder / f"{stem}.safetensors.index.json", {"metadata": totals, "weight_map": weight_map})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_plain(path, json.dumps(value, indent=2, sort_keys=True).encode())


def _checked(
    view: View, dtype: torch.dtype, reader: StepReader, progress: Callable[[int], None]
) -> Iterator[memoryview]:
    """The bytes of one exported tensor. Every block is checked first."""
    damages = [damage for box in row_pieces(view) for damage in view.check(box)]
    if damages:
        raise DamageError(str(reader.path), damages)
    yield from view_bytes(view, dtype, progress=progress)
    reader.release()
