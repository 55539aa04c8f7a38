"""Traces of a few steps: one file per rank, in the words of the field, with what puts all of them on one clock.

While the steps run, torch's profiler records what each thread does, and blocks are named ``pp stage 2 F mb3``,
``tp all-reduce``, ``fsdp all-gather layers.7``, ``cp ring hop 2``. The file is Chrome's trace format, read by Perfetto.

One clock: machines' clocks differ, so the ranks compare theirs before the steps, see `timing.clocks`.
"""

import contextlib
import gzip
import json
import platform
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from titan_train.exchange import gather_values
from titan_train.observe.timing import Window
from titan_train.observe.timing.clocks import clock_offset
from titan_train.observe.timing.split import Place
from titan_train.observe.timing.traces import trace_file
from titan_train.train.measure import StepMeasure
from titan_train.train.observer import Observer, StepInfo

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


class StepProfile(Observer):
    """Traces the steps from ``first`` to ``last`` on this rank."""

    def __init__(self, first: int, last: int, measure: StepMeasure) -> None:
        self._first, self._last, self._measure = first, last, measure
        self._profiler: Any = None
        self._offset_s = 0.0
        self._from = 0

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Write what was traced, if the steps end before the last one to trace. Collective then."""
        yield
        if self._profiler is not None and self.run.step >= self._from:
            self._write(self.run.step)

    def on_step_start(self, step: int) -> None:
        """Start, if ``step`` is the first to trace. Collective then."""
        if self._from or not self._first <= step <= self._last:  # once, though `fit` may be called again
            return
        self._offset_s = clock_offset(self.run.device)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.run.device.type == "cuda" else [])]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._from = step
        self._measure.meter.label = record_function
        self._measure.paused = True
        timer = self._measure.timer
        if timer.running:
            timer.take()
        else:
            timer.start()

    def on_step(self, info: StepInfo) -> None:
        """Stop and write this rank's file, if the step was the last to trace. Collective then."""
        if self._profiler is not None and info.step >= self._last:
            self._write(info.step)

    def _write(self, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        window = self._measure.timer.take()
        self._measure.meter.label = None
        self._measure.paused = False
        with self.run.phase("checkpoint", step):
            profiler.stop()
            file = self._export(profiler, step, window)
            if self.run.mesh is not None:
                gather_values(None)  # who has less to write waits here, as long as for a save
        if self.run.config.metrics.split_every:
            self._measure.timer.take()  # writing is not part of a step
        else:
            self._measure.timer.stop()
        self.run.event("profile_written", file=str(file.relative_to(self.run.run_dir)))

    def _export(self, profiler: Any, step: int, window: Window) -> Path:
        place, rank = self._measure.place, self._measure.rank
        file = trace_file(self.run.run_dir, rank)
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
            "blocking": self.run.device.type == "cpu",  # a wait ends with its collective
            "place": _place_fields(place),
        }
        with gzip.open(file, "wt", encoding="utf-8", compresslevel=3) as out:
            out.write(json.dumps(in_our_words(trace, about)))  # many times as fast as json.dump
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


def _renamed(name: str) -> str:
    match = _FSDP.fullmatch(name)
    if match is None:
        return name
    return " ".join(
        word for word in ("fsdp", _FSDP_WORDS.get(match[1], match[1].replace("_", " ")), match[2] or "") if word
    )


def _place_fields(place: Place) -> dict[str, Any]:
    return {"world_size": place.world_size, "groups": dict(place.groups), "stages": list(place.stages)}
