"""Reading the files that schedules, costs and measurements are kept in."""

from pathlib import Path


def read_text(path: str | Path) -> str:
    """The text of a file, in UTF-8.

    Raises:
        ValueError: It is a folder, a pipe or a device: reading it could wait, or go on, for ever. Or it is no text.
        OSError: It cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder, a pipe or a device. Give a file; write to one what a pipe would bring.")
    return path.read_text(encoding="utf-8")
