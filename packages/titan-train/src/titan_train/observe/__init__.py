"""Measurements of a run: records, trackers, progress display.

Records (`StepRecord`, `ValidationRecord`) go to trackers (`metrics.jsonl` always; TensorBoard and W&B as extras) and
to the progress display. `timing` measures where the time of a step goes. Nothing here imports torch, rich or a
tracker's package before it is used.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.observe.history import Curve, History, read_history
    from titan_train.observe.log import EventRecord, JsonlTracker, RunMetrics, read_metrics
    from titan_train.observe.memory import memory_in_use, peak_memory_gib
    from titan_train.observe.peak_flops import Dtype, device_peak_flops
    from titan_train.observe.records import StepRecord, Tracker, ValidationRecord
    from titan_train.observe.run_info import RunInfo, add_run_info, read_run_info
    from titan_train.observe.terminal import TrainProgress
    from titan_train.observe.throughput import Rates, Throughput
    from titan_train.observe.trackers import TensorBoardTracker, WandbTracker, build_trackers, check_trackers

__all__ = [
    "Curve",
    "Dtype",
    "EventRecord",
    "History",
    "JsonlTracker",
    "Rates",
    "RunInfo",
    "RunMetrics",
    "StepRecord",
    "TensorBoardTracker",
    "Throughput",
    "Tracker",
    "TrainProgress",
    "ValidationRecord",
    "WandbTracker",
    "add_run_info",
    "build_trackers",
    "check_trackers",
    "device_peak_flops",
    "memory_in_use",
    "peak_memory_gib",
    "read_history",
    "read_metrics",
    "read_run_info",
]

__getattr__ = first_use(__name__)
