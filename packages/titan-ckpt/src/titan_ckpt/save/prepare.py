"""Prepare a save: every rank reports what it holds and gets what it writes.

The ranks exchange the structure of the state with rank 0, once: the plan is kept while the structure stays the same. They
send rank 0 their plain data. The result is a `WriteJob` and the tensors to write. The job is carried out in this process
(`save_now`) or in the saver process (`titan_ckpt.background`). A failure on any rank is raised on every rank.
"""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import CheckpointError, write_failure
from titan_ckpt.format.codec import digest
from titan_ckpt.format.index import FileRecord
from titan_ckpt.format.names import SECTIONS, STATE_NAME, Entry, check_step, rank_state_name, shard_name
from titan_ckpt.format.tagged_json import dump_json
from titan_ckpt.save.job import Lead, SaveLayout, TensorFile, WriteJob, commit_now, write_job
from titan_ckpt.save.plan import Held, Piece, decode_pieces, encode_held, encode_pieces, plan_encoded
from titan_ckpt.save.replicas import compare_replicas
from titan_ckpt.state.dtypes import dtype_name
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.state.sharding import LocalPart, local_part
from titan_ckpt.state.train_state import Collected, TrainState, collect, merge_shared, shard_of
from titan_ckpt.steps import commit
from titan_ckpt.steps.claim import Process
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.paths import StorePath


def _installed() -> str:
    try:
        return version("titan-ckpt")
    except PackageNotFoundError:  # the sources are on the Python path, not installed
        return "0+source"


VERSIONS = {"titan-ckpt": _installed(), "torch": torch.__version__}
"""Installed versions. They are written into every manifest."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What this rank holds and writes."""

    step: int
    collected: Collected
    parts: list[LocalPart]
    pieces: tuple[Piece, ...]
    layout: SaveLayout
    """Of this rank's job; the same object while the plan stays the same."""
    metrics: dict[str, float]

    def views(self) -> Iterator[Tensor]:
        """The tensors to write, in file order, as views of the live state."""
        for piece in self.pieces:
            yield self.parts[piece.held].view(piece.box)


class SavePreparer:
    """Prepares the saves of one `Checkpointer`. The plan is kept while the structure of the state stays the same."""

    def __init__(self, comm: ByteComm, *, compress: bool) -> None:
        self._comm, self._compress = comm, compress
        self._structure = ""
        """Digest of what all ranks hold."""
        self._pieces: tuple[Piece, ...] = ()
        self._layout = SaveLayout(())

    def plan(self, step: int, state: TrainState, metrics: Mapping[str, Any] | None = None) -> Planned:
        """Take the state apart and agree on the plan. Collective.

        Raises:
            TypeError: If a value is neither plain data nor a tensor, or a metric is not a number.
            ValueError: If names clash, or the ranks' parts do not cover whole tensors.
            Exception: Whatever a user's ``state_dict`` raised, on its rank; `CheckpointError` on the others.
        """
        comm, doing = self._comm, f"save of step {step}"
        numbers, collected, parts, held = comm.attempt(
            lambda: (_numbers(metrics or {}), *_take_apart(step, state, comm)), doing
        )
        if self._plan_anew(held, doing):
            compare_replicas(parts, held, comm)
        return Planned(step, collected, parts, self._pieces, self._layout, numbers)

    def _plan_anew(self, held: list[Held], doing: str) -> bool:
        """Make the plan, if any rank holds something else than before; whether that was so."""
        comm, encoded = self._comm, encode_held(held)
        structure = digest(b"".join(comm.all_gather(digest(encoded).encode())))
        if structure == self._structure:
            return False
        gathered = comm.gather(encoded)
        plan = comm.attempt(lambda: None if gathered is None else plan_encoded(gathered), doing)
        distinct = {id(p): p for p in plan.pieces} if plan else {}
        texts = {number: encode_pieces(pieces) for number, pieces in distinct.items()}
        self._pieces = decode_pieces(comm.scatter([texts[id(p)] for p in plan.pieces] if plan else None))
        files = layout_files(held, self._pieces, comm.rank, compress=self._compress)
        self._layout = SaveLayout(files, *plan.index_tensors()) if plan else SaveLayout(files)
        self._structure = structure
        return True

    def begin(
        self,
        root: StorePath,
        planned: Planned,
        *,
        retention: Retention,
        owner: Process,
        distrusted: Collection[int] = (),
    ) -> WriteJob:
        """Make the unfinished step's folder and this rank's job. Collective.

        ``owner`` is the process that will commit, on rank 0. While it is alive, the folder is not swept.

        Raises:
            CheckpointError: If the folder cannot be made.
        """
        comm, step, collected = self._comm, planned.step, planned.collected

        def begin() -> tuple[str, str]:
            folder, save_id = commit.begin_save(root, step, owner)
            # A local path is sent whole: rank 0's folder counts, even if another rank's root differs.
            return (str(folder) if isinstance(folder, Path) else folder.name), save_id

        name, save_id = comm.from_rank0(begin, f"save of step {step}", lambda err: write_failure(err, root, 0))
        texts: list[tuple[str, str]] = []
        if collected.own:
            texts.append((rank_state_name(comm.rank), dump_json(collected.own).decode()))
        everyone = comm.gather(dump_json(collected.shared))
        lead = None
        if everyone is not None:
            shared = [json.loads(data) for data in everyone]
            texts.append((STATE_NAME, dump_json(merge_shared(step, shared)).decode()))
            tied = {alias: first for rank in shared for alias, first in rank["tied"].items()}
            lead = Lead(tied, VERSIONS, planned.metrics, retention, tuple(distrusted))
        return WriteJob(root / name, step, save_id, comm.rank, comm.size, planned.layout, tuple(texts), lead)


