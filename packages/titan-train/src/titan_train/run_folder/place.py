"""Whether a run can use its folder: looked at before ranks are started for it. Nothing is written."""

import os
from pathlib import Path

_FOLDERS = (
    "checkpoints", "failures", "faults", "hangs", "logs", "model", "samples", "set_aside", "staged", "tensorboard",
    "tokenizer", "traces",
)  # fmt: skip
_FILES = (
    "attempts.jsonl", "config.toml", "layout.txt", "lease.json", "metrics.blocks.jsonl", "metrics.jsonl", "metrics.prom",
    "mlflow_run_id", "pipeline.json", "report.html", "run.json", "trackio_run_name", "wandb_run_id",
)  # fmt: skip

_WRITTEN = ("logs/*", "hangs/*/*", "traces/*")
"""Files in folders that are written in place. All others are new, or replaced whole."""


def check_run_folder(run_dir: Path) -> None:
    """Refuse a folder that a run cannot write to, or in which something of another kind has the name of what it writes.

    Raises:
        ValueError: It cannot be used; the message names the file.
    """
    check_writable(run_dir, "run.dir and run.name")
    if not run_dir.exists():
        return
    for name in _FOLDERS:
        path = run_dir / name
        if path.is_dir():
            check_writable(path, "run.dir and run.name")
        elif path.exists() and not path.is_symlink():
            raise ValueError(_wrong_kind(path, "not a folder", "a folder"))
    for name in _FILES:
        path = run_dir / name
        if path.is_dir():
            raise ValueError(_wrong_kind(path, "a folder", "a file"))
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise ValueError(f"{path} cannot be read and written by this user. Change its owner or its mode.")
    # a run appends to its files and cuts them: through a link it would do so to a file elsewhere
    for path in (*run_dir.iterdir(), *(path for files in _WRITTEN for path in run_dir.glob(files))):
        if path.is_symlink() and not path.is_dir():
            raise ValueError(
                f"{path} is a link to {path.readlink()}, and a run would write to that file. Replace the link by a copy, "
                "or give another --run.name. Folders may be links."
            )


def check_writable(folder: Path, setting: str) -> None:
    """Refuse a folder that cannot be written, or made where it does not exist yet.

    Args:
        folder: Which.
        setting: What names it, for the message.

    Raises:
        ValueError: It is a file, lies below one, or this user may not write there.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ValueError(
            f"{setting}: {folder} cannot be a folder: {there} is {'a link to nothing' if there.is_symlink() else 'a file'}."
        )
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        made = "" if there == folder.absolute() else f", where {folder} would be made"
        raise ValueError(
            f"{setting}: this user may not write to {there}{made}. Choose another folder, or change its mode."
        )


def _wrong_kind(path: Path, found: str, wanted: str) -> str:
    return f"{path} is {found}, but a run keeps {wanted} under this name. Move it away, or choose another run.name."
