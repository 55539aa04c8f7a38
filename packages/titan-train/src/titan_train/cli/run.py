"""Train the model that a configuration describes.

CONFIG is a TOML file or the name of a shipped configuration (`titan-train list`). Every setting can be given on the
command line too, over the file: `titan-train run quickstart --train.steps 20 --launch.nproc 2`.
`titan-train run CONFIG --help` lists every setting with its value.

Running the same configuration again resumes it from its last finished checkpoint. SIGTERM or Ctrl-C saves and stops;
SIGUSR1 saves and goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_train.config import Config, load_config
from titan_train.launch.failure import clear_failures, first_failure
from titan_train.launch.ranks import device_type, local_world_size, ranks_from_torchrun, under_torchrun
from titan_train.layout import build_layout, plan_batch, resolve_mode
from titan_train.observe import RunInfo, check_trackers
from titan_train.run_folder import newest_checkpoint, run_folder, write_config


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = "titan-train run CONFIG [--section.key value ...]"
    parser.add_argument("config", metavar="CONFIG", help="TOML file, or name of a shipped configuration")
    arguments, overrides = parser.parse_known_args(words[:1]) if words else parser.parse_known_args([])
    config = load_config(arguments.config, [*overrides, *words[1:]])
    return _be_a_torchrun_worker(config) if under_torchrun() else _run_here(config)


def _run_here(config: Config) -> int:
    """Start the ranks of this machine, watch them, report."""
    world_size, device = local_world_size(config.launch), device_type(config.launch)
    _check_layout(config, world_size)
    run_dir = run_folder(config)
    done = newest_checkpoint(run_dir)
    if done is not None and done >= config.train.steps and config.checkpoint.resume == "auto":
        print(
            f"{run_dir} is complete: step {done} of {config.train.steps} is saved. "
            "For more, raise --train.steps; for a new run, set --run.name."
        )
        _print_next(run_dir)
        return 0

    from titan_train.launch.local import LocalLauncher

    print(f"run      {run_dir}  ({world_size} {device} rank{'s' if world_size > 1 else ''})")
    launcher = LocalLauncher(world_size, device)  # imports torch in the background while the inputs are prepared

    from titan_train.inputs import prepare_inputs

    prepare_inputs(config)
    for change in write_config(config, run_dir):
        print(f"changed  {change}")
    info = RunInfo(run_dir, device=device, world_size=world_size, resume_step=done or 0)
    code = launcher.run(config, run_dir)
    _finish(config, run_dir, info, code)
    return code


def _be_a_torchrun_worker(config: Config) -> int:
    ranks = ranks_from_torchrun(config.launch)
    _check_layout(config, ranks.world_size)

    from titan_train.inputs import prepare_inputs
    from titan_train.launch.worker import torchrun_worker

    run_dir = run_folder(config)
    prepare_inputs(config, quiet=ranks.rank != 0)
    info = None
    if ranks.rank == 0:
        clear_failures(run_dir)
        write_config(config, run_dir)
        info = RunInfo(
            run_dir, device=ranks.device_type, world_size=ranks.world_size, resume_step=newest_checkpoint(run_dir) or 0
        )
    code = torchrun_worker(config, ranks, run_dir)
    if info is not None:
        _finish(config, run_dir, info, code)
    return code


def _finish(config: Config, run_dir: Path, info: RunInfo, code: int) -> None:
    """Record how the run ended, write its report, say what can be done next."""
    step = newest_checkpoint(run_dir) or 0
    completed = code == 0 and step >= config.train.steps
    failure = first_failure(run_dir) if code else None
    info.finish(
        "finished" if completed else "stopped" if code == 0 else "failed",
        step=step,
        error=None
        if code == 0
        else f"{failure.kind}: {failure.message}"
        if failure
        else "a rank was ended from outside",
    )
    if config.metrics.report and (run_dir / "metrics.jsonl").exists():
        from titan_train.report import build_report, summarize

        page = build_report(run_dir)
        if code == 0:
            print(summarize(run_dir))
        print(f"report   {page}", file=sys.stdout if code == 0 else sys.stderr)
    if code == 0:
        _print_next(run_dir)


def _check_layout(config: Config, world_size: int) -> None:
    """What can be wrong with the number of ranks or the extras, before any rank starts."""
    layout = build_layout(config, world_size)
    resolve_mode(config.parallel, layout, dtype=config.train.dtype)
    plan_batch(config, layout)
    check_trackers(config.metrics)


def _print_next(run_dir: Path) -> None:
    print(f'generate titan-train generate {run_dir} --prompt "def main("')
