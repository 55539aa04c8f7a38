"""Reading a run's folder, and bringing it to the disk.

A finished checkpoint survives a power cut; what was written beside it and never synced may not: metrics of steps that no resume
makes again would be missing, or a configuration without which no checkpoint can be read. So the folder's own files are synced
before a checkpoint counts.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titan_ckpt import CheckpointError, Manifest
from titan_ckpt.steps.listing import step_folders
from titan_ckpt.storage.paths import is_there

from titan_train.config import Config, parse_config
from titan_train.config.published import RUN, TOKENIZER, split_start
from titan_train.files import local_path, read_bytes, read_toml, write_atomic
from titan_train.models.hf.folder import GENERATION, PREFIX, stop_ids_of

BEST = "validation_loss"
"""The metric of a checkpoint that was validated when it was saved."""
_MODEL = "model"
_SYNCED = ("", "tokenizer", _MODEL)
_FORMER = (
    ("launch", "launcher", {"torchrun": "machines"}),
    ("compile", "mode", {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}),
)
"""Values of earlier versions that are refused now, and what a run that has them is read with."""


def run_folder(config: Config) -> Path:
    """The folder of the run that ``config`` describes."""
    return Path(config.run.dir).expanduser() / config.run.name


def in_folder(config: Config, run_dir: Path) -> Config:
    """The configuration whose run's folder is ``run_dir``: there a task looks for what the run began with."""
    folder = run_dir.resolve()
    if folder == run_folder(config).resolve():
        return config
    with contextlib.suppress(ValueError):  # a name that no run may have
        config = replace(config, run=replace(config.run, dir=str(folder.parent), name=folder.name))
    return config


def read_config(run_dir: Path) -> Config:
    """The resolved configuration that a run was started with; its model is that of the run folder's own copy of ``config.json``.

    Raises:
        ValueError: ``run_dir`` is not a run's folder.
    """
    file = run_dir / "config.toml"
    if not file.is_file():
        raise ValueError(
            f"{run_dir} is not a run's folder: it has no config.toml. Name a folder that `titan-train run` made."
        )
    tree = read_toml(file)
    for section, name, now in _FORMER:
        if isinstance(values := tree.get(section), dict) and (value := now.get(str(values.get(name)))):
            values[name] = value
    return _with_kept_model(parse_config(tree, source=str(file)), run_dir)


def with_kept_model(config: Config, run_dir: Path) -> Config:
    """The configuration in which ``model.name = "hf:DIR"`` names the run folder's own copy of ``config.json``.

    Raises:
        ValueError: The folder's file has changed since the run was started.
    """
    found = _with_kept_model(config, run_dir)
    if found is config:
        return config
    name, kept = config.model.name, run_dir / _MODEL / "config.json"
    file = local_path(name) / "config.json"
    if file.is_file() and read_bytes(file) != read_bytes(kept):
        raise ValueError(
            f"model.name={name!r}: {file} is not what this run was started with ({kept}). Bring the file back, or choose "
            "another run.name."
        )
    return found


def _with_kept_model(config: Config, run_dir: Path) -> Config:
    """The same, whatever the folder's file is now: the weights of the run's checkpoints are of its own copy."""
    kept = run_dir / _MODEL / "config.json"
    if not config.model.name.startswith(PREFIX) or not kept.is_file() or newest_checkpoint(run_dir) is None:
        return config
    return replace(config, model=replace(config.model, name=f"{PREFIX}{kept.parent}"))


def keep_model(config: Config, run_dir: Path) -> None:
    """Keep in the run's folder what it needs of others, so that it can do without them.

    That is ``config.json`` of ``model.name = "hf:DIR"``, and the tokens that end a text of ``model.init``.
    """
    if config.model.name.startswith(PREFIX):
        file = local_path(config.model.name) / "config.json"
        kept = run_dir / _MODEL / "config.json"
        if file.resolve() != kept.resolve():
            write_atomic(kept, read_bytes(file))
    init = config.model.init
    if TOKENIZER not in config.model.init_changes:  # else the ids are those of another vocabulary
        ids = stop_ids_of(local_path(init)) if init.startswith(PREFIX) else ()
        ids = kept_stop_ids(split_start(init)[0]) if init.startswith(RUN) else ids
        if ids:
            write_atomic(run_dir / _MODEL / GENERATION, json.dumps({"eos_token_id": ids}) + "\n")


def kept_stop_ids(run_dir: Path) -> tuple[int, ...]:
    """The tokens that end a text in the folder that a run's weights came from; none if they came from no such folder."""
    folder = run_dir / _MODEL
    return stop_ids_of(folder) if (folder / GENERATION).is_file() else ()


def pipeline_file(run_dir: Path) -> Path:
    """Where a run keeps one step as its pipeline's ranks ran it."""
    return run_dir / "pipeline.json"


def newest_checkpoint(run_dir: Path) -> int | None:
    """The step of the finished checkpoint that was saved last, from which the run goes on. None if there is none."""
    return next(reversed(checkpoint_folders(run_dir)), None)


def checkpoint_folders(run_dir: Path) -> dict[int, Path]:
    """The folder of every finished checkpoint, by step: one that has its manifest, which is written last.

    In the order in which they were saved: a run that goes back to an earlier step saves smaller steps after larger ones.

    Raises:
        OSError: The disk does not answer.
    """
    root = run_dir / "checkpoints"
    folders = {step: root / path.name for step, path in step_folders(root)}
    return {step: folder for step, folder in folders.items() if is_there(folder / "MANIFEST.json")}


def best_metric(saved: Mapping[int, Path], measured: str = "") -> str:
    """The name of the losses among which a run's best checkpoint is the lowest: those that were measured alike.

    Args:
        saved: Its checkpoints, from `checkpoint_folders`.
        measured: How this attempt measures; by default, as the newest loss that was saved.
    """
    for path in reversed(list(saved.values())):
        if (metrics := _metrics(path)).get(BEST) is not None:
            newest = next((name for name in metrics if name.startswith(f"{BEST}:")), BEST)
            return f"{BEST}:{measured}" if measured and newest != BEST else newest  # BEST: an older version's run
    return f"{BEST}:{measured}" if measured else BEST


def best_saved(saved: Mapping[int, Path], metric: str = "") -> tuple[float, int] | None:
    """The lowest validation loss of checkpoints, and its step; None if none was validated when it was saved.

    Args:
        saved: From `checkpoint_folders`.
        metric: From `best_metric`, by default that of the newest loss.
    """
    metric = metric or best_metric(saved)
    losses = ((_metrics(path).get(metric, math.nan), step) for step, path in saved.items())
    return min((rated for rated in losses if math.isfinite(rated[0])), default=None)


def _metrics(checkpoint: Path) -> dict[str, float]:
    with contextlib.suppress(CheckpointError):  # a damaged one is not the best
        return Manifest.open(checkpoint).metrics
    return {}


def sync_run_folder(run_dir: Path) -> None:
    """Bring a run's own files to the disk: metrics, configuration, journal, tokenizer. Call it before a checkpoint is saved.

    Raises:
        OSError: The disk does not take a file.
    """
    for folder in (run_dir / name for name in _SYNCED):
        if not folder.is_dir():
            continue
        for path in (*(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")), folder):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # another process's
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
