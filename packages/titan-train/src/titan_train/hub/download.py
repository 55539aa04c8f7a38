"""Load files of a repository: resumed where a transfer stopped, and compared with the hashes that the hub states.

The branch or tag is resolved to a commit first, so that all files are of one. `download.json` is written last: a folder
without it is unfinished, and the same command finishes it. Calls that choose other files of the same repository add to a folder,
one call at a time: what each chose is in `.parts/wanted.json` until all of it is there.
"""

import contextlib
import hashlib
import importlib
import io
import json
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from titan_train.files import PARTS_NAME, open_file, read_text, write_atomic
from titan_train.hub.choose import Part, RepoFile, choose_data_files, choose_model_files
from titan_train.lazy import require
from titan_train.terminal import first_line

RECORD_NAME = "download.json"
_WANTED_NAME = "wanted.json"
_CHUNK_BYTES = 2**20
_TRANSFERS = 4
"""Files on their way at a time."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Downloaded:
    """What was loaded."""

    folder: Path
    repository: str
    """Its name, with ``datasets/`` before that of a data set."""
    commit: str
    files: tuple[RepoFile, ...]
    """With the sha256 of each."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def download(
    repository: str,
    out: str | Path,
    *,
    revision: str | None = None,
    parts: Sequence[Part] = ("weights", "tokenizer", "config"),
    include: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> Downloaded:
    """Load what training needs of a repository into a folder.

    Args:
        repository: ``ORG/NAME`` of a model, ``datasets/ORG/NAME`` of a data set; ``hf:`` may stand before it.
        out: The folder; files that are there and whole are kept.
        revision: Branch, tag or commit; None takes the main branch.
        parts: What to load of a model.
        include: Globs of further files of a model, or of the only files of a data set.
        tell: Called with lines about the progress.

    Raises:
        ValueError: If there is no such repository, it lacks what was asked for, or a file differs from its hash.
        RuntimeError: If the hub cannot be reached, or a transfer broke off.
    """
    hub = require("huggingface_hub", extra="hf", purpose="a download")
    name = repository.removeprefix("hf:")
    is_data = name.startswith("datasets/")
    repo_id, repo_type = name.removeprefix("datasets/"), "dataset" if is_data else "model"
    out = Path(out)
    _check_folder(out, name)
    info: Any = _asked(
        name, lambda: hub.HfApi().repo_info(repo_id, repo_type=repo_type, revision=revision, files_metadata=True)
    )
    listed = [_as_file(sibling) for sibling in info.siblings or ()]
    chosen = choose_data_files(listed, include) if is_data else choose_model_files(listed, list(parts), include)

    def transfer_of(file: RepoFile, errors: Sequence[BaseException]) -> Callable[[Path], None]:
        url = hub.hf_hub_url(repo_id, file.name, repo_type=repo_type, revision=info.sha)
        return lambda part: _transfer(hub, url, file.size, part, errors)

    with _alone(out, tell):
        return _load_chosen(out, name, info.sha, listed, chosen, tell, transfer_of)


def _load_chosen(
    out: Path,
    name: str,
    commit: str,
    listed: Sequence[RepoFile],
    chosen: Sequence[RepoFile],
    tell: Callable[[str], None],
    transfer_of: Callable[[RepoFile, Sequence[BaseException]], Callable[[Path], None]],
) -> Downloaded:
    """Load what is missing of the chosen files. The first error, or Ctrl-C, ends the other transfers."""
    others = _others(out, _check_folder(out, name), f"{name} at {commit[:12]}", commit, listed, chosen, tell)
    total = sum(file.size for file in chosen)
    _check_space(out, sum(max(0, file.size - _have(out, file)) for file in chosen))
    _write_record(out / PARTS_NAME / _WANTED_NAME, name, commit, [*chosen, *others])
    (out / RECORD_NAME).unlink(missing_ok=True)  # unfinished until everything was compared again
    tell(f"{name} at {commit[:12]}: {len(chosen)} files, {total / 1e6:,.1f} MB")
    errors: list[BaseException] = []

    def load(file: RepoFile) -> RepoFile:
        _refuse_after(errors)
        try:
            return _asked(name, lambda: _load(out, file, transfer_of(file, errors), errors))
        except BaseException as err:
            errors.append(err)
            raise

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        loads = [pool.submit(load, file) for file in chosen]
        try:
            checked = tuple(one.result() for one in loads)
        except BaseException as err:
            errors.append(err)
            pool.shutdown(wait=False, cancel_futures=True)
            raise errors[0] from errors[0].__cause__  # because of it the others ended
    if missing := [file.name for file in others if not (out / file.name).is_file()]:
        tell(
            f"{out} still lacks {_some(missing)} of a download that broke off. Run that command again; to do without, remove "
            f"{out / PARTS_NAME} and run this one again."
        )
    else:
        _write_record(out / RECORD_NAME, name, commit, [*checked, *others])
        shutil.rmtree(out / PARTS_NAME, ignore_errors=True)
    return Downloaded(out, name, commit, checked)


