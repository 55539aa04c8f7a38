"""Reading a run's folder."""

import re
import tomllib
from pathlib import Path

from titan_train.config import Config, parse_config


def run_folder(config: Config) -> Path:
    """The folder of the run that ``config`` describes."""
    return Path(config.run.dir) / config.run.name


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
