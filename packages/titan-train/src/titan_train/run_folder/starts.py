"""Other runs as starting points: ``DIR``, which is the checkpoint saved last, ``DIR@STEP`` or ``DIR@best``.

`checkpoint.start_from` branches: weights, optimizer and data position of that step, into another folder. ``model.init = "run:…"``
takes the weights alone. Both are resolved to one step, since the other run may still be training: by the command before any rank
starts, and where each machine or rank has a command of its own, all ranks take rank 0's. Once a run has a checkpoint of its own,
that counts, and what it began with is on record.
"""

from dataclasses import replace
from pathlib import Path

from titan_train.config import Config
from titan_train.config.published import RUN, split_start
from titan_train.files import read_toml
from titan_train.observe.run_info import parent_of, read_run_info
from titan_train.run_folder.contents import best_saved, checkpoint_folders, newest_checkpoint, run_folder


def resolve_starts(config: Config, run_dir: Path | None = None) -> Config:
    """The configuration whose starting points name one step each.

    Args:
        config: The run's.
        run_dir: Its folder; None is the one that the configuration names.

    Raises:
        ValueError: There is no such run or step, it is this run's own folder, or this run already has a checkpoint and did not
            begin there.
    """
    run_dir = run_folder(config) if run_dir is None else run_dir
    resumes = newest_checkpoint(run_dir) is not None
    if config.checkpoint.start_from:
        found = _recorded_parent(config, run_dir) if resumes else _parent(config, run_dir)
        config = replace(config, checkpoint=replace(config.checkpoint, start_from=found))
    if config.model.init.startswith(RUN):
        init = (
            _recorded_init(config, run_dir) if resumes else "{}@{}".format(*find_start(config.model.init, "model.init"))
        )
        config = replace(config, model=replace(config.model, init=f"{RUN}{init.removeprefix(RUN)}"))
    return config


def continued_folder(config: Config) -> Path | None:
    """The folder of the run whose weights are trained on: this run's own once it has a checkpoint, else its parent's.

    None: the run has still to begin.
    """
    run_dir, start = run_folder(config), config.checkpoint.start_from
    if newest_checkpoint(run_dir) is not None:
        return run_dir
    return split_start(start)[0] if start else None


def check_unused(config: Config, run_dir: Path) -> None:
    """Refuse to resume where ``checkpoint.resume`` is "never". What a launcher starts again goes on from its own checkpoints.

    Raises:
        ValueError: The run's folder holds a checkpoint.
    """
    found = newest_checkpoint(run_dir) if config.checkpoint.resume == "never" else None
    if found is not None:
        raise ValueError(
            f"checkpoint.resume='never', but {run_dir} holds a checkpoint of step {found}. Choose another run.name, or set "
            "checkpoint.resume to 'auto'."
        )


def find_start(start: str, setting: str) -> tuple[Path, int]:
    """The run's folder and the step that a starting point means.

    Args:
        start: ``DIR``, ``DIR@STEP`` or ``DIR@best``; ``run:`` may stand before it.
        setting: What names it, for the message.

    Raises:
        ValueError: The folder is not a run's, or it has no such checkpoint.
    """
    folder, named = split_start(start)
    if not (folder / "config.toml").is_file():
        raise ValueError(
            f"{setting}={start!r}: {folder} is not a run's folder: it has no config.toml. Name a folder that `titan-train run` "
            "made, such as runs/quickstart or runs/quickstart@100."
        )
    saved = checkpoint_folders(folder)
    if not saved:
        raise ValueError(f"{setting}={start!r}: {folder} has no finished checkpoint. Let that run reach one.")
    if named == "best":
        return folder, _best(start, setting, saved)
    step = int(named) if named else [*saved][-1]
    if step not in saved:
        shown = ", ".join(map(str, sorted(saved)[-8:]))
        raise ValueError(
            f"{setting}={start!r}: {folder} has no checkpoint of step {step}; it has {shown}. Name one of these; "
            "checkpoint.keep_every and keep_last say which stay."
        )
    return folder, step


def _best(start: str, setting: str, saved: dict[int, Path]) -> int:
    best = best_saved(saved)
    if best is None:
        raise ValueError(
            f"{setting}={start!r}: no checkpoint there was validated when it was saved. Name a step; checkpoint.keep_best=true "
            "saves after each best validation."
        )
    return best[1]


def _parent(config: Config, run_dir: Path) -> str:
    start = config.checkpoint.start_from
    folder, step = find_start(start, "checkpoint.start_from")
    if folder.resolve() == run_dir.resolve():
        raise ValueError(
            f"checkpoint.start_from={start!r} is this run's own folder, and a branch needs another. Name it: --run.name NAME. "
            f"To go back in the same folder, use --resume-step {step} instead."
        )
    return f"{folder}@{step}"


def _recorded_parent(config: Config, run_dir: Path) -> str:
    """Where a run that has checkpoints of its own began: the setting must mean the same."""
    start = config.checkpoint.start_from
    recorded = parent_of(read_run_info(run_dir))
    folder, named = split_start(start)
    if (
        recorded is not None
        and Path(recorded[0]).resolve() == folder.resolve()
        and named in ("", "best", str(recorded[1]))
    ):
        return f"{recorded[0]}@{recorded[1]}"
    began = "began by itself" if recorded is None else f"branched from {recorded[0]}@{recorded[1]}"
    raise ValueError(
        f"checkpoint.start_from={start!r} would have no effect: {run_dir} has checkpoints of its own and {began}. Choose another "
        "run.name, or leave it out to resume."
    )


def _recorded_init(config: Config, run_dir: Path) -> str:
    """What a resumed run took its first weights from, with the step, if it is the run that the setting names."""
    init = config.model.init
    try:
        before = read_toml(run_dir / "config.toml")["model"]["init"]
    except (OSError, ValueError, KeyError, TypeError):
        return init
    return before if isinstance(before, str) and split_start(before)[0] == split_start(init)[0] else init
