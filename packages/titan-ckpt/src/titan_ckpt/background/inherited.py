"""Start a saver process, and wait for those whose trainer is gone."""

import os
import sys
import time
from pathlib import Path

from titan_ckpt.steps import claim, listing
from titan_ckpt.storage.paths import StorePath

# How long a new Checkpointer waits for the saver of a killed trainer.
_INHERITED_SAVE_S = 120.0
_SERVER = "titan_ckpt.background.server"


def command(fd: int) -> list[str]:
    """The command of a saver. ``-P``: no imports from the working folder."""
    return [sys.executable, "-P", "-m", _SERVER, str(fd), str(os.getpid())]


def await_inherited(root: StorePath) -> None:
    """Wait for savers whose trainer is gone or is this process: their step is the one to resume from."""
    deadline = time.monotonic() + _INHERITED_SAVE_S
    while time.monotonic() < deadline:
        owners = [claim.owner_of(path) for path in listing.unfinished(root)]
        if not any(owner and owner.local and owner.alive and _inherited(owner.pid) for owner in owners):
            return
        time.sleep(0.05)


def _inherited(pid: int) -> bool:
    """Whether a local process is a saver whose trainer is gone or is this process."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False  # it has just ended
    if len(arguments) < 6 or arguments[3] != _SERVER.encode():
        return False  # a trainer that saves by itself
    return parent == os.getpid() or str(parent).encode() != arguments[5]
