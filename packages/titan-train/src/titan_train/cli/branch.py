"""Where a run begins, for `run` and `check`: in another run's step, with the learning rate decayed from there, or further back.

A branch for a decay: warm-up-stable-decay keeps the peak rate, so that any step of the plateau may be decayed on its own
(MiniCPM, arXiv:2404.06395), and one long run gives a finished model of every length.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence

from titan_train.cli.parser import CommandParser, integer
from titan_train.config import Config
from titan_train.config.published import split_start
from titan_train.optim.schedule import check_schedule
from titan_train.parallel.layout.run import fit_warmup
from titan_train.run_folder import check_rewind, resolve_starts, run_folder

_SHORT = {
    "--devices": "--launch.nproc",
    "--launcher": "--launch.launcher",
    "--faults": "--launch.faults",
    "--from": "--checkpoint.start-from",
    "--ray.": "--launch.ray.",
}


def written_out(word: str) -> str:
    """A short option as the setting it stands for."""
    for short, whole in _SHORT.items():
        if word == short or word.startswith(f"{short}=") or (short.endswith(".") and word.startswith(short)):
            return whole + word.removeprefix(short)
    return word


def add_start_options(parser: CommandParser) -> None:
    """Add ``--decay`` and ``--resume-step``; ``--from`` is a setting's short name, see `written_out`."""
    parser.add_argument(
        "--decay",
        type=_share,
        metavar="SHARE|STEPS",
        help="with --from: decay the learning rate to the end, over this share of the steps so far (10%%) or this many steps",
    )
    parser.add_argument(
        "--resume-step",
        type=integer(1),
        metavar="STEP",
        help="go back to this checkpoint of the run; later ones are moved to set_aside/",
    )


def read_start(parser: CommandParser, arguments: argparse.Namespace, settings: Sequence[str]) -> tuple[Config, str]:
    """The configuration with its starting points resolved.

    Returns:
        The configuration, and one line that says what was changed; empty if nothing was.

    Raises:
        ValueError: A starting point or a setting cannot work.
    """
    config = resolve_starts(parser.read_config(arguments.config, settings))
    if arguments.resume_step is not None:
        check_rewind(run_folder(config), arguments.resume_step)
    if arguments.decay is not None:
        return _decayed(config, arguments.decay)
    start, steps = config.checkpoint.start_from, config.train.steps
    if start and int(split_start(start)[1]) >= steps:
        raise ValueError(
            f"checkpoint.start_from={start!r} and train.steps={steps}: no step is left to make. Steps count from "
            "the parent's first; raise --train.steps."
        )
    return fit_warmup(config)


def _decayed(config: Config, length: float) -> tuple[Config, str]:
    """The branch's schedule: what is left of the run is one decay from the peak."""
    start = config.checkpoint.start_from
    if not start:
        raise ValueError("--decay is the schedule of a branch. Name where it begins, such as --from runs/a@1000.")
    if config.optimizer.name == "schedule_free":
        raise ValueError(
            "--decay with optimizer.name='schedule_free', which averages the weights in place of a decay: every step "
            "is as good as decayed. Leave --decay out."
        )
    step = int(split_start(start)[1])
    planned = check_schedule(config.schedule, max(config.train.steps, step))
    warmup, decays_from = planned["warmup_steps"], planned["total_steps"] - planned["decay_steps"]
    if not warmup <= step <= decays_from:
        inside = "decay" if step > decays_from else "warm-up"
        raise ValueError(
            f"--decay begins at the peak learning rate, and step {step} of {config.schedule.name!r} lies in its {inside}. Name a "
            f"step from {warmup} to {decays_from}"
            + (", or train the parent with schedule.name='wsd'." if config.schedule.name == "cosine" else ".")
        )
    steps = math.ceil(length * step) if length < 1 else int(length)
    schedule = dataclasses.replace(config.schedule, name="wsd", warmup_steps=warmup, decay_steps=steps)
    train = dataclasses.replace(config.train, steps=step + steps)
    note = f"decay of {steps} steps to step {step + steps}"
    return dataclasses.replace(config, train=train, schedule=schedule), note


def _share(word: str) -> float:
    """A share below 1, or a whole number of steps."""
    if (match := re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%", word)) and 0 < float(match[1]) < 100:
        return float(match[1]) / 100
    if re.fullmatch(r"[1-9]\d{0,17}", word):
        return int(word)
    raise argparse.ArgumentTypeError(
        f"{word[:40]!r} must be a share of the steps so far, such as 10%, or a number of steps"
    )
