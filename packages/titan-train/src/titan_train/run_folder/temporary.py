"""Temporary folders that name their owner, so that those of killed processes are swept by the next one that makes some.

A folder is swept only where its owner is proven gone: by the process table where its number is valid here, or, for an owner of
this host, by the machine's start. What says nothing, or belongs to another host or container, stays.
"""

import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

from titan_train.files import parse_json, read_text
from titan_train.run_folder.processes import before_this_boot, process_place, process_start

_OWNER = ".owner"


def owned_folder(prefix: str, parent: Path | None = None) -> Path:
    """Make a folder of this process, and remove those of the same prefix whose owners are gone.

    Args:
        prefix: How its name begins.
        parent: Where; the system's temporary folder by default.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _sweep(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    owner = {
        "host": platform.node(),
        "place": process_place(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
    }
    (folder / _OWNER).write_text(json.dumps(owner), encoding="utf-8")
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
    owner = parse_json(read_text(file))
    if owner["place"] == process_place():
        return process_start(int(owner["pid"])) != owner["started"]
    return owner["host"] == platform.node() and before_this_boot(file.stat().st_mtime, time.time())
