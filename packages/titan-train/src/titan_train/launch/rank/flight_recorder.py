"""Where every rank stood when a collective hung, and which rank the others wait for.

torch keeps the last collectives of each rank in a ring buffer, the flight recorder. When the launcher finds a hang, each
rank writes its buffer as JSON, and its Python stacks, into ``hangs/attempt-N/`` of the run's folder, from a thread, so
that a rank stuck in a collective still can. Then the numbers are compared: ranks of a group count its collectives
alike, so the rank with the lowest number is the one that did not come. The newest collective of each group is enough for
that, and lies in a small file beside: the buffers of a thousand ranks are gigabytes.

The functions of the recorder are private; checked on torch 2.11 and 2.15, with gloo (CPU) and NCCL (GPU) dumps.
"""

import contextlib
import faulthandler
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.files import parse_json, write_atomic

_ENTRIES = "2000"
_NEWEST = ".newest.json"
_NAMED = 8  # ranks in a message


def record_collectives() -> None:
    """Turn the recorder on. Before the process group is made; a size the user set is kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


def write_dump(folder: Path, rank: int) -> None:
    """Write this rank's stacks and recorded collectives; last, by rename, the newest collective of each group."""
    from torch._C import _distributed_c10d as recorder

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.stacks.txt").open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(recorder, name):
            with contextlib.suppress(RuntimeError, ValueError):
                entries += json.loads(getattr(recorder, name)(True, False)).get("entries", [])
    write_atomic(folder / f"rank-{rank}.json", json.dumps(entries))
    write_atomic(folder / f"rank-{rank}{_NEWEST}", json.dumps(_newest(entries)))


def wait_for_dumps(folder: Path, world_size: int, quiet_s: float, most_s: float = 60.0) -> None:
    """Wait until every rank has written, or no new file came for ``quiet_s`` seconds, or ``most_s`` seconds have passed."""
    began = last = time.monotonic()
    seen: set[str] = set()
    while (now := time.monotonic()) < min(last + quiet_s, began + most_s):
        names = {file.name for file in folder.glob("*")}
        if sum(name.endswith(_NEWEST) for name in names) >= world_size:
            return
        if names - seen:
            seen, last = names, now
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the dumps say together."""

    missing: tuple[int, ...]
    """Ranks that the others wait for, silent ones first; empty if the dumps do not show it."""
    text: str


def read_dumps(folder: Path, world_size: int) -> Reading:
    """Compare the newest collectives of the ranks that wrote them. Damaged files count as missing."""
    dumps: dict[int, list[dict[str, Any]]] = {}
    for rank in range(world_size):
        with contextlib.suppress(OSError, ValueError):
            dumps[rank] = parse_json((folder / f"rank-{rank}{_NEWEST}").read_text(encoding="utf-8"))
    silent = tuple(rank for rank in range(world_size) if rank not in dumps)
    try:
        compared = _compare(folder, dumps)
    except (KeyError, IndexError, TypeError, ValueError, OSError):
        compared = Reading((), "the dumps of the ranks cannot be compared")
    if not silent:
        return compared
    text = f"{_ranks(silent)} did not respond: stopped, or stuck below Python"
    return Reading((*silent, *compared.missing), f"{text}; {compared.text}" if compared.missing else text)


def _newest(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest collective of each group."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        newest = found.setdefault(entry["process_group"][0], entry)
        if entry["collective_seq_id"] > newest["collective_seq_id"]:
            found[entry["process_group"][0]] = entry
    return list(found.values())


def _compare(folder: Path, dumps: Mapping[int, list[dict[str, Any]]]) -> Reading:
    last: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)  # by group, then rank: its newest collective
    for rank, entries in dumps.items():
        for entry in entries:
            last[entry["process_group"][0]][rank] = entry
    for newest in last.values():
        ahead = max(entry["collective_seq_id"] for entry in newest.values())
        behind = tuple(sorted(rank for rank, entry in newest.items() if entry["collective_seq_id"] < ahead))
        waiting = tuple(sorted(rank for rank in newest if rank not in behind))
        entry = newest[waiting[0]]
        if behind and not entry.get("retired", False):
            name = entry["process_group"][1] or "default"
            place = "; ".join(f"rank {rank} is at {_place(folder, rank)}" for rank in behind[:_NAMED])
            return Reading(
                behind,
                f"{_ranks(behind)} did not enter {entry['profiling_name']} number {ahead} of group {name!r} "
                f"(shapes {entry['input_sizes']}), where {_ranks(waiting)} {'is' if len(waiting) == 1 else 'are'} waiting; "
                f"{place}",
            )
    return Reading((), "all ranks are in the same collective, or in none: see the stacks")


def _place(folder: Path, rank: int) -> str:
    """The innermost Python frame of the rank's main thread: the last listed thread of the dump."""
    text = (folder / f"rank-{rank}.stacks.txt").read_text(encoding="utf-8")
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', text.rpartition("Thread 0x")[2], re.MULTILINE)
    return f"{Path(frames[0][0]).name}:{frames[0][1]} in {frames[0][2]}" if frames else "an unknown place"


def _ranks(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _NAMED:,} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"
