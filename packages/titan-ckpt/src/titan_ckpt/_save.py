"""One synchronous save, as seen by each rank: say what it holds, write what it is assigned, report.

Three short exchanges with rank 0: the state's structure (once; the plan is kept while it stays the same), the
assignments, the written files. Every failure, of whatever rank, is raised by every rank, and the step does not exist
then.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_ckpt import _commit, _optim, _tree
from titan_ckpt._digest import digest
from titan_ckpt._dtypes import dtype_name
from titan_ckpt._errors import CheckpointError
from titan_ckpt._format import SECTIONS, STATE_NAME, Entry, rank_state_name, shard_name
from titan_ckpt._index import FileRecord, Index, StoredChunk, StoredTensor, pack_tensor
from titan_ckpt._layout import LocalPart, local_part
from titan_ckpt._leaves import tensor_bytes
from titan_ckpt._plan import Held, Piece, Plan, decode_held, decode_pieces, encode_held, encode_pieces, plan_save
from titan_ckpt._ranks import Ranks
from titan_ckpt._state import Collected, TrainState, collect
from titan_ckpt._write import write_bytes, write_safetensors


@dataclass(slots=True)
class PlanCache:
    """The last plan: kept while the structure of the state does not change."""

    structure: str = ""
    """Digest of what this rank holds; on rank 0, of what all ranks hold."""
    pieces: tuple[Piece, ...] = ()
    plan: Plan | None = None
    """The whole plan, on rank 0."""


def save_step(
    root: Path, step: int, state: TrainState, ranks: Ranks, cache: PlanCache, metrics: Mapping[str, float], version: str
) -> Path:
    """Save a step and return its folder. Collective; see `titan_ckpt.Checkpointer.save`."""
    doing = f"save of step {step}"
    collected, parts, held, error = _prepare(step, state, ranks)
    ranks.agree(error, doing)
    assert collected is not None
    pieces = _plan(held, ranks, cache, doing)
    folder, save_id = _begin(root, step, ranks, doing)
    error, records = None, list[FileRecord]()
    try:
        records = _write_rank(folder, ranks.rank, step, collected, parts, held, pieces)
    except (OSError, ValueError) as err:
        error = _explained(err, folder, ranks.rank)
    reports = ranks.gather(_tree.dump_json({"files": [r.to_json() for r in records], "shared": collected.shared}))
    try:
        ranks.agree(error, doing)
        final = ""
        if reports is not None:
            try:
                final = str(_commit_all(folder, step, save_id, ranks, cache, reports, metrics, version))
            except (OSError, ValueError) as err:
                error = _explained(err, folder, 0)
        ranks.agree(error, doing)
    except Exception:
        if ranks.rank == 0 and folder.exists():
            _commit.discard(folder)
        raise
    return Path(ranks.broadcast(final.encode() if ranks.rank == 0 else None).decode())


def _prepare(
    step: int, state: TrainState, ranks: Ranks
) -> tuple[Collected | None, list[LocalPart], list[Held], Exception | None]:
    """What this rank holds, or why it cannot be saved."""
    try:
        if step < 0:
            raise ValueError(f"step={step} is negative. Count steps from 0.")
        collected = collect(state, ranks.rank, ranks.size)
        parts = [local_part(tensor, f"{section}.{key}") for section, key, tensor in collected.tensors]
        held = [
            Held(
                section,
                key,
                dtype_name(part.local.dtype, f"{section}.{key}"),
                part.shape,
                tuple((chunk.offsets, chunk.sizes) for chunk, _ in part.boxes),
            )
            for (section, key, _), part in zip(collected.tensors, parts, strict=True)
        ]
        return collected, parts, held, None
    except (TypeError, ValueError) as err:
        return None, [], [], err


def _plan(held: list[Held], ranks: Ranks, cache: PlanCache, doing: str) -> tuple[Piece, ...]:
    """The assignment of this rank; rank 0 also keeps the whole plan."""
    encoded = encode_held(held)
    mine = digest(encoded)
    everyone = digest(b"".join(ranks.all_gather(mine.encode())))
    if everyone == cache.structure:
        return cache.pieces
    gathered = ranks.gather(encoded)
    error, plan = None, None
    if gathered is not None:
        try:
            plan = plan_save([decode_held(data) for data in gathered])
        except ValueError as err:
            error = err
    ranks.agree(error, doing)
    pieces = decode_pieces(ranks.scatter([encode_pieces(p) for p in plan.pieces] if plan else None))
    cache.structure, cache.pieces, cache.plan = everyone, pieces, plan
    return pieces


def _begin(root: Path, step: int, ranks: Ranks, doing: str) -> tuple[Path, str]:
    error, told = None, None
    if ranks.rank == 0:
        try:
            folder, save_id = _commit.begin_save(root, step)
            told = json.dumps([str(folder), save_id]).encode()
        except OSError as err:
            error = _explained(err, root, 0)
    ranks.agree(error, doing)
    folder, save_id = json.loads(ranks.broadcast(told))
    return Path(folder), save_id


def _write_rank(
    folder: Path,
    rank: int,
    step: int,
    collected: Collected,
    parts: list[LocalPart],
    held: list[Held],
    pieces: tuple[Piece, ...],
) -> list[FileRecord]:
    """Write this rank's files and bring them to disk."""
    records: list[FileRecord] = []
    for section in SECTIONS:
        mine = [piece for piece in pieces if piece.section == section]
        if not mine:
            continue
        entries = [Entry(p.name, held[p.held].dtype, held[p.held].boxes[p.box][1]) for p in mine]

        def buffers(mine: list[Piece] = mine) -> Iterator[memoryview]:
            for piece in mine:
                with torch.no_grad():
                    yield tensor_bytes(parts[piece.held].view(piece.box))

        metadata = {"format": "pt"}
        records.append(write_safetensors(folder, shard_name(section, rank), entries, buffers(), metadata))
    if collected.own:
        records.append(write_bytes(folder, rank_state_name(rank), _tree.dump_json(collected.own)))
    return records


