"""The traces of a run's ranks, put on one clock, and what they say together. Nothing here imports torch."""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.files import parse_json, read_gzip, write_atomic
from titan_train.observe.timing.causes import Cause, find_causes
from titan_train.observe.timing.clocks import calls_of, errors_of_clocks
from titan_train.observe.timing.split import Place, StepSplit, combine


@dataclass(frozen=True, slots=True)
class Traces:
    """All ranks' traces."""

    split: StepSplit
    """Where the time of the traced steps went."""
    causes: list[Cause]
    """What held them up."""
    first: int
    """First traced step."""
    place: Place
    missing: tuple[int, ...]
    """Ranks whose file is not there."""


def folder_of(run_dir: Path) -> Path:
    """Where a run's traces are."""
    return run_dir / "traces"


def trace_file(run_dir: Path, rank: int) -> Path:
    """One rank's trace."""
    return folder_of(run_dir) / f"rank-{rank}.json.gz"


def read_traces(run_dir: Path, out: Path | None = None) -> Traces:
    """Read the ranks' traces, and put them into one file on one clock.

    Args:
        run_dir: The run's folder.
        out: Where to write the file of all ranks, gzipped; None does not write it.

    Raises:
        ValueError: There are no traces, or one is damaged.
    """
    try:
        return _read_traces(run_dir, out)
    except (KeyError, TypeError, IndexError, AttributeError, AssertionError) as err:
        raise ValueError(
            f"the traces of {run_dir} are damaged ({type(err).__name__}: {err}). Trace the steps again."
        ) from err


def _read_traces(run_dir: Path, out: Path | None) -> Traces:
    files = sorted(
        folder_of(run_dir).glob("rank-*.json.gz"), key=lambda path: int(path.name.split("-")[1].split(".")[0])
    )
    if not files:
        raise ValueError(f"{run_dir} holds no traces. Run it with --profile.steps FIRST:LAST, such as 10:13.")
    abouts: dict[int, dict[str, Any]] = {}
    events: dict[int, list[dict[str, Any]]] = {}
    for file in files:
        trace = _read(file)
        about = trace["titan"]
        abouts[int(about["rank"])] = about
        if out is not None:
            for event in trace["traceEvents"]:
                if "ts" in event:
                    event["ts"] -= 1e6 * about["offset_s"]
            events[int(about["rank"])] = trace["traceEvents"]
    # files of an earlier attempt with more ranks may be there
    ranks = next(iter(abouts.values()))["place"]["world_size"]
    abouts = {rank: about for rank, about in abouts.items() if rank < ranks}
    newest = max(about["steps"][1] for about in abouts.values())
    abouts = {rank: about for rank, about in abouts.items() if about["steps"][1] == newest}
    first = next(iter(abouts.values()))
    place = Place(first["place"]["world_size"], first["place"]["groups"], first["place"]["stages"])
    missing = tuple(rank for rank in range(place.world_size) if rank not in abouts)
    if missing:
        raise ValueError(
            f"{folder_of(run_dir)} lacks the traces of ranks {', '.join(map(str, missing))}. Each machine writes its own: copy "
            "the files of the others there."
        )
    for rank, about in abouts.items():
        if len(about["row"]) != place.width:
            raise ValueError(
                f"{trace_file(run_dir, rank)} is a trace of another version of titan-train. Trace the steps again."
            )
    split = combine(newest, place, [abouts[rank]["row"] for rank in range(place.world_size)])
    if out is not None:
        if first.get("blocking"):
            calls = {rank: calls_of(events[rank]) for rank in abouts}
            for rank, ahead_us in errors_of_clocks(calls, place.groups).items():
                _move(events[rank], -ahead_us)
        together = [event for rank in abouts for event in events[rank]]
        _move(together, -min((event["ts"] for event in together if "ts" in event), default=0.0))
        text = json.dumps({"traceEvents": together, "displayTimeUnit": "ms"})
        write_atomic(
            out, gzip.compress(text.encode(), compresslevel=3)
        )  # a link in the folder is replaced, not followed
    return Traces(split, find_causes(split, place), first["steps"][0], place, missing)


def _move(events: list[dict[str, Any]], by_us: float) -> None:
    for event in events:
        if "ts" in event:
            event["ts"] += by_us


def _read(file: Path) -> dict[str, Any]:
    try:
        trace = parse_json(read_gzip(file))
        about = trace["titan"]
        assert isinstance(about["row"], list)
        return trace
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AssertionError) as err:
        raise ValueError(f"{file} is not a complete trace of titan-train ({err}). Trace the steps again.") from err
