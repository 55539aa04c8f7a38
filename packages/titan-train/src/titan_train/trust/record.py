"""Remember which code a run was started with, so that its owner is not asked again.

The record lies in the user's own state folder, one file per run folder: a folder made elsewhere cannot bring its own.
It holds a hash of the source. After a change of the source, or of the folder's place, the user is asked once more.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any, cast

from titan_train.files import open_file, parse_json, read_bytes, read_text, write_atomic
from titan_train.trust.factory import find_code, names_code, use_code, use_package_of
from titan_train.trust.owner import SOURCE_ONLY, listed


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """The code that a run was started with."""

    model: str
    """``model.name``."""
    paths: tuple[str, ...]
    """Folders and packages given with ``--code``."""
    sha256: str
    """Of the source: every module of the package, in Python or compiled, or the file and those beside it in a folder of
    ``--code``."""


def admit_own_code(run_dir: Path, model_name: str, paths: Sequence[str]) -> CodeRecord | None:
    """Admit the code that a configuration names, for ``titan-train run`` and what rehearses it.

    Args:
        run_dir: The run's folder. If this account started the run with ``--code``, those folders are used again.
        model_name: ``model.name``.
        paths: Of ``--code``.

    Returns:
        What `remember_code` takes; None if the model is one of titan_train's.

    Raises:
        ValueError: The code was not named, or it has changed since the run was started and no ``--code`` was given.
    """
    named = use_code(paths)
    if not names_code(model_name):
        return None
    known = _recall(run_dir)
    if not named and known is not None and known.model == model_name and known.paths:
        named = use_code(known.paths)
        if _source_hash(model_name, named) != known.sha256:
            raise ValueError(
                f"the code of model.name={model_name!r} in {', '.join(named)} has changed since {run_dir} was last started. "
                f"Name it again to go on with it: {' '.join(f'--code {name}' for name in named)}."
            )
    return CodeRecord(model_name, named, _source_hash(model_name, named))


def admit_run_code(run_dir: Path, model_name: str, *, trust: bool, paths: Sequence[str] = ()) -> None:
    """Admit the code that a run's folder names, for commands that load the run.

    Args:
        run_dir: The run's folder.
        model_name: ``model.name`` of its configuration.
        trust: The user gave ``--trust-code``: the code is admitted, and remembered.
        paths: Of ``--code``. Without them, those that this account ran the folder with before, or the installed package.

    Raises:
        ValueError: The code may not be imported; or this account has not run the folder with this very code.
    """
    named = use_code(paths)
    if not names_code(model_name):
        return
    known = _recall(run_dir)
    if trust:
        if not named and known is not None and known.model == model_name:
            named = use_code(known.paths)
        named = named or use_package_of(model_name)
        remember_code(run_dir, CodeRecord(model_name, named, _source_hash(model_name, named)))
        return
    if known is None or known.model != model_name:
        raise ValueError(
            f"{run_dir} was made elsewhere, and its model.name={model_name!r} is code that is not part of titan_train. Read "
            "that code and what model.args gives it, then add --trust-code (and --code DIR where it is not installed)."
        )
    use_code(known.paths)
    if _source_hash(model_name, known.paths) != known.sha256:
        raise ValueError(
            f"the code of model.name={model_name!r} has changed since {run_dir} was last started. Add --trust-code to use it "
            "as it is now."
        )


def admit_machine_code(folder: Path, file: Path, *, trust: bool) -> None:
    """Admit a file of an exported folder that holds machine code, which no reader could check.

    Args:
        folder: The exported folder.
        file: Its file.
        trust: The user gave ``--trust-code``: the file is admitted, and remembered.

    Raises:
        ValueError: This account has not exported this very file to this folder.
    """
    if trust:
        remember_machine_code(folder, file)
        return
    known = _recall(folder)
    if known is None or known.model != file.name or _hash_of(file) != known.sha256:
        raise ValueError(
            f"{file} is machine code, and this account did not export it: loading it could do anything. Add --trust-code if "
            "you trust where it comes from, or export the run to another target."
        )


def remember_machine_code(folder: Path, file: Path) -> None:
    """Write the record of an exported file with machine code. Best effort, as `remember_code`."""
    remember_code(folder, CodeRecord(file.name, (), _hash_of(file)))


def remember_code(run_dir: Path, record: CodeRecord | None) -> None:
    """Write the record of a run. Best effort: without it the user is asked again."""
    if record is not None:
        with contextlib.suppress(OSError):
            write_atomic(_file(run_dir), json.dumps(asdict(record) | {"run": str(run_dir.resolve())}, indent=1) + "\n")


def remember_named_code(run_dir: Path, model_name: str) -> None:
    """`remember_code` of what was named to `use_code` in this process: the record of a run that a program makes."""
    if names_code(model_name):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            named = tuple(listed(SOURCE_ONLY))
            remember_code(run_dir, CodeRecord(model_name, named, _source_hash(model_name, named)))


def _recall(run_dir: Path) -> CodeRecord | None:
    try:
        values: Any = parse_json(read_text(_file(run_dir)))
        if values["run"] != str(run_dir.resolve()):
            return None
        return CodeRecord(str(values["model"]), tuple(map(str, cast("list[Any]", values["paths"]))), values["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file(run_dir: Path) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    key = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:32]
    return Path(state) / "titan-train" / "code" / f"{key}.json"


def _hash_of(file: Path) -> str:
    with open_file(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _source_hash(model_name: str, paths: Sequence[str]) -> str:
    """sha256 (hex) of what Python could import, by paths below the folder that holds it."""
    found = hashlib.sha256()
    for place in find_code(model_name):
        root, files = place.parent, [place]
        if place.is_dir():
            files = _files_below(place)
        elif str(root) in paths:
            files = root.glob("*")
        for file in sorted(file for file in files if _importable(file)):
            found.update(f"{file.relative_to(root)}\0{hashlib.sha256(read_bytes(file)).hexdigest()}\n".encode())
    return found.hexdigest()


def _files_below(place: Path) -> Iterator[Path]:
    """The files of a folder and of those in it, also through links, which an import follows; each folder once."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(place, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (Path(folder, file) for file in files)


def _importable(file: Path) -> bool:
    return file.name.endswith(tuple(all_suffixes())) and file.parent.name != "__pycache__" and file.is_file()
