"""Storage for torch's ``dcp.save`` and ``dcp.load``: digests, an atomic commit, no pickle on disk.

Only the files differ from DCP's own. Tensors become safetensors in the ``model`` section with their DCP names, other items
tagged JSON in ``extra``. So `Checkpointer` restores a model that was saved flat (``dcp.save(model.state_dict(), ...)``), and
``dcp.load`` reads the weights of any step.
"""

import contextlib
import io
import os
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from titan_ckpt.errors import DamageError, malformed_is_damage
from titan_ckpt.format.index import FileRecord, StoredChunk, StoredTensor, pack_tensor
from titan_ckpt.format.names import ITEM_BYTES, SECTIONS, STATE_NAME, Entry, check_step, shard_name
from titan_ckpt.interop.stream import lead_job
from titan_ckpt.load.copies import Copy, box_copies, check_copies, read_tensor, run_copies
from titan_ckpt.load.reader import StepReader
from titan_ckpt.save.job import SaveLayout, commit_now, write_job
from titan_ckpt.save.write import write_safetensors
from titan_ckpt.state import leaves
from titan_ckpt.state.dtypes import DTYPES, dtype_name
from titan_ckpt.steps.claim import Process
from titan_ckpt.steps.commit import begin_save, discard_unfinished
from titan_ckpt.storage.paths import StorePath, as_path


@dataclass(frozen=True, slots=True)
class _Place:
    """What the coordinator sends to a rank."""

    folder: str
    """Its name below the root; on a file system the whole path."""
    save_id: str
    rank: int


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank reports about one item."""

    rank: int
    start: int = 0
    """First byte of a tensor in the data of the rank's file."""
    sizes: tuple[int, ...] = ()
    value: Any = None
    """An item that is not a tensor, encoded."""
    record: dict[str, Any] | None = None
    """The rank's file, with its first tensor only."""