def _commit_all(
    folder: Path,
    step: int,
    save_id: str,
    ranks: Ranks,
    cache: PlanCache,
    reports: list[bytes],
    metrics: Mapping[str, float],
    version: str,
) -> Path:
    """Rank 0: merge what the ranks reported, write state, index and manifest, commit."""
    told = [json.loads(report) for report in reports]
    files = [FileRecord.from_json(record) for report in told for record in report["files"]]
    files.append(write_bytes(folder, STATE_NAME, _tree.dump_json(merge_shared(step, [r["shared"] for r in told]))))
    assert cache.plan is not None
    tied = {alias: first for report in told for alias, first in report["shared"]["tied"].items()}
    return _commit.commit_save(
        folder,
        step=step,
        save_id=save_id,
        world_size=ranks.size,
        files=files,
        index=build_index(cache.plan, files, tied),
        versions={"titan-ckpt": version, "torch": torch.__version__},
        metrics=metrics,
    )


def merge_shared(step: int, told: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain data of all ranks as one: rank 0's, and every rank's share of model and optimizer."""
    return {
        "step": step,
        "dp": [shared["dp"] for shared in told],
        "has": told[0]["has"],
        "model": {key: value for shared in told for key, value in shared["model"].items()},
        "optim": {
            "groups": _optim.merge_groups(shared["optim"]["groups"] for shared in told),
            "leaves": {key: value for shared in told for key, value in shared["optim"]["leaves"].items()},
        },
        "sched": told[0]["sched"],
        "extra": told[0]["extra"],
    }


def build_index(plan: Plan, files: list[FileRecord], tied: dict[str, str]) -> Index:
    """The index of a plan whose files are written."""
    number = {record.name: i for i, record in enumerate(files)}
    tensors: dict[str, dict[str, StoredTensor]] = {section: {} for section in SECTIONS}
    for (section, key), placed in plan.placed.items():
        dtype, shape = plan.kinds[section, key]
        chunks = [StoredChunk(number[shard_name(section, p.rank)], p.start, *p.box) for p in placed]
        tensors[section][key] = pack_tensor(dtype, shape, chunks)
    return Index(tuple(files), tensors, tied)


def _explained(err: Exception, path: Path, rank: int) -> Exception:
    if isinstance(err, OSError):
        return CheckpointError(
            f"rank {rank} cannot write below {path}: {err.strerror or err} (errno {err.errno}). Earlier steps are "
            "intact."
        )
    return err