def save_now(job: WriteJob, planned: Planned, comm: ByteComm) -> StorePath:
    """Write and commit in this process; return the step's folder. Collective.

    Raises:
        CheckpointError: If a rank cannot write. The step does not exist then, and earlier steps are intact.
    """
    doing = f"save of step {job.step}"

    def failure(err: OSError) -> CheckpointError:
        return write_failure(err, job.folder, job.rank)

    def commit_all() -> str:
        records = [FileRecord.from_json(r) for report in reports or [] for r in json.loads(report)]
        return commit_now(job, records).name

    try:
        records = comm.attempt(lambda: write_job(job, map(tensor_bytes, planned.views())), doing, failure)
        reports = comm.gather(dump_json([record.to_report() for record in records]))
        return job.folder.parent / comm.from_rank0(commit_all, doing, failure)
    except Exception:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                commit.discard_unfinished(job.folder)
        raise


def _numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    if any(not isinstance(name, str) for name in metrics):
        raise TypeError(f"metrics={metrics!r} has a name that is not a string. Use strings.")
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as err:
        raise TypeError(f"metrics={metrics!r} contains something that is not a number. Pass floats.") from err


@torch.no_grad()  # DTensor.to_local() then returns the local tensor itself
def _take_apart(step: int, state: TrainState, comm: ByteComm) -> tuple[Collected, list[LocalPart], list[Held]]:
    """What this rank holds."""
    check_step(step)
    collected = collect(state, comm.rank, comm.size)
    parts: list[LocalPart] = []
    held: list[Held] = []
    for section, key, tensor in collected.tensors:
        path = f"{section}.{key}"
        if key == "__metadata__":
            raise ValueError(f"{path}: safetensors reserves the name '__metadata__'. Rename the tensor.")
        part = local_part(tensor, path, shard_of(state.shards, section, key, tuple(tensor.shape), collected.model))
        boxes = tuple((chunk.offsets, chunk.sizes) for chunk, _ in part.boxes)
        parts.append(part)
        held.append(Held(section, key, dtype_name(part.local.dtype, path), part.shape, boxes))
    return collected, parts, held


def layout_files(
    held: Sequence[Held], pieces: Sequence[Piece], rank: int, *, compress: bool = False
) -> tuple[TensorFile, ...]:
    """The safetensors files of a rank's pieces."""
    files: list[TensorFile] = []
    for section in SECTIONS:
        mine = [p for p in pieces if p.section == section]
        if mine:
            entries = tuple(Entry(p.name, held[p.held].dtype, held[p.held].boxes[p.box][1]) for p in mine)
            files.append(TensorFile(shard_name(section, rank), entries, compress and section == "optim"))
    return tuple(files)
