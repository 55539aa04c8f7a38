"""The error of a failing rank, reported once.

When one rank raises, its peers fail a moment later inside a collective. Each failing rank writes a small JSON file;
whoever reports shows the cause only, with its rank. A mistake of the user's (ValueError) is shown as its
message; anything else with its traceback.
"""

import contextlib
import json
import re
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_train.files import parse_json, write_atomic

# ValueErrors that a damaged file causes, not a setting
_DAMAGE = (UnicodeError, json.JSONDecodeError)
# torch's and gloo's errors about peers, stores and networks: RuntimeErrors, known by class name or text
_NETWORK = re.compile(r"gloo|nccl|store|connect|socket|network|timed out|closed by peer", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """What one rank failed with."""

    rank: int
    time_s: float
    """Seconds since the epoch."""
    kind: str
    """The exception's class name."""
    message: str
    traceback: str
    users_mistake: bool
    """A ValueError: the message says what to change, a traceback would hide it."""
    in_step: bool = False
    """A step had begun: the ranks had met, built the model and restored."""
    from_world: bool = False
    """The disk or the network failed, which may pass: the same error again does not mean that the program is wrong."""


def clear_failures(run_dir: Path) -> None:
    """Forget the failures of an earlier attempt."""
    for file in _folder(run_dir).glob("rank-*.json"):
        file.unlink(missing_ok=True)


def write_failure(run_dir: Path, rank: int, error: BaseException, *, trained: bool = False) -> Failure:
    """Record ``error`` as the failure of ``rank``. The file appears whole or not at all.

    Args:
        run_dir: The run's folder; where it cannot be written, the launcher sees the exit code only.
        rank: Which rank failed.
        error: What it failed with.
        trained: Whether the rank had begun a step. From then on the user's input has been validated, so a
            ValueError is a defect or damage, not a mistake of the user's.
    """
    failure = Failure(
        rank=rank,
        time_s=time.time(),
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        users_mistake=not trained and isinstance(error, ValueError) and not isinstance(error, _DAMAGE),
        in_step=trained,
        from_world=_from_world(error),
    )
    with contextlib.suppress(OSError):
        write_atomic(_folder(run_dir) / f"rank-{rank}.json", json.dumps(asdict(failure)))
    return failure


def first_failure(run_dir: Path) -> Failure | None:
    """The recorded failure that is the cause of the others: the earliest.

    Those of the disk and the network come after all others: a peer's broken connection is a consequence, though the clock of
    its machine may be behind.
    """
    found: list[Failure] = []
    with contextlib.suppress(OSError):  # the disk fails: the exit codes are known still
        for file in sorted(_folder(run_dir).glob("rank-*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # damaged: says nothing
                found.append(_read(parse_json(file.read_text(encoding="utf-8"))))
    return min(found, key=lambda f: (f.from_world, f.time_s)) if found else None


def describe_failure(failure: Failure, world_size: int) -> str:
    """The error as the user sees it."""
    head = f"rank {failure.rank} of {world_size} failed: {failure.kind}: {failure.message}"
    return head if failure.users_mistake else f"{failure.traceback.rstrip()}\n\n{head}"


def describe_exit(rank: int, world_size: int, code: int | None) -> str:
    """A rank that ended without an error message: killed, or crashed below Python. None: its exit code is unknown."""
    if code is None:
        return f"rank {rank} of {world_size} was lost without an error message"
    if code < 0:
        name = f"signal {-code}"
        with contextlib.suppress(ValueError):  # most real-time signals have no name
            name = signal.Signals(-code).name
        hint = " (often the kernel, out of memory: see `dmesg`)" if name == "SIGKILL" else ""
        return f"rank {rank} of {world_size} was ended by {name}{hint}"
    return f"rank {rank} of {world_size} exited with code {code} without an error message"


def _read(values: Any) -> Failure:
    """A failure from JSON; raises KeyError, TypeError or ValueError if it is not one."""
    return Failure(
        rank=int(values["rank"]),
        time_s=float(values["time_s"]),
        kind=str(values["kind"]),
        message=str(values["message"]),
        traceback=str(values["traceback"]),
        users_mistake=values["users_mistake"] is True,
        in_step=values.get("in_step") is True,
        from_world=values.get("from_world") is True,
    )


def _from_world(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, OSError) or names & {"DistError", "CheckpointError"}:
        return "DamageError" not in names  # damage does not pass
    return isinstance(error, RuntimeError) and _NETWORK.search(str(error)) is not None


def _folder(run_dir: Path) -> Path:
    return run_dir / "failures"
