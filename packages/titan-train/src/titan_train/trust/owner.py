"""Whose code raised an error: the user's, ours, torch's or another library's. Every message that names a culprit asks here."""

import os
import sysconfig
import traceback
from pathlib import Path
from typing import Literal

SOURCE_ONLY = "TITAN_TRAIN_CODE"
"""The environment variable that passes the folders and packages of ``--code`` on to ranks."""
Owner = Literal["user", "titan", "torch", "library"]
_TITAN = frozenset({"titan_mesh", "titan_fsdp", "titan_pipeline", "titan_cp", "titan_fp8", "titan_ckpt", "titan_train"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def owner_of(file: str | Path) -> Owner:
    """Whose a source file is.

    What ``--code`` names is the user's wherever it lies, and so is every file that is neither ours nor part of Python or of an
    installed package. What is no file, such as ``<string>``, counts as a library's.
    """
    path = Path(file)
    parts = frozenset(path.parts)
    if below_code(path) or not parts.isdisjoint(listed(SOURCE_ONLY)):
        return "user"
    if _TITAN & parts:
        return "titan"
    python = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    if path.is_file() and not _INSTALLED & parts and not any(path.is_relative_to(folder) for folder in python):
        return "user"
    return "torch" if "torch" in parts else "library"


def below_code(path: str | Path) -> bool:
    """Whether a path lies below a folder of ``--code``."""
    return any(Path(path).is_relative_to(word) for word in listed(SOURCE_ONLY) if Path(word).is_absolute())


def listed(variable: str) -> list[str]:
    """The words of an environment variable that holds several, as ``PYTHONPATH`` does."""
    return list(filter(None, os.environ.get(variable, "").split(os.pathsep)))


def raised_in(err: BaseException) -> tuple[Owner, Path]:
    """Whose code an error was raised in, and in which file; what an error without a traceback says is a library's."""
    frames = traceback.extract_tb(err.__traceback__)
    file = frames[-1].filename if frames else "<unknown>"
    return owner_of(file), Path(file)


def place_of(err: BaseException) -> tuple[str, bool]:
    """``my_model.py, line 12``, and whether that is the user's code: its newest frame in an error, else the newest of all."""
    frames = traceback.extract_tb(err.__traceback__)
    own = [frame for frame in frames if owner_of(frame.filename) == "user"]
    last = next(reversed(own or frames), None)
    return ("" if last is None else f"{Path(last.filename).name}, line {last.lineno}"), bool(own)


def describe_error(err: BaseException) -> str:
    """``TypeError: unsupported operand (my_model.py, line 12)``: an error of somebody else's code, in one line."""
    place, _ = place_of(err)
    return f"{type(err).__name__}: {' '.join(str(err).split())[:300]}{f' ({place})' if place else ''}"
