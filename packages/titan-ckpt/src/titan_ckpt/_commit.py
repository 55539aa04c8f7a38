"""The life of a step's folder: unfinished, committed, trash.

Every rank writes into ``.tmp-<step>-<save id>`` and brings its files to disk. Rank 0 then writes the index, the
manifest last, brings the folders to disk, and renames the folder to ``step-<step>``: the one instant at which the step
begins to exist. A save id is random, so a leftover of a crashed save (of another world size, say) can neither be
mistaken for this one nor be committed by it. Saving a step again commits it as the next revision, so that there is no
moment without a valid copy. Deleting renames to ``.trash-*`` first: a half deleted step is not a step.

In a store that cannot rename folders (`titan_ckpt._storage`), a save writes to ``step-<step>.r<revision>.<save id>`` at
once, and the manifest, its last object, is the commit; deleting takes the manifest first.
"""

import contextlib
import datetime as dt
import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_ckpt._errors import DamageError
from titan_ckpt._format import INDEX_NAME, MANIFEST_NAME, parse_step_name, remote_step_name, step_name
from titan_ckpt._index import FileRecord, Index
from titan_ckpt._manifest import Manifest, encode_manifest
from titan_ckpt._retention import Retention
from titan_ckpt._storage import StorePath, remove_tree, renames
from titan_ckpt._write import fsync_folder, write_plain

OWNER_NAME = ".owner.json"
"""Says who makes an unfinished save; gone once it is committed or given up."""

# Unfinished saves of another machine cannot be asked whether they are alive; they are left for a day.
_FOREIGN_AGE_S = 86_400
# Longer than a folder stays without a named owner while it is made.
_NAMELESS_AGE_S = 60


def step_folders(root: StorePath) -> list[tuple[int, StorePath]]:
    """Committed steps, oldest first; of a step saved more than once, the newest revision."""
    newest: dict[int, tuple[int, StorePath]] = {}
    for path in _children(root):
        if not renames(root) and is_unfinished(path):
            continue
        parsed = parse_step_name(path.name)
        if parsed and (parsed[0] not in newest or newest[parsed[0]][0] < parsed[1]):
            newest[parsed[0]] = (parsed[1], path)
    return [(step, newest[step][1]) for step in sorted(newest)]


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some machine, told apart from a later one that gets the same number."""

    host: str
    pid: int
    started: str | None
    """In the kernel's ticks."""

    @classmethod
    def of(cls, pid: int) -> "Process":
        """A process of this machine."""
        return cls(socket.gethostname(), pid, _process_start(pid))

    @property
    def local(self) -> bool:
        """Whether it is of this machine, so that `alive` can tell."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it runs; of another machine, True."""
        return not self.local or (self.started is not None and _process_start(self.pid) == self.started)


def begin_save(root: StorePath, step: int, owner: Process) -> tuple[StorePath, str]:
    """Make the folder of an unfinished save, kept while ``owner`` lives; return it with its save id."""
    save_id = secrets.token_hex(8)
    if renames(root):
        folder = root / f".tmp-{step:08d}-{save_id}"
    else:
        folder = root / remote_step_name(step, _next_revision(root, step), save_id)
    folder.mkdir(parents=True)
    (folder / OWNER_NAME).write_bytes(json.dumps({**asdict(owner), "began": time.time()}).encode())
    return folder, save_id


def commit_save(
    folder: StorePath,
    *,
    step: int,
    save_id: str,
    world_size: int,
    files: Sequence[FileRecord],
    index: Index,
    versions: Mapping[str, str],
    metrics: Mapping[str, float],
) -> StorePath:
    """Turn an unfinished save whose files are on disk into a step.

    Returns:
        The step's folder.

    Raises:
        OSError: If the disk refuses; the step does not exist then, and earlier ones are untouched.
    """
    root = folder.parent
    encoded = index.encode()
    write_plain(folder / INDEX_NAME, encoded)
    manifest = encode_manifest(
        format_version=index.format,
        step=step,
        save_id=save_id,
        world_size=world_size,
        saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        versions=dict(versions),
        metrics=dict(metrics),
        files=files,
        index=encoded,
    )
    for note in list(folder.glob(".*")):  # savers' reports
        if note.name != OWNER_NAME:
            note.unlink()
    if not isinstance(folder, Path):
        write_plain(folder / MANIFEST_NAME, manifest)  # one object, whole or not at all: the commit
        (folder / OWNER_NAME).unlink(missing_ok=True)
        return folder
    assert isinstance(root, Path)
    write_plain(folder / (MANIFEST_NAME + ".part"), manifest)
    (folder / (MANIFEST_NAME + ".part")).rename(folder / MANIFEST_NAME)
    for parent in sorted({(folder / record.name).parent for record in files} | {folder}, reverse=True):
        fsync_folder(parent)
    final = root / step_name(step, _next_revision(root, step))
    folder.rename(final)
    # Only now: a trainer that starts in this moment waits for a save whose owner lives.
    (final / OWNER_NAME).unlink(missing_ok=True)
    fsync_folder(root)
    return final