@contextlib.contextmanager
def _alone(folder: Path, tell: Callable[[str], None]) -> Generator[None]:
    """Inside, no other process or thread loads into the folder, where the system and the file system have locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # not on Windows

            lock = os.open(folder, os.O_RDONLY)  # of the folder itself: no file is left
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(f"waiting for another command that loads into {folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _refuse_after(errors: Sequence[BaseException]) -> None:
    if errors:
        raise InterruptedError("ended because another file could not be loaded")


def _asked(name: str, question: Callable[[], Result]) -> Result:
    """Ask the hub; its errors become ValueError and RuntimeError."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        return question()
    except errors.GatedRepoError as err:
        raise ValueError(
            f"{name} is open only to accounts that accepted its terms. Accept them on its page, then set HF_TOKEN."
        ) from err
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as err:
        raise ValueError(f"{name}: {first_line(err)}") from err
    except ValueError:
        raise
    except Exception as err:  # of the HTTP library, whichever the hub's library uses
        raise RuntimeError(
            f"{name} could not be loaded ({type(err).__name__}: {first_line(err)}). Check the network and HF_ENDPOINT; the "
            "same command continues where it stopped."
        ) from err


def _as_file(sibling: Any) -> RepoFile:
    large = sibling.lfs or {}
    sha = large.get("sha256") if isinstance(large, dict) else large.sha256
    return RepoFile(sibling.rfilename, sibling.size or 0, sha or "", sibling.blob_id or "")


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What earlier calls loaded into a folder, or began to load."""

    commit: str
    """Of what is recorded; empty without a record."""
    files: dict[str, str]
    """The sha256 of each, by name; empty where it is not recorded."""


def _check_folder(out: Path, name: str) -> _Earlier:
    """Refuse a folder of another repository; what earlier calls chose of this one."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder. Name another with --out.")
    commit, files = "", dict[str, str]()
    for path in (out / PARTS_NAME / _WANTED_NAME, out / RECORD_NAME):
        try:
            record: Any = json.loads(read_text(path))
            repository, at = str(record["repository"]), str(record.get("commit"))
            named = {str(file["name"]): str(file["sha256"]) for file in record.get("files", ())}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # no record, or a damaged one: every file is compared again
        if repository != name:
            raise ValueError(f"{out} holds {repository}, not {name}. Name another folder with --out.")
        if path.name == RECORD_NAME:
            commit, files = at, files | {file: sha256 for file, sha256 in named.items() if (out / file).is_file()}
        else:
            files = dict.fromkeys(named, "")
    return _Earlier(commit, files)


def _others(
    out: Path,
    earlier: _Earlier,
    what: str,
    commit: str,
    listed: Sequence[RepoFile],
    chosen: Sequence[RepoFile],
    tell: Callable[[str], None],
) -> list[RepoFile]:
    """Files that earlier calls chose and this one does not, with the sha256 of those that are there.

    Raises:
        ValueError: One that is there is not in the repository, or is another one there.
    """
    if left := [name for name in set(earlier.files) - {file.name for file in listed} if (out / name).is_file()]:
        raise ValueError(
            f"{out} holds {_some(left)} of an earlier commit, which {what} no longer has: both would be read. Remove what is "
            "old, or name another folder with --out."
        )
    found: list[RepoFile] = []
    unsure: list[RepoFile] = []
    mine = {file.name for file in chosen}
    for file in listed:
        path = out / file.name
        if file.name not in earlier.files or file.name in mine:
            continue
        if not path.is_file():
            found.append(file)
        elif earlier.commit == commit and earlier.files[file.name] and path.stat().st_size == file.size:
            found.append(replace(file, sha256=earlier.files[file.name]))
        else:
            unsure.append(file)
    if unsure:
        tell(f"comparing {len(unsure)} files of earlier calls, {sum(file.size for file in unsure) / 1e6:,.1f} MB")
    compared = {file.name: _if_whole(out / file.name, file) for file in unsure}
    found += [whole for whole in compared.values() if whole]
    if changed := [name for name, whole in compared.items() if not whole]:
        raise ValueError(
            f"{out} holds {_some(changed)} of another commit or damaged: it is not that of {what}, and files of both would lie "
            "side by side. Load it anew in the same command, name its commit with --revision, or another folder with --out."
        )
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (" and others" if len(names) > 3 else "")


