"""What the planner predicts for a run, term by term, beside what was measured.

The machine is the run's own: ``hardware.toml`` of `titan-train doctor --bench` in the run's folder or the one above it;
without it, the shipped machine of the device's name. ``constants.toml`` of `titan-train plan calibrate` is looked up in
the same places. Measured terms are those that the run logged in ``split``; a run that logged none shows the step alone.
"""

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from titan_train.planner.calibrate.defaults import constants_for
from titan_train.planner.cost.constants import load_constants
from titan_train.planner.cost.step import TERMS
from titan_train.planner.documents import described_run
from titan_train.planner.estimate import StepEstimate, estimate
from titan_train.planner.hardware.machine import Machine, load_machine, machine_of_device
from titan_train.report.folder import RunFolder
from titan_train.report.timeline import step_tables

_COMPUTE = ("products", "attention", "experts", "pointwise", "head", "recompute")
_DATA_PARALLEL = {f"{axis} exposed" for axis in ("dp", "dp_replicate", "dp_shard", "fsdp", "efsdp", "loss", "tokens")}
_GROUPS = (
    # label, predicted terms, measured names; "dp" stands for all its axes
    ("forward and backward", _COMPUTE, ("forward", "backward")),
    ("data-parallel transfers, exposed", ("dp",), ("dp exposed",)),
    ("tensor-parallel transfers, exposed", ("tp",), ("tp exposed",)),
    ("context-parallel transfers, exposed", ("cp",), ("cp exposed",)),
    ("expert transfers, exposed", ("ep",), ("ep exposed",)),
    ("pipeline: bubble and transfers", ("bubble", "pp"), ("pp exposed",)),
    ("optimizer and host copies", ("optimizer", "offload"), ("optimizer",)),
    ("host and data", ("host",), ("host", "data")),
)


@dataclass(frozen=True, slots=True)
class TermRow:
    """One line of the table, in seconds or GiB."""

    label: str
    predicted: float
    measured: float | None
    part: bool = False
    """Part of the line above; nothing measures it alone."""

    @property
    def ratio(self) -> str:
        """Measured over predicted."""
        if self.measured is None or self.predicted <= 0:
            return ""
        return f"{self.measured / self.predicted:.2f}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The section of the report."""

    seconds: list[TermRow]
    memory: list[TermRow]
    source: str
    """The machine and the constants, and where they come from."""
    verdict: str
    """The whole step against the interval, in one sentence."""


def predicted_beside_measured(folder: RunFolder) -> Prediction | None:
    """Predict the run and put its own measurements beside it; None where the planner knows no model or machine of it."""
    measured = folder.history.median("step_time_s", later=True)
    if not math.isfinite(measured) or not folder.config:
        return None
    try:
        machine, where = _machine(folder)
        if machine is None:
            return None
        shape, setup = described_run(folder.path, _ranks(folder))
        file = _own(folder.path, "constants.toml")
        constants = load_constants(file) if file else constants_for(machine, setup, routed=shape.moe)
        found = estimate(shape, machine, setup, constants)
    except (ValueError, OSError, ArithmeticError):  # a model of one's own, or what the planner cannot read
        return None
    names = f"constants of {file.name}" if file else found.constants.source
    return Prediction(
        _seconds(found, measured, _split(folder.path)),
        _memory(found, folder),
        f"{machine.title} ({where}); {names}",
        _verdict(found, measured),
    )


def _machine(folder: RunFolder) -> tuple[Machine | None, str]:
    file = _own(folder.path, "hardware.toml")
    if file:
        return load_machine(str(file)), f"measured: {file.name}"
    return machine_of_device(str(folder.info.get("device", ""))), "as shipped, not measured"


def _own(run_dir: Path, name: str) -> Path | None:
    return next((place / name for place in (run_dir, run_dir.resolve().parent) if (place / name).is_file()), None)


def _ranks(folder: RunFolder) -> int:
    of_all, of_one = (folder.history.curves[name].mean for name in ("tokens_per_s", "tokens_per_s_per_rank"))
    pairs = [(a, b) for a, b in zip(of_all, of_one, strict=True) if math.isfinite(a) and b > 0]
    return round(pairs[-1][0] / pairs[-1][1]) if pairs else 0


def _split(run_dir: Path) -> dict[str, float]:
    """Median seconds of each logged part of a step, over the later half of the run; data-parallel axes are added up."""
    _, tables = step_tables(run_dir, "split")
    found: dict[str, list[float]] = {}
    for table in tables[len(tables) // 2 :]:
        sums: dict[str, float] = defaultdict(float)
        for name, value in table.items():
            sums["dp exposed" if name in _DATA_PARALLEL else name] += value
        for name, value in sums.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def _seconds(found: StepEstimate, measured: float, split: dict[str, float]) -> list[TermRow]:
    terms = found.time.terms
    rows = [TermRow("whole step", found.time.total, measured)]
    for label, names, logged in _GROUPS:
        seconds = sum(terms[name] for name in names)
        known = [split[name] for name in logged if name in split]
        if seconds > 1e-4 * found.time.total or sum(known) > 0:
            rows.append(TermRow(label, seconds, sum(known) if known else None))
        if len(names) > 1:
            rows += [TermRow(TERMS[n], terms[n], None, part=True) for n in names if terms[n] > 1e-3 * found.time.total]
    return rows


def _memory(found: StepEstimate, folder: RunFolder) -> list[TermRow]:
    if folder.info.get("device") == "cpu":  # there the whole process is measured, interpreter and libraries too
        return []
    peaks = [peak for peak in folder.history.curves["peak_mem_gib"].high if math.isfinite(peak)]
    rows = [TermRow("allocated at the peak", found.memory.allocated_gib, max(peaks, default=None))]
    rows += [
        TermRow(name, size / 2**30, None, part=True)
        for name, size in sorted(found.memory.parts.items(), key=lambda part: -part[1])
    ]
    return [*rows, TermRow("reserved by the allocator", found.memory.reserved_gib, None)]


def _verdict(found: StepEstimate, measured: float) -> str:
    low, high = (found.time.total * found.tokens_per_s / speed for speed in reversed(found.interval))
    place = "inside" if low <= measured <= high else "outside"
    return (
        f"{measured:.3g} s a step, predicted {found.time.total:.3g} s: {place} the 80 % interval "
        f"of {low:.3g} to {high:.3g} s"
    )
