"""What lies in a run's folder, and its life: begin, resume, end.

    runs/NAME/config.toml     the resolved configuration
              run.json        versions, command, device, times, status
              layout.txt      which rank does what
              metrics.jsonl   one line a step
              checkpoints/    step-*/, each valid or not there
              logs/           what each rank printed
              report.html     the run on one page

No torch: the command line and the report use it.
"""

import datetime
import json
import platform
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from titan_train.config import Config, dump_config, parse_config

_PACKAGES = ("titan-train", "titan-mesh", "titan-fsdp", "titan-ckpt", "torch", "numpy")


def run_folder(config: Config) -> Path:
    """The folder of the run that ``config`` describes."""
    return Path(config.run.dir) / config.run.name


def begin_run(config: Config, run_dir: Path, *, world_size: int, device: str) -> list[str]:
    """Write ``config.toml`` and ``run.json`` for a run that starts or resumes.

    Returns:
        What changed since the run was last started, one ``key: old -> new`` a line; empty for a new run.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "config.toml"
    text = dump_config(config)
    before = file.read_text(encoding="utf-8") if file.exists() else text
    changes = _differences(tomllib.loads(before), tomllib.loads(text))
    file.write_text(text, encoding="utf-8")
    facts: dict[str, Any] = {
        "name": config.run.name,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "status": "running",
        "started": _now(),
        "ended": None,
        "world_size": world_size,
        "device": device,
        "host": platform.node(),
        "python": platform.python_version(),
        "git_commit": _git_commit(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    write_facts(run_dir, facts)
    return changes


def end_run(run_dir: Path, status: str) -> None:
    """Record how the run ended: ``completed``, ``stopped`` or ``failed``."""
    facts = read_facts(run_dir)
    facts.update(status=status, ended=_now())
    write_facts(run_dir, facts)


def read_config(run_dir: Path) -> Config:
    """The resolved configuration that a run was started with.

    Raises:
        ValueError: ``run_dir`` is not a run's folder.
    """
    file = run_dir / "config.toml"
    if not file.is_file():
        raise ValueError(f"{run_dir} is not a run's folder: it has no config.toml. Name a folder that `titan-train run` made.")
    return parse_config(tomllib.loads(file.read_text(encoding="utf-8")), source=str(file))


def newest_checkpoint(run_dir: Path) -> int | None:
    """The step of the newest finished checkpoint: its manifest is written last. None if there is none."""
    steps = [int(p.parent.name.removeprefix("step-")) for p in (run_dir / "checkpoints").glob("step-*/MANIFEST.json")]
    return max(steps, default=None)


def read_facts(run_dir: Path) -> dict[str, Any]:
    """The contents of ``run.json``."""
    return json.loads((run_dir / "run.json").read_text(encoding="utf-8"))


def write_facts(run_dir: Path, facts: dict[str, Any]) -> None:
    """Write ``run.json``, whole or not at all."""
    unfinished = run_dir / "run.json.tmp"
    unfinished.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(run_dir / "run.json")


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys: list[str] = sorted({*old, *new})
        return [
            line
            for key in keys
            for line in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)  # pyright: ignore[reportUnknownArgumentType]
        ]
    return [] if old == new else [f"{path}: {old} -> {new}"]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the working directory, if it is a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
