"""Fit constants to one's own runs, and keep them in a TOML file.

A run folder holds its configuration and its metrics; a step's time is the median of the later half, so that compilation
and warm-up do not count. The constants that a handful of runs can tell are fitted, the rest keep their prior.
"""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from titan_train.config import Config
from titan_train.files import read_toml
from titan_train.models.hf.folder import PREFIX
from titan_train.models.shape import ModelShape
from titan_train.observe import read_run_info
from titan_train.observe.log import lines_of
from titan_train.planner.calibrate.fit import MeasuredRow, fit_constants, predicted
from titan_train.planner.cost.constants import Constants, prior
from titan_train.planner.documents import DocumentWork, document_work
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.setup import Setup
from titan_train.planner.shapes import shape_of_config, vocabulary_of
from titan_train.planner.translate import setup_of_config
from titan_train.run_folder import read_config

RUN_CONSTANTS = ("matmul", "kernel_s", "local", "step_s")
"""What a few runs can tell apart: the rate of products, the host's time for a kernel and for a step, the link's share."""

_RATES = {
    "matmul", "matmul8", "matmul4", "attention", "attention_backward", "bandwidth", "local", "network", "exchange",
    "exchange_fused", "expert_rows", "context", "software",
}  # fmt: skip
"""Constants that times are divided by."""
_MOST_SPREAD = 10.0


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


def described_run(folder: Path, ranks: int = 0) -> tuple[ModelShape, Setup]:
    """The shape and the setup of a run, with the vocabulary of its tokenizer.

    Args:
        folder: The run's folder.
        ranks: Number of ranks where run.json does not state it.

    Raises:
        ValueError: The folder holds no configuration, or the planner does not know its model or its layout.
    """
    config, info = read_config(folder), read_run_info(folder)
    stated, parameters = info.get("world_size"), info.get("parameters")
    ranks = stated if isinstance(stated, int) and stated > 0 else ranks
    if ranks < 1:
        raise ValueError(f"{folder} does not say on how many ranks it ran: run.json has no world_size.")
    shape, setup, _ = described(config, ranks)
    return with_parameters(shape, parameters if isinstance(parameters, int) else 0), setup


def described(config: Config, ranks: int) -> tuple[ModelShape, Setup, DocumentWork | None]:
    """The shape and the setup of a configuration, and the work of its documents where they are prepared, which the setup counts.

    The vocabulary is the tokenizer's where it is known. What a folder's own module keeps is counted on it, which takes torch.

    Raises:
        ValueError: The planner does not know the model, or so many ranks cannot share its layout.
    """
    shape, setup = shape_of_config(config, vocab_size=vocabulary_of(config)), setup_of_config(config, ranks)
    if config.model.name.startswith(PREFIX):
        from titan_train.planner.memory.folder import of_folder

        shape = of_folder(shape, config.model.name, config.model.args)
    if work := document_work(config, setup):
        setup = setup.changed(attention_share=work.attention_share(dynamic=config.context.dynamic))
    return shape, setup, work


def _positive(lines: list[dict[str, Any]], name: str) -> list[float]:
    """A quantity of the steps, where it is a positive number: somebody may have edited the file."""
    values = [line.get(name) for line in lines]
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v) and v > 0]


def with_parameters(shape: ModelShape, parameters: int) -> ModelShape:
    """The shape with the vocabulary that gives ``parameters``: a run's tokenizer sets it. 0 keeps the shape."""
    if not parameters or parameters == shape.parameters():
        return shape
    rest = dataclasses.replace(shape, vocab=0).parameters()
    return dataclasses.replace(shape, vocab=(parameters - rest) // (shape.dim * (1 if shape.tied else 2)))


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


def save_constants(constants: Constants, path: Path) -> None:
    """Write a set."""
    path.write_bytes(tomli_w.dumps(dataclasses.asdict(constants)).encode())


def load_constants(path: str | Path) -> Constants:
    """Read a set.

    Raises:
        ValueError: Missing file, unknown constant or a value that nothing can have.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no constants file {str(path)!r}: write one with titan-train plan calibrate.")
    table = read_toml(file)
    unknown = set(table) - {f.name for f in dataclasses.fields(Constants)}
    if unknown:
        raise ValueError(f"{path} has unknown constants {', '.join(sorted(unknown))}.")
    for name, value in table.items():
        wanted = str if name == "source" else (int, float)
        if not isinstance(value, wanted) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{path}: {name} = {value!r} is not a {'text' if name == 'source' else 'finite number'}.")
        least, most = 1e-9 if name in _RATES else 0.0, _MOST_SPREAD if name == "spread" else 1e9
        if isinstance(value, int | float) and not least <= value <= most:
            raise ValueError(f"{path}: {name} = {value!r} must be a number from {least:g} to {most:g}.")
    return Constants(**table)
