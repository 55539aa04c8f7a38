"""What a checkpoint relies on is on the disk before the checkpoint counts.

A finished checkpoint survives a power cut; what was written beside it and never synced may not: metrics of steps that no resume
makes again would be missing, or a configuration without which no checkpoint can be read.
"""

import contextlib
import os
from pathlib import Path

_FOLDERS = ("", "tokenizer", "model")


def sync_run_folder(run_dir: Path) -> None:
    """Bring a run's own files to the disk: metrics, configuration, journal, tokenizer. Call it before a checkpoint is saved.

    Raises:
        OSError: The disk does not take a file.
    """
    for folder in (run_dir / name for name in _FOLDERS):
        if not folder.is_dir():
            continue
        for path in (*(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")), folder):
            with contextlib.suppress(
                FileNotFoundError, PermissionError
            ):  # another process's: gone, or none that we may read
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