def _write_record(path: Path, repository: str, commit: str, files: Sequence[RepoFile]) -> None:
    listed = sorted(files, key=lambda file: file.name)
    record = {
        "repository": repository,
        "commit": commit,
        "files": [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in listed],
    }
    write_atomic(path, json.dumps(record, indent=1) + "\n", sync=True)


def _check_space(out: Path, size: int) -> None:
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise ValueError(
            f"{existing} has {free / 1e9:.1f} GB free, but what is missing of the files takes {size / 1e9:.1f} GB. Name a folder "
            "on another disk."
        )


def _part(folder: Path, file: RepoFile) -> Path:
    """Where a transfer is collected. Named by its content: what is left of another version is never continued."""
    content = f"{file.name} {file.size} {file.sha256} {file.blob}"
    return folder / PARTS_NAME / hashlib.sha256(content.encode()).hexdigest()[:32]


def _have(folder: Path, file: RepoFile) -> int:
    """Bytes of a file that are in the folder already: all of them, by its size, or those of a transfer that broke off."""
    path, part = folder / file.name, _part(folder, file)
    if path.is_file() and path.stat().st_size == file.size:
        return file.size
    return part.stat().st_size if part.is_file() else 0


def _load(folder: Path, file: RepoFile, transfer: Callable[[Path], None], errors: Sequence[BaseException]) -> RepoFile:
    """The file with its sha256, transferred unless it is there, and compared with the hash that the hub states."""
    path = folder / file.name
    if path.is_file() and (found := _if_whole(path, file, errors)) is not None:
        return found
    part = _part(folder, file)
    part.parent.mkdir(parents=True, exist_ok=True)
    transfer(part)
    found = _if_whole(part, file, errors)
    if found is None:
        part.unlink()
        raise ValueError(
            f"{file.name} does not have the hash {(file.sha256 or file.blob)[:16]} that the hub states: it changed on the "
            "way, and was removed. Run the command again."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part.replace(path)
    return found


class _PartFile(io.BufferedWriter):
    """Appends to a file until there are errors."""

    def __init__(self, path: Path, errors: Sequence[BaseException]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._errors = errors

    def write(self, content: Any) -> int:
        _refuse_after(self._errors)
        return super().write(content)


def _transfer(hub: Any, url: str, size: int, part: Path, errors: Sequence[BaseException]) -> None:
    """Append what is missing of a file; end where there are ``errors`` of others."""
    from huggingface_hub.file_download import http_get

    with _PartFile(part, errors) as file:
        have = file.tell()
        if have > size:
            file.truncate(0)
            have = 0
        if have < size:
            http_get(url, file, resume_size=have, headers=hub.utils.build_hf_headers(), expected_size=size)


def _if_whole(path: Path, file: RepoFile, errors: Sequence[BaseException] = ()) -> RepoFile | None:
    """The file with its sha256 if its content is the one that the hub states; ends where there are ``errors`` of others."""
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with open_file(path) as content:
        while chunk := content.read(_CHUNK_BYTES):
            _refuse_after(errors)
            sha256.update(chunk)
            git.update(chunk)
    found, stated = (sha256.hexdigest(), file.sha256) if file.sha256 else (git.hexdigest(), file.blob)
    if path.stat().st_size != file.size or found != stated:
        return None
    return RepoFile(file.name, file.size, sha256.hexdigest(), file.blob)
