"""What a run's folder holds: any file may be missing, torn or half written, and none of it is an error."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from titan_train.files import read_text, read_toml
from titan_train.observe import History, read_history, read_run_info
from titan_train.run_folder import run_status

CONFIG_NAME, LAYOUT_NAME = "config.toml", "layout.txt"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The readable content of a run's folder."""

    path: Path
    history: History
    info: dict[str, Any]
    """`run.json`; empty if it is missing."""
    config: dict[str, Any]
    """`config.toml`, resolved; empty if it is missing or not valid."""
    layout: str
    """`layout.txt`: how the ranks are laid out; empty if it is missing."""

    @property
    def name(self) -> str:
        """The run's name: its folder's."""
        return self.path.resolve().name

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Each start of this run, the last one at the end."""
        return attempts_of(self.info)

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, ``running``, ``killed`` or ``unknown``."""
        return run_status(self.path, self.attempts)

    @property
    def total_steps(self) -> int | None:
        """Steps the run was to make."""
        train = self.config.get("train")
        steps = cast("dict[str, Any]", train).get("steps") if isinstance(train, dict) else None
        return steps if isinstance(steps, int) else None


def read_folder(run_dir: str | Path) -> RunFolder:
    """Read a run's folder.

    Raises:
        ValueError: If it is not a folder, or holds none of a run's files.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give the folder of a run, such as runs/quickstart.")
    folder = RunFolder(
        path, read_history(path), read_run_info(path), _read_toml(path / CONFIG_NAME), _read_text(path / LAYOUT_NAME)
    )
    history = folder.history
    if not (history.steps or history.validations or history.events or folder.info or folder.config):
        raise ValueError(f"{path} holds no metrics.jsonl, run.json or config.toml; give the folder of a run.")
    return folder


def attempts_of(info: dict[str, Any]) -> list[dict[str, Any]]:
    """Each start of a run by its `run.json`, the last one at the end."""
    found = info.get("attempts")
    return [a for a in cast("list[Any]", found) if isinstance(a, dict)] if isinstance(found, list) else []


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except (OSError, ValueError):
        return {}


def _read_text(path: Path) -> str:
    try:
        return read_text(path, errors="replace").rstrip()
    except OSError:
        return ""
