"""`run.json`: what was run, where, with which versions, and how it ended. One entry for every attempt.

A run that is killed cannot say so. Its attempt stays "running" in the file, and the next attempt of the same run
marks it "killed", with what the supervisor's journal says of its end, if there was a supervisor.
"""

import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from titan_train.config.patterns import with_orders
from titan_train.files import parse_json, read_text, write_atomic

FILE_NAME = "run.json"
_JOURNAL = "attempts.jsonl"
Span = tuple[int, dict[str, Any]]
"""The step after which settings hold, and their values by dotted name."""
Status = Literal["finished", "stopped", "failed"]
_COMPARED = (
    "torch", "titan-train", "titan-mesh", "titan-fsdp", "titan-pipeline", "titan-ckpt", "titan-cp", "titan-fp8",
)  # fmt: skip


def versions() -> dict[str, str]:
    """The packages whose versions must be the same on every machine of a run, with those that are installed here.

    That of torch is without the label of its build, such as ``+cu128``: of one and the same build only some wheels have it.
    """
    found = _versions_of(*_COMPARED)
    return {name: version.partition("+")[0] if name == "torch" else version for name, version in found.items()}


class RunInfo:
    """Writes the current attempt into ``run.json``. For one process only."""

    def __init__(
        self,
        run_dir: str | Path,
        *,
        device: str,
        world_size: int,
        resume_step: int = 0,
        parameters: int | None = None,
        command: Sequence[str] | None = None,
        staged: Path | None = None,
        **extra: object,
    ) -> None:
        """Record that an attempt starts now.

        Args:
            run_dir: The run's folder; made if missing.
            device: Name of the device of each rank, such as ``"NVIDIA H200"`` or ``"cpu"``.
            world_size: Number of ranks.
            resume_step: The step this attempt continues from; 0 also forgets earlier attempts.
            parameters: Parameters of the model.
            command: What was typed; the default is this process's own.
            staged: A folder where ``run.json`` waits until the attempt takes effect; None writes it into ``run_dir``.
            extra: More JSON values worth keeping, such as ``backend="gloo"``.
        """
        self._run_dir = Path(run_dir)
        attempts: list[dict[str, Any]] = read_run_info(run_dir).get("attempts", []) if resume_step else []
        for attempt in attempts:
            if attempt.get("status") == "running":
                attempt |= _lost(self._run_dir, attempt)
        attempt: dict[str, Any] = {
            "status": "running",
            "started": _now(),
            "ended": None,
            "from_step": resume_step,
            "to_step": None,
            "world_size": world_size,
            "error": None,
        }
        info: dict[str, Any] = {
            "name": Path(run_dir).resolve().name,
            "command": list(command) if command is not None else [Path(sys.argv[0]).name, *sys.argv[1:]],
            "device": device,
            "world_size": world_size,
            "parameters": parameters,
            **extra,
            "host": platform.node(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "git_commit": _git_commit(),
            "versions": {"python": platform.python_version(), **versions(), **_versions_of("torch", "numpy")},
            "attempts": [*attempts, attempt],
        }
        self._started = attempt["started"]
        _write(staged or self._run_dir, info)

    @classmethod
    def running(cls, run_dir: str | Path) -> "RunInfo":
        """The attempt that another process recorded and left running."""
        info = cls.__new__(cls)
        info._run_dir = Path(run_dir)
        attempts: list[dict[str, Any]] = read_run_info(run_dir).get("attempts", [])
        info._started = attempts[-1].get("started") if attempts else None
        return info

    def finish(self, status: Status, *, step: int, error: str | None = None) -> None:
        """Record how the attempt ended, if it took effect; only the first call counts.

        Args:
            status: ``finished`` (all steps made), ``stopped`` (asked to, and saved) or ``failed``.
            step: Steps made.
            error: One line that says why it failed.
        """
        info = read_run_info(self._run_dir)
        attempts: list[dict[str, Any]] = info.get("attempts", [])
        running = [attempt for attempt in attempts if attempt.get("status") == "running"]
        for attempt in running:  # an earlier one was lost, and this one may not have taken effect
            attempt |= _lost(self._run_dir, attempt)
        if running and running[-1].get("started") == self._started:
            running[-1].update(status=status, ended=_now(), to_step=step, error=error)
        if running:
            _write(self._run_dir, info)


def add_run_info(run_dir: str | Path, **fields: object) -> None:
    """Add to ``run_dir/run.json`` what is known only later, such as the model's parameters or the GPU's name.

    The process that started the run makes the file; one rank may add to it.

    Args:
        run_dir: The run's folder.
        fields: JSON values; they replace what is there under the same name.
    """
    _write(Path(run_dir), {**read_run_info(run_dir), **fields})


def read_run_info(run_dir: str | Path) -> dict[str, Any]:
    """The content of ``run_dir/run.json``; empty if it is missing or not readable."""
    try:
        content: object = parse_json(read_text(Path(run_dir) / FILE_NAME))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def read_ends(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``attempts.jsonl``, one for each attempt that ended; empty for a run without a supervisor."""
    try:
        raw = (run_dir / _JOURNAL).read_bytes()
    except OSError:
        return []
    lines: list[dict[str, Any]] = []
    for text in raw.splitlines():
        try:
            line = parse_json(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and "end" in line:
            lines.append(line)
    return lines


def began_at(attempt: Mapping[str, Any]) -> float:
    """When an attempt of ``run.json`` started, in Unix seconds; infinity where it does not say."""
    try:
        return datetime.fromisoformat(attempt["started"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.inf


def settings_spans(info: Mapping[str, Any]) -> list[Span]:
    """What ``run.json`` says of the settings, in step order; empty for a run of an older version."""
    found: list[Span] = []
    entries = info.get("settings")
    for entry in cast("list[Any]", entries) if isinstance(entries, list) else []:
        match entry:
            case {"after_step": int(step), "values": dict(values)}:
                found.append((step, with_orders(cast("dict[str, Any]", values))))
            case _:
                continue
    return sorted(found, key=lambda span: span[0])


def parent_of(info: Mapping[str, Any]) -> tuple[str, int] | None:
    """The run that a run branched from, and at which step; None if it did not."""
    match info.get("parent"):
        case {"run": str(run), "step": int(step)}:
            return run, step
        case _:
            return None


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Settings with other values: ``[before, now]`` by dotted name; None is the default."""
    keys = sorted({*before, *now})
    return {key: [before.get(key), now.get(key)] for key in keys if before.get(key) != now.get(key)}


def record_early_stop(run_dir: Path, step: int, patience: int) -> None:
    """Record that a run ended at ``step`` because ``validation.patience`` had run out. In rank 0."""
    add_run_info(run_dir, early_stop={"step": step, "patience": patience})


def stopped_early(run_dir: Path, patience: int) -> int | None:
    """The step at which a run stopped early; None if it did not, or ``patience`` allows more validations now."""
    match read_run_info(run_dir).get("early_stop"):
        case {"step": int(step), "patience": int(had)} if 0 < patience <= had:
            return step
        case _:
            return None


def _lost(run_dir: Path, attempt: Mapping[str, Any]) -> dict[str, Any]:
    """How an attempt ended that could not say so: by the first line that its supervisor wrote after its start."""
    began = began_at(attempt)
    for end in read_ends(run_dir):
        match end:
            case {"time": int(time) | float(time), "end": str(text)} if began <= time < 2**33:
                step, asked = end.get("to_step"), text in ("stopped", "finished")
                return {
                    "status": text if asked else "killed",
                    "ended": datetime.fromtimestamp(time, UTC).isoformat(),
                    "to_step": step if isinstance(step, int) else None,
                    "error": None if asked else text,
                }
            case _:
                continue
    return {"status": "killed"}


def _write(run_dir: Path, info: dict[str, Any]) -> None:
    write_atomic(run_dir / FILE_NAME, json.dumps(info, indent=2) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _versions_of(*names: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    """Commit of the working directory's repository; None without git.

    It ends with ``+changes`` if files differ from it, with ``+unknown`` if git does not say so in time.
    """
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run([git, *arguments], capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changes = ask("status", "--porcelain", "--untracked-files=no")
    return commit + ("+unknown" if changes is None else "+changes" if changes else "")
