"""Prepare a save: every rank reports what it holds and gets what it writes.

The ranks exchange the structure of the state with rank 0, once: the plan is kept while the structure stays the same. They
send rank 0 their plain data. The result is a `WriteJob` and the tensors to write. The job is carried out in this process
(`save_now`) or in the saver process (`titan_ckpt.background`). A failure on any rank is raised on every rank.
"""

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import CheckpointError, write_failure
from titan_ckpt.format import tagged_json
from titan_ckpt.format.codec import digest
from titan_ckpt.format.columns import pack_column
from titan_ckpt.format.index import FileRecord, StoredTensor
from titan_ckpt.format.names import SECTIONS, STATE_NAME, Entry, check_step, rank_state_name, shard_name
from titan_ckpt.save.job import Lead, SaveLayout, TensorFile, WriteJob, commit_now, write_job
from titan_ckpt.save.plan import Held, Piece, SavePlan, decode_pieces, encode_held, encode_pieces, plan_told
from titan_ckpt.state import optimizer
from titan_ckpt.state.dtypes import dtype_name
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.state.sharding import LocalPart, local_part
from titan_ckpt.state.train_state import Collected, TrainState, collect, shard_of
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


@dataclass(slots=True)
class PlanCache:
    """The last plan. It is kept while the structure of the state stays the same."""

    structure: str = ""
    """Digest of what all ranks hold."""
    pieces: tuple[Piece, ...] = ()
    file_names: tuple[str, ...] = ()
    tensors: dict[str, dict[str, StoredTensor]] = field(default_factory=dict[str, dict[str, StoredTensor]])
    """On rank 0: the index's tensors."""
    layout: SaveLayout | None = None
    """The layout of this rank's jobs."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What this rank holds and writes."""

    collected: Collected
    parts: list[LocalPart]
    held: list[Held]
    pieces: tuple[Piece, ...]
    metrics: dict[str, float]

    def views(self) -> Iterator[Tensor]:
        """The tensors to write, in file order, as views of the live state."""
        for piece in self.pieces:
            yield self.parts[piece.held].view(piece.box)


def plan_step(
    step: int, state: TrainState, comm: ByteComm, cache: PlanCache, metrics: Mapping[str, Any] | None = None
) -> Planned:
    """Take the state apart and agree on the plan. Collective.

    Raises:
        TypeError: If a value is neither plain data nor a tensor, or a metric is not a number.
        ValueError: If names clash, or the ranks' parts do not cover whole tensors.
        Exception: Whatever a user's ``state_dict`` raised, on its rank; `CheckpointError` on the others.
    """
    doing = f"save of step {step}"
    numbers, collected, parts, held = comm.attempt(
        lambda: (_numbers(metrics or {}), *_take_apart(step, state, comm)), doing
    )
    known = cache.structure
    pieces = _plan(held, comm, cache, doing)
    if cache.structure != known:
        compare_replicas(parts, held, comm)
    return Planned(collected, parts, held, pieces, numbers)


def plan_layout(planned: Planned, comm: ByteComm, cache: PlanCache, compress: bool) -> SaveLayout:
    """The layout of this rank's jobs; the same object while the plan stays the same."""
    if cache.layout is None:
        files = layout_files(planned.held, planned.pieces, comm.rank, compress=compress)
        cache.layout = SaveLayout(files, cache.file_names, cache.tensors)
    return cache.layout


def begin_job(
    root: StorePath,
    step: int,
    planned: Planned,
    comm: ByteComm,
    cache: PlanCache,
    *,
    retention: Retention,
    compress: bool,
    owner: Process,
    distrusted: Collection[int] = (),
) -> WriteJob:
    """Make the unfinished step's folder and this rank's job. Collective.

    ``owner`` is the process that will commit, on rank 0. While it is alive, the folder is not swept.

    Raises:
        CheckpointError: If the folder cannot be made.
    """

    def begin() -> tuple[str, str]:
        folder, save_id = commit.begin_save(root, step, owner)
        # A local path is sent whole: rank 0's folder counts, even if another rank's root differs.
        return (str(folder) if isinstance(folder, Path) else folder.name), save_id

    name, save_id = comm.from_rank0(begin, f"save of step {step}", lambda err: write_failure(err, root, 0))
    layout = plan_layout(planned, comm, cache, compress)
    texts: list[tuple[str, str]] = []
    if planned.collected.own:
        texts.append((rank_state_name(comm.rank), tagged_json.dump_json(planned.collected.own).decode()))
    everyone = comm.gather(tagged_json.dump_json(planned.collected.shared))
    lead = None
    if everyone is not None:
        shared = [json.loads(data) for data in everyone]
        texts.append((STATE_NAME, tagged_json.dump_json(merge_shared(step, shared)).decode()))
        tied = {alias: first for rank in shared for alias, first in rank["tied"].items()}
        lead = Lead(tied, VERSIONS, planned.metrics, retention, tuple(distrusted))
    return WriteJob(root / name, step, save_id, comm.rank, comm.size, layout, tuple(texts), lead)


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
        reports = comm.gather(tagged_json.dump_json([record.to_report() for record in records]))
        return job.folder.parent / comm.from_rank0(commit_all, doing, failure)
    except Exception:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                commit.discard(job.folder)
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


