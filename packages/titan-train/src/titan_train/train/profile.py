"""Traces of a few steps: one file per rank, in the words of the field, with what puts all of them on one clock.

While the steps run, torch's profiler records what each thread does, and blocks are named ``pp stage 2 F mb3``,
``tp all-reduce``, ``fsdp all-gather layers.7``, ``cp ring hop 2``. The file is Chrome's trace format, read by Perfetto.

One clock: machines' clocks differ. Before the steps, the ranks exchange the time a few times. A message takes at least its
latency, so the smallest difference in each direction bounds the offset from both sides, and its middle is off by at
most half a round trip.
"""

import gzip
import json
import platform
import re
import socket
import time
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function

from titan_train.observe.timing.split import Place
from titan_train.observe.timing.traces import trace_file
from titan_train.train.measure import StepMeasure

_EXCHANGES = 8
# what torch's FSDP calls its blocks; the module's name follows in parentheses
_FSDP = re.compile(r"FSDP::(\w+)(?: \((.*)\))?")
_FSDP_WORDS = {
    "all_gather": "all-gather",
    "all_gather_copy_in": "all-gather copy-in",
    "all_gather_copy_out": "all-gather copy-out",
    "post_backward_reduce": "reduce-scatter",
    "backward_prefetch": "prefetch",
    "pre_forward": "before forward",
    "post_forward": "after forward",
    "pre_backward": "before backward",
    "post_backward": "after backward",
}


def label(name: str) -> AbstractContextManager[object]:
    """A block with a name in the trace."""
    return record_function(name)


class StepProfile:
    """Traces the steps from ``first`` to ``last`` on this rank."""

    def __init__(self, first: int, last: int, run_dir: Path, measure: StepMeasure, device: torch.device) -> None:
        self._first, self._last = first, last
        self._run_dir = run_dir
        self._measure = measure
        self._device = device
        self._profiler: Any = None
        self._offset_s = 0.0
        self._from = 0

    def before_step(self, step: int) -> None:
        """Start, if ``step`` is the first to trace. Collective then."""
        if self._profiler is not None or not self._first <= step <= self._last:
            return
        self._offset_s = clock_offset(self._device)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._from = step
        self._measure.meter.label = label
        self._measure.paused = True
        self._measure.timer.take()

    def step_made(self, step: int) -> Path | None:
        """Stop and write, if ``step`` was the last to trace.

        Returns:
            This rank's file, when it was written.
        """
        if self._profiler is None or step < self._last:
            return None
        profiler, self._profiler = self._profiler, None
        window = self._measure.timer.take()
        self._measure.meter.label = None
        self._measure.paused = False
        profiler.stop()
        place, rank = self._measure.place, self._measure.rank
        file = trace_file(self._run_dir, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        raw = file.with_suffix(".raw.json")
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text(encoding="utf-8"))
        raw.unlink()
        about = {
            "rank": rank,
            "steps": [self._from, step],
            "host": platform.node(),
            "offset_s": self._offset_s,
            "row": place.row(window, self._measure.work),
            "place": _place_fields(place),
        }
        with gzip.open(file, "wt", encoding="utf-8", compresslevel=3) as out:
            json.dump(in_our_words(trace, about), out)
        self._measure.timer.take()  # writing is no part of a step
        return file


def in_our_words(trace: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """A trace of torch's with the field's names, one process, and what it is about."""
    rank = about["rank"]
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
    events: list[dict[str, Any]] = []
    for event in trace.get("traceEvents", []):
        if event.get("ph") == "M" or event.get("name") == "Record Window End":
            continue
        if "ts" in event:
            event["ts"] = float(event["ts"]) + base_us
        event["pid"] = rank
        event["name"] = _renamed(str(event.get("name", "")))
        events.append(event)
    name = {
        "ph": "M",
        "pid": rank,
        "tid": 0,
        "name": "process_name",
        "args": {"name": f"rank {rank} ({about['host']})"},
    }
    order = {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    return {"traceEvents": [name, order, *events], "displayTimeUnit": "ms", "titan": about}


def clock_offset(device: torch.device) -> float:
    """Seconds that this rank's clock is ahead of rank 0's. Collective. 0 where all ranks share a machine's clock."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    size = dist.get_world_size()
    host = float(zlib.crc32(socket.gethostname().encode()))
    arrivals: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []
    for _ in range(_EXCHANGES):
        dist.barrier()
        mine = torch.tensor([time.time(), host], dtype=torch.float64, device=device)
        every = mine.new_empty(2 * size)
        dist.all_gather_into_tensor(every, mine)
        arrivals.append(torch.tensor([time.time()], dtype=torch.float64, device=device))
        sent.append(every.view(size, 2))
    if len({row[1].item() for row in sent[0]}) == 1:
        return 0.0
    # how much later than it was sent, by the two clocks, each rank's time arrived here, and here's arrived there
    here = torch.stack([arrival - times[:, 0] for arrival, times in zip(arrivals, sent, strict=True)]).min(0).values
    every = here.new_empty(size * size)
    dist.all_gather_into_tensor(every, here)
    delays = every.view(size, size)  # [at, from]
    rank = dist.get_rank()
    return float((delays[rank, 0] - delays[0, rank]) / 2)


def _renamed(name: str) -> str:
    match = _FSDP.fullmatch(name)
    if match is None:
        return name
    return " ".join(
        word for word in ("fsdp", _FSDP_WORDS.get(match[1], match[1].replace("_", " ")), match[2] or "") if word
    )


def _place_fields(place: Place) -> dict[str, Any]:
    return {"world_size": place.world_size, "groups": dict(place.groups), "stages": list(place.stages)}
