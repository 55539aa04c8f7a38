"""An attempt takes effect when all its ranks have restored, and not before.

Problem: a resume may be refused by any rank (another model, other data, a damaged checkpoint). Had the launcher already
replaced the configuration of a finished run, that run could no longer be read.

Idea: the launcher stages the new files in ``staged/``. Rank 0 moves them into place once every rank has restored.
"""

import shutil
import tomllib
from pathlib import Path
from typing import Any, cast

from titan_train.config import Config, dump_config
from titan_train.config.patterns import PATTERN_TABLES
from titan_train.files import read_toml, write_atomic
from titan_train.run_folder.rewind import set_aside

_CONFIG = "config.toml"


def staged_folder(run_dir: Path) -> Path:
    """Where the files of an attempt wait."""
    return run_dir / "staged"


def changes(config: Config, run_dir: Path) -> list[str]:
    """What differs from the configuration that the run was last started with.

    Returns:
        One ``key: old -> new`` per line; empty for a new run.
    """
    try:
        before = read_toml(run_dir / _CONFIG)
    except (OSError, ValueError):  # a new run, or a damaged file that the attempt replaces
        return []
    return _differences(before, tomllib.loads(dump_config(config)))


def stage(config: Config, run_dir: Path) -> Path:
    """Stage the configuration of the next attempt, in place of what an earlier one left. Returns the staging folder."""
    discard(run_dir)
    write_atomic(staged_folder(run_dir) / _CONFIG, dump_config(config))
    return staged_folder(run_dir)


def commit(run_dir: Path, config: Config) -> None:
    """Move what is staged into place. In rank 0, once all ranks have restored.

    Args:
        run_dir: The run's folder.
        config: Written where nothing is staged: a `Trainer` that no launcher started.
    """
    staged = staged_folder(run_dir)
    set_aside(run_dir, staged)
    if not (staged / _CONFIG).exists():
        write_atomic(run_dir / _CONFIG, dump_config(config))
        return
    for file in sorted(staged.iterdir()):
        file.replace(run_dir / file.name)
    staged.rmdir()


def discard(run_dir: Path) -> None:
    """Drop what is staged; the folder is as the last attempt that took effect left it."""
    shutil.rmtree(staged_folder(run_dir), ignore_errors=True)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        before, now = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
        keys = sorted({*before, *now})
        reordered = path in PATTERN_TABLES and [*before] != [*now] and len(keys) > 1
        lines = [f"{path}: {[*before]} -> {[*now]}"] if reordered else []
        for key in keys:
            lines += _differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
        return lines
    return [] if old == new else [f"{path}: {old} -> {new}"]
