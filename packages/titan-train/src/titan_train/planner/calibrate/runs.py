"""Fit constants to one's own runs.

A run folder holds its configuration and its metrics; a step's time is the median of the later half, so that compilation
and warm-up do not count. The constants that a handful of runs can tell are fitted, the rest keep their prior.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.observe.log import lines_of
from titan_train.planner.calibrate.fit import MeasuredRow, fit_constants, predicted
from titan_train.planner.cost.constants import Constants, prior
from titan_train.planner.documents import described_run
from titan_train.planner.hardware.machine import Machine
from titan_train.run_folder import read_config

RUN_CONSTANTS = ("matmul", "kernel_s", "local", "step_s")
"""What a few runs can tell apart: the rate of products, the host's time for a kernel and for a step, the link's share."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The outcome of a fit."""

    constants: Constants
    before: list[float]
    """Predicted over measured speed of each run, by the prior."""
    after: list[float]
    """The same with the fitted constants."""


def read_run(folder: Path, machine: Machine) -> MeasuredRow:
    """One run as a measured row.

    Raises:
        ValueError: The folder holds no configuration or too few steps.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() or not (folder / "run.json").is_file():
        read_config(folder)
        raise ValueError(f"{folder} has no metrics.jsonl or run.json: it has not made a step yet.")
    lines = [line for line, _, _ in lines_of(metrics) if line is not None and line.get("kind") == "step"]
    steps = _positive(lines, "step_time_s")
    if len(steps) < 4:
        raise ValueError(f"{folder} has {len(steps)} timed steps; calibration needs at least 4.")
    seconds = statistics.median(steps[len(steps) // 2 :])
    # without a launcher nobody writes the number of ranks; the two rates of a step tell it
    of_all, of_one = _positive(lines, "tokens_per_s"), _positive(lines, "tokens_per_s_per_rank")
    shape, setup = described_run(folder, round(of_all[-1] / of_one[-1]) if of_all and of_one else 0)
    speed = setup.global_batch * setup.seq_len / setup.world_size / seconds
    return MeasuredRow(str(folder), shape, machine, setup, speed)


def _positive(lines: list[dict[str, Any]], name: str) -> list[float]:
    """A quantity of the steps, where it is a positive number: somebody may have edited the file."""
    values = [line.get(name) for line in lines]
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v) and v > 0]


def held_out(rows: list[MeasuredRow], names: tuple[str, ...] = RUN_CONSTANTS) -> list[float]:
    """Predicted over measured speed of each run by a fit to the others."""
    found: list[float] = []
    for row in rows:
        others = calibrate([other for other in rows if other is not row], names)
        found.append(predicted(row, others.constants) / row.tokens_per_s)
    return found


def calibrate(rows: list[MeasuredRow], names: tuple[str, ...] = RUN_CONSTANTS) -> Calibration:
    """Fit ``names`` to measured runs of one machine and one stack."""
    stacks = {row.setup.stack for row in rows}
    if len(stacks) != 1:
        raise ValueError(
            f"calibrate fits one software stack at a time, and these runs use {', '.join(sorted(stacks))}."
        )
    start = prior(rows[0].setup.stack)
    fitted = fit_constants(rows, names, start, pull=0.05, spread=1.0, source=f"fitted to {len(rows)} runs")
    errors = [[predicted(row, c) / row.tokens_per_s for row in rows] for c in (start, fitted)]
    return Calibration(fitted, errors[0], errors[1])