class TitanStorageWriter(StorageWriter):
    """For ``dcp.save(state_dict, storage_writer=TitanStorageWriter(root, step))``. DCP calls the methods.

    A step that is saved again is replaced. A save that fails on any rank leaves nothing behind.

    Args:
        root: The root of the steps. All ranks must see it.
        step: The step's number, from 0.

    Raises:
        ValueError: If the step is negative.
    """

    def __init__(self, root: StorePath | os.PathLike[str] | str, step: int) -> None:
        super().__init__()
        check_step(step)
        self.root, self.step = as_path(root), step
        self.path: StorePath | None = None
        """On the coordinator: the step's folder once it is committed."""
        self._save_id, self._world = "", 1
        self._folder: StorePath | None = None
        """On the coordinator: the unfinished step's folder, if there is one."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called before a save. A ``checkpoint_id`` becomes the root."""
        self.path = None
        self._give_up()
        if checkpoint_id is not None:
            self.root = as_path(str(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan stays as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: make the unfinished step's folder.

        Raises:
            ValueError: If the planner would have ranks write by a plan of an earlier save, which names that save's folder.
        """
        if not all(plan.usable for plan in plans):
            raise ValueError(
                "the planner was given enable_plan_caching=True, and a cached plan names the folder of the save that it was made "
                "for: this save would write there. Leave it out: DefaultSavePlanner()."
            )
        folder, self._save_id = begin_save(self.root, self.step, Process.of(os.getpid()))
        self._folder, self._world = folder, len(plans)
        name = str(folder) if isinstance(folder, Path) else folder.name
        return [replace(plan, storage_data=_Place(name, self._save_id, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On every rank: write this rank's file."""
        done: Future[list[WriteResult]] = Future()
        place: _Place = plan.storage_data
        try:
            done.set_result(self._write(place, plan, planner))
        except BaseException:  # DCP does not report a failed save to its storage
            with contextlib.suppress(OSError):
                discard_unfinished(self.root / place.folder)
            raise
        return done

    def _write(self, place: _Place, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        tensors.sort(key=lambda item: -ITEM_BYTES[_dtype(item)])  # keeps every tensor aligned
        results = [
            WriteResult(item.index, 0, _Written(place.rank, value=_encoded(planner.resolve_data(item), item.index.fqn)))
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO
        ]
        record: dict[str, Any] | None = None
        entries = _entries(tensors)
        if entries:
            values = (cast(Tensor, planner.resolve_data(item)).detach() for item in tensors)
            folder, name = self.root / place.folder, shard_name("model", place.rank)
            record = write_safetensors(folder, name, entries, map(leaves.tensor_bytes, values)).to_json()
        start = 0
        for item, entry in zip(tensors, entries, strict=True):
            written = _Written(place.rank, start, entry.shape, record=None if start else record)
            results.append(WriteResult(item.index, entry.nbytes, written))
            start += entry.nbytes
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commit the step."""
        try:
            self.path = self._commit(metadata, [result for rank in results for result in rank])
        except BaseException:
            self._give_up()
            raise
        self._folder = None

    def _give_up(self) -> None:
        """Delete the unfinished step, on the coordinator."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                discard_unfinished(self._folder)
        self._folder = None

    def _commit(self, metadata: Metadata, results: list[WriteResult]) -> StorePath:
        assert self._folder is not None
        records = {r.storage_data.rank: r.storage_data.record for r in results if r.storage_data.record}
        files = [FileRecord.from_json(records[rank]) for rank in sorted(records)]
        number = {rank: i for i, rank in enumerate(sorted(records))}
        chunks: dict[str, list[StoredChunk]] = {}
        extra: dict[str, Any] = {}
        kinds = metadata.state_dict_metadata
        for result in results:
            written, fqn = cast(_Written, result.storage_data), result.index.fqn
            if isinstance(kinds[fqn], TensorStorageMetadata):
                offsets = tuple(result.index.offset or ())
                chunk = StoredChunk(number[written.rank], written.start, offsets, written.sizes)
                chunks.setdefault(fqn, []).append(chunk)
            else:
                extra[fqn] = written.value
        tensors = {
            fqn: pack_tensor(dtype_name(kind.properties.dtype, fqn), tuple(kind.size), chunks[fqn])
            for fqn, kind in kinds.items()
            if isinstance(kind, TensorStorageMetadata)
        }
        names = tuple(file.name for file in files)
        layout = SaveLayout((), names, {section: {} for section in SECTIONS} | {"model": tensors})
        job = lead_job(self._folder, self.step, self._save_id, self._world, layout, extra=extra)
        return commit_now(job, files + write_job(job, ()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True: any path may become a root."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """DCP's description of the save."""
        return StorageMeta(checkpoint_id=str(self.root), save_id=self._save_id)


class TitanStorageReader(StorageReader):
    """For ``dcp.load(state_dict, storage_reader=TitanStorageReader(step_folder))``. DCP calls the methods.

    Every block that is read is checked. A tensor has its own name (``weight``) and a nested one (``model.weight``,
    ``optim.state.weight.exp_avg``).

    Args:
        step: The step's folder.

    Raises:
        DamageError: If the step is damaged.
    """

    def __init__(self, step: StorePath | os.PathLike[str] | str) -> None:
        super().__init__()
        self._reader = StepReader(step)
        self._names: dict[str, StoredTensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called before a load. A ``checkpoint_id`` becomes the step's folder."""
        if checkpoint_id is not None:
            self._reader, self._names = StepReader(str(checkpoint_id)), {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's description of the step."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: BytesStorageMetadata() for name in self._extra()
        }
        for name, stored in self._named().items():
            boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in stored.chunks]
            properties = TensorProperties(dtype=DTYPES[stored.dtype])
            entries[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), boxes)
        return Metadata(state_dict_metadata=entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan stays as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans stay as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """On every rank: check and fill the tensors of the plan."""
        targets = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        tensors = [planner.resolve_tensor(item).detach() for item in targets]
        copies = {str(i): self._copies(item, into) for i, (item, into) in enumerate(zip(targets, tensors, strict=True))}
        damages = check_copies(self._reader, copies)
        if damages:
            raise DamageError(str(self._reader.path), damages)
        run_copies(self._reader, copies)
        for item, into in zip(targets, tensors, strict=True):
            planner.commit_tensor(item, into)
        extra = self._extra() if len(targets) < len(plan.items) else {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                # DCP's planner takes a pickle: this one is made here, of plain data.
                packed = io.BytesIO()
                torch.save(extra[item.storage_index.fqn], packed)
                packed.seek(0)
                planner.load_bytes(item, packed)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a folder."""
        return Path(checkpoint_id).is_dir()

    def _copies(self, item: ReadItem, into: Tensor) -> list[Copy]:
        stored = self._named()[item.storage_index.fqn]
        origin = item.storage_index.offset or ()
        offsets = tuple(at + inner for at, inner in zip(origin, item.storage_offsets, strict=True))
        return box_copies(stored, (offsets, tuple(item.lengths)), into)

    def _named(self) -> dict[str, StoredTensor]:
        """Every name of every tensor."""
        if not self._names:
            index = self._reader.index
            model = {name: index.tensors["model"][key] for name, key in index.tied.items()} | index.tensors["model"]
            for key, stored in index.tensors["optim"].items():
                param, _, state = key.rpartition("/")
                self._names[f"optim.state.{param}.{state}"] = stored
            self._names |= {f"model.{name}": stored for name, stored in model.items()} | model
        return self._names

    def _extra(self) -> dict[str, Any]:
        encoded = self._reader.shared_state()["extra"]
        with malformed_is_damage(self._reader.path, STATE_NAME):
            return leaves.decode(encoded, lambda key: read_tensor(self._reader, "extra", key))


def _dtype(item: WriteItem) -> str:
    assert item.tensor_data is not None
    return dtype_name(item.tensor_data.properties.dtype, item.index.fqn)


def _entries(items: list[WriteItem]) -> list[Entry]:
    seen: dict[str, int] = {}
    entries: list[Entry] = []
    for item in items:
        assert item.tensor_data is not None
        fqn = item.index.fqn
        n = seen[fqn] = seen.get(fqn, -1) + 1
        entries.append(Entry(f"{fqn}@{n}" if n else fqn, _dtype(item), tuple(item.tensor_data.chunk.sizes)))
    return entries


def _encoded(packed: Any, fqn: str) -> Any:
    """An item that is not a tensor, as tagged JSON. DCP's planner pickled it in this process."""
    packed.seek(0)
    try:
        value = torch.load(packed, weights_only=True)
    except pickle.UnpicklingError as err:
        raise TypeError(
            f"{fqn} is an object, which a checkpoint cannot store: only plain data and tensors can be saved, so that "
            "loading never runs code. Give it a state_dict of plain data."
        ) from err
    return leaves.encode_plain(value, fqn)