def retire(path: StorePath) -> StorePath | None:
    """Make a step, or an unfinished save, something that is no step, in one instant.

    Returns:
        What is left to delete with `remove_tree`; None if it was gone already. A crash before that is swept.
    """
    if not path.exists():
        return None
    if not isinstance(path, Path):
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        return path
    trash = path.parent / f".trash-{path.name.lstrip('.')}-{secrets.token_hex(4)}"
    path.rename(trash)
    return trash


def discard(path: StorePath) -> None:
    """Delete a step, or an unfinished save, so that a crash half way leaves nothing that looks like a step.

    Does nothing if it is gone already.
    """
    left = retire(path)
    if left is not None:
        remove_tree(left)


def purge(newest: StorePath, step: int, retention: Retention) -> list[StorePath]:
    """Retire older revisions of ``step``, and the steps that ``retention`` no longer keeps.

    The new step is committed already; only valid steps are counted. A step that cannot be retired is left.

    Returns:
        What is left to delete with `remove_tree`. That takes as long as writing a good part of a step, so it is not
        done before the save is reported.
    """
    root = newest.parent
    older = [p for p in _children(root) if p != newest and (parse_step_name(p.name) or (-1,))[0] == step]
    folders = dict(step_folders(root))
    valid: dict[int, dict[str, float]] = {}
    for number, path in folders.items():
        with contextlib.suppress(DamageError, ValueError):
            valid[number] = Manifest.open(path).metrics
    left: list[StorePath] = []
    for gone in [*older, *(folders[number] for number in retention.surplus(valid))]:
        with contextlib.suppress(OSError):
            left += [trash] if (trash := retire(gone)) else []
    return left


def sweep(root: StorePath) -> list[StorePath]:
    """Delete what crashed saves and deletions left; return what was removed.

    An unfinished save is left alone while the process that makes it may be alive: on this machine that is looked up,
    on another it is assumed for a day.
    """
    removed: list[StorePath] = []
    for path in _children(root):
        if is_leftover(path):
            remove_tree(path)
            removed.append(path)
    return removed


def is_leftover(path: StorePath) -> bool:
    """Whether a folder is what a crashed save or deletion left."""
    return path.name.startswith(".trash-") or (is_unfinished(path) and not _owner_alive(path))


def is_unfinished(path: StorePath) -> bool:
    """Whether a folder is of a save that is not committed."""
    if renames(path):
        return path.name.startswith(".tmp-")
    return parse_step_name(path.name) is not None and not (path / MANIFEST_NAME).exists()


def unfinished(root: StorePath) -> list[StorePath]:
    """Folders of saves that are not committed, of living and dead processes."""
    return [path for path in _children(root) if is_unfinished(path)]


def _next_revision(root: StorePath, step: int) -> int:
    taken = [parsed[1] for path in _children(root) if (parsed := parse_step_name(path.name)) and parsed[0] == step]
    return max(taken) + 1 if taken else 0


def _children(root: StorePath) -> list[StorePath]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def owner_of(folder: StorePath) -> Process | None:
    """Who makes an unfinished save; None in the moment before it is named."""
    try:
        return _owner(folder)[0]
    except (OSError, ValueError):
        return None


def _owner(folder: StorePath) -> tuple[Process, float]:
    """Who makes a save, and since when."""
    told = json.loads((folder / OWNER_NAME).read_bytes())
    return Process(told["host"], told["pid"], told["started"]), told["began"]


def _owner_alive(folder: StorePath) -> bool:
    owner = owner_of(folder)
    if owner is None:
        return _age_s(folder) < _NAMELESS_AGE_S
    return owner.alive and (owner.local or _age_s(folder) < _FOREIGN_AGE_S)


def _age_s(folder: StorePath) -> float:
    try:
        return time.time() - (folder.stat().st_mtime if isinstance(folder, Path) else _owner(folder)[1])
    except (OSError, ValueError):
        return 0.0 if renames(folder) else _FOREIGN_AGE_S  # of objects, a nameless save is half deleted


def _process_start(pid: int) -> str | None:
    """When a local process started, in the kernel's ticks; None if it is not there. Tells reused ids apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
