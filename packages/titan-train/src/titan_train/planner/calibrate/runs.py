"""Fit constants to one's own runs, and keep them in a TOML file.

A run folder holds its configuration and its metrics; a step's time is the median of the later half, so that compilation
and warm-up do not count. The constants that a handful of runs can tell are fitted, the rest keep their prior.
"""

import dataclasses
import json
import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from titan_train.config import load_config
from titan_train.planner.calibrate.fit import fit_constants
from titan_train.planner.calibrate.rows import MeasuredRow
from titan_train.planner.cost.constants import Constants, prior
from titan_train.planner.estimate import estimate
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.translate import setup_of_config, shape_of_config

RUN_CONSTANTS = ("matmul", "pointwise", "local", "step_s")
"""What short runs can tell apart: rates of products and of streaming, of transfers, and the host's part of a step."""


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
    config_file, metrics = folder / "config.toml", folder / "metrics.jsonl"
    if not config_file.is_file() or not metrics.is_file():
        raise ValueError(f"{folder} is not a run folder: it needs config.toml and metrics.jsonl.")
    records = [json.loads(line) for line in metrics.read_text().splitlines() if line.strip()]
    steps = [r for r in records if "step" in r and r.get("step_s")]
    if len(steps) < 4:
        raise ValueError(f"{folder} has {len(steps)} timed steps; calibration needs at least 4.")
    seconds = statistics.median(float(r["step_s"]) for r in steps[len(steps) // 2 :])
    config = load_config(str(config_file))
    ranks = int(next((r["world_size"] for r in records if r.get("world_size")), 0)) or config.parallel.num_ranks
    setup = setup_of_config(config, ranks)
    speed = setup.global_batch * setup.seq_len / ranks / seconds
    return MeasuredRow(0, str(folder), "run", "", shape_of_config(config), machine, setup, speed, None, seconds)


def calibrate(rows: list[MeasuredRow], names: tuple[str, ...] = RUN_CONSTANTS) -> Calibration:
    """Fit ``names`` to measured runs of one machine and one stack."""
    stacks = {row.setup.stack for row in rows}
    if len(stacks) != 1:
        raise ValueError(
            f"calibrate fits one software stack at a time, and these runs use {', '.join(sorted(stacks))}."
        )
    start = prior(rows[0].setup.stack)
    fitted = fit_constants(rows, names, start, pull=0.05, spread=1.0, source=f"fitted to {len(rows)} runs")
    errors = [
        [estimate(r.shape, r.machine, r.setup, c).tokens_per_s / r.tokens_per_s for r in rows] for c in (start, fitted)
    ]
    return Calibration(fitted, errors[0], errors[1])


def save_constants(constants: Constants, path: Path) -> None:
    """Write a set."""
    path.write_bytes(tomli_w.dumps(dataclasses.asdict(constants)).encode())


def load_constants(path: str | Path) -> Constants:
    """Read a set.

    Raises:
        ValueError: Missing file or unknown constant.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no constants file {str(path)!r}: write one with titan-train calibrate.")
    table = tomllib.loads(file.read_text())
    unknown = set(table) - {f.name for f in dataclasses.fields(Constants)}
    if unknown:
        raise ValueError(f"{path} has unknown constants {', '.join(sorted(unknown))}.")
    return Constants(**table)
