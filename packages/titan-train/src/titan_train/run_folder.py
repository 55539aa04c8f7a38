"""What lies in a run's folder.

    runs/NAME/config.toml     the resolved configuration
              run.json        versions, command, device, times, status
              layout.txt      which rank does what
              metrics.jsonl   one line a step
              checkpoints/    step-*/, each valid or not there
              logs/           what each rank printed
              report.html     the run on one page

No torch: the command line and the report use it.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from titan_train.config import Config, dump_config, parse_config
from titan_train.files import write_atomic


def run_folder(config: Config) -> Path:
    """The folder of the run that ``config`` describes."""
    return Path(config.run.dir) / config.run.name


def write_config(config: Config, run_dir: Path) -> list[str]:
    """Write the resolved configuration of a run that starts or resumes.

    Returns:
        What changed since the run was last started, one ``key: old -> new`` a line; empty for a new run.
    """
    file = run_dir / "config.toml"
    text = dump_config(config)
    before = file.read_text(encoding="utf-8") if file.exists() else text
    write_atomic(file, text)
    return _differences(tomllib.loads(before), tomllib.loads(text))


def read_config(run_dir: Path) -> Config:
    """The resolved configuration that a run was started with.

    Raises:
        ValueError: ``run_dir`` is not a run's folder.
    """
    file = run_dir / "config.toml"
    if not file.is_file():
        raise ValueError(
            f"{run_dir} is not a run's folder: it has no config.toml. Name a folder that `titan-train run` made."
        )
    return parse_config(tomllib.loads(file.read_text(encoding="utf-8")), source=str(file))


def newest_checkpoint(run_dir: Path) -> int | None:
    """The step of the newest finished checkpoint. None if there is none."""
    return max(checkpoint_folders(run_dir), default=None)


def checkpoint_folders(run_dir: Path) -> dict[int, Path]:
    """The folder of every finished checkpoint, by step: one that has its manifest, which is written last."""
    folders: dict[int, Path] = {}
    for manifest in sorted((run_dir / "checkpoints").glob("step-*/MANIFEST.json")):
        name = re.fullmatch(r"step-(\d+)(\.r\d+)?", manifest.parent.name)
        if name:
            folders[int(name[1])] = manifest.parent
    return folders


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys: list[str] = sorted({*old, *new})
        return [
            line
            for key in keys
            for line in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)  # pyright: ignore[reportUnknownArgumentType]
        ]
    return [] if old == new else [f"{path}: {old} -> {new}"]