def _plan(held: list[Held], comm: ByteComm, cache: PlanCache, doing: str) -> tuple[Piece, ...]:
    """Return this rank's pieces. Rank 0 also keeps the index's tensors."""
    encoded = encode_held(held)
    everyone = digest(b"".join(comm.all_gather(digest(encoded).encode())))
    if everyone == cache.structure:
        return cache.pieces
    gathered = comm.gather(encoded)
    plan = comm.attempt(lambda: None if gathered is None else plan_told(gathered), doing)
    distinct = {id(p): p for p in plan.pieces} if plan else {}
    texts = {number: encode_pieces(pieces) for number, pieces in distinct.items()}
    cache.pieces = decode_pieces(comm.scatter([texts[id(p)] for p in plan.pieces] if plan else None))
    cache.layout = None
    if plan is not None:
        cache.file_names, cache.tensors = index_tensors(plan)
    cache.structure = everyone
    return cache.pieces


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


def index_tensors(plan: SavePlan) -> tuple[tuple[str, ...], dict[str, dict[str, StoredTensor]]]:
    """A plan's safetensors files, and its tensors as the index holds them."""
    names: list[str] = []
    numbers = {section: np.zeros(len(plan.pieces), dtype=np.int64) for section in SECTIONS}  # rank to file
    sections: dict[int, set[str]] = {}
    for rank, pieces in enumerate(plan.pieces):
        if id(pieces) not in sections:
            sections[id(pieces)] = {piece.section for piece in pieces}
        for section in SECTIONS:
            if section in sections[id(pieces)]:
                numbers[section][rank] = len(names)
                names.append(shard_name(section, rank))
    tensors: dict[str, dict[str, StoredTensor]] = {section: {} for section in SECTIONS}
    for (section, key), places in plan.placed.items():
        dtype, shape = plan.kinds[section, key]
        offsets, sizes = places.boxes.columns
        columns = {
            "count": len(places.ranks),
            "file": pack_column(numbers[section][places.ranks]),
            "start": pack_column(places.starts),
            "offsets": offsets,
            "sizes": sizes,
        }
        tensors[section][key] = StoredTensor(dtype, shape, columns)
    return tuple(names), tensors


def merge_shared(step: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain data of all ranks as one: rank 0's, and every rank's part of model and optimizer."""
    return {
        "step": step,
        "dp": [shared["dp"] for shared in ranks],
        "has": sorted({name for shared in ranks for name in shared["has"]}),
        "model": {key: value for shared in ranks for key, value in shared["model"].items()},
        "optim": {
            "groups": optimizer.merge_groups(shared["optim"]["groups"] for shared in ranks),
            "leaves": {key: value for shared in ranks for key, value in shared["optim"]["leaves"].items()},
            "others": ranks[0]["optim"].get("others", []),
        },
        "sched": ranks[0]["sched"],
        "extra": ranks[0]["extra"],
    }


_log = logging.getLogger("titan_ckpt")

_SAMPLE_ELEMENTS = 4096
_MOST_NAMES = 6
_BOXES = np.dtype([("box", "<u8"), ("sample", "<u8")])


def compare_replicas(parts: list[LocalPart], held: list[Held], comm: ByteComm) -> list[str]:
    """Names of tensors whose values differ between ranks that hold the same box; rank 0 logs them. Collective."""
    if comm.size == 1:
        return []
    names: dict[int, str] = {}
    rows: list[tuple[int, int]] = []
    for part, kept in zip(parts, held, strict=True):
        for i, box in enumerate(kept.boxes):
            number = xxhash.xxh3_64_intdigest(f"{kept.section}/{kept.key}/{box}".encode())
            names[number] = f"{kept.section}.{kept.key}"
            rows.append((number, xxhash.xxh3_64_intdigest(tensor_bytes(_sample(part.view(i))))))
    gathered = comm.gather(np.array(rows, dtype=_BOXES).tobytes())
    reply = None if gathered is None else _differing(gathered).tobytes()
    differing = {int(number) for number in np.frombuffer(comm.broadcast(reply), dtype="<u8")}
    if not differing:
        return []
    mine = sorted({names[number] for number in differing if number in names})
    found = sorted({name for reply in comm.all_gather("\n".join(mine).encode()) for name in reply.decode().split("\n")})
    found = [name for name in found if name]
    if comm.rank == 0:
        _log.warning(
            "%d tensors differ between ranks that hold the same part of them; one rank's values are saved: %s%s. If each "
            "is a part of a larger tensor, describe it in TrainState(shards=). Otherwise make them equal or leave them out",
            len(found), ", ".join(found[:_MOST_NAMES]), ", …" if len(found) > _MOST_NAMES else "",
        )  # fmt: skip
    return found


def _sample(view: Tensor) -> Tensor:
    """The first values of a box."""
    while view.dim() > 1 and view.numel() > _SAMPLE_ELEMENTS:
        view = view[0]
    return view[:_SAMPLE_ELEMENTS] if view.dim() == 1 else view


def _differing(gathered: list[bytes]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Numbers of the boxes for which ranks have different samples."""
    rows = np.unique(np.concatenate([np.frombuffer(reply, dtype=_BOXES) for reply in gathered]))
    boxes = rows["box"]  # sorted; a box appears once per distinct sample
    return np.unique(boxes[1:][boxes[1:] == boxes[:-1]])
