"""Processes that this one starts: what they must not inherit, and the temporary folders that a killed one leaves behind.

Temporary folders name their owner, so that those of killed processes are swept by the next one that makes some. A folder is
swept only where its owner is proven gone: by the process table where its number is valid here, or, for an owner of this host,
by the machine's start. A folder that names no owner, or one of another host or container, stays.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

from titan_ckpt import Process

from titan_train.files import parse_json, read_text

_OWNER = ".owner"


@contextlib.contextmanager
def without_working_directory() -> Generator[None]:
    """Keep Python processes that start in the block from importing what lies in the working directory.

    multiprocessing starts ``python -c``, which looks there first: a ``random.py`` beside a configuration would be run.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextlib.contextmanager
def interrupts_blocked() -> Generator[None]:
    """What starts inside, and its children, never see Ctrl-C, which a terminal sends to all of them: it is for this process."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which would unblock the signal once more
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def owned_folder(prefix: str, parent: Path | None = None) -> Path:
    """Make a folder of this process, and remove those of the same prefix whose owners are gone.

    Args:
        prefix: How its name begins.
        parent: Where; the system's temporary folder by default.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _sweep(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        (folder / _OWNER).write_text(json.dumps(asdict(Process.of(os.getpid()))), encoding="utf-8")
    except OSError:  # nobody would ever sweep it
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _sweep(parent: Path, prefix: str) -> None:
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if (
                    folder.is_dir()
                    and not folder.is_symlink()
                    and folder.stat().st_uid == os.getuid()
                    and _gone(folder)
                ):
                    shutil.rmtree(folder, ignore_errors=True)


def _gone(folder: Path) -> bool:
    file = folder / _OWNER
    owner = Process.decode(parse_json(read_text(file)))
    if owner.local:
        return not owner.alive
    return owner.host == platform.node() and before_this_boot(file.stat().st_mtime, time.time())


def before_this_boot(touched: float, now: float) -> bool:
    """Whether a file that was touched then is older than this machine's start; both in Unix seconds of one clock."""
    return touched < now - time.clock_gettime(time.CLOCK_BOOTTIME)
