"""The life of a step's folder: unfinished, committed, trash.

Every rank writes its files into ``.tmp-<step>-<save id>`` and brings them to disk. Rank 0 then writes the index, then the
manifest, brings the folders to disk, and renames the folder to ``step-<step>``. The rename is the commit. The save id is
random, so the rest of a crashed save is never mistaken for this one. A step that is saved again becomes the next revision:
there is always a valid copy. Deletion first renames the folder to ``.trash-*``: a half deleted step is not a step.

In a store that cannot rename folders, a save writes to ``step-<step>.r<revision>.<save id>`` from the start. Its last object,
the manifest, is the commit. Deletion starts with the manifest.

The serial of a commit is one more than the largest serial. In such a store, two writers that look at the same time would take
the same one. So before its index and manifest, a writer creates ``commit-<serial>.json`` with a put that fails if the object
exists. One writer succeeds; the other raises and commits nothing. The object names the writer's folder. If that writer was
killed before its manifest, or its folder is gone, the next writer takes a serial after it.

A folder is deleted only if it has a name that this package gives and its writer is proven dead. If the storage does not
answer, nothing is deleted.
"""

import contextlib
import datetime as dt
import errno
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_ckpt.errors import DamageError
from titan_ckpt.format.codec import digest
from titan_ckpt.format.index import FileRecord, Index
from titan_ckpt.format.manifest import CommitRecord, Manifest, listed
from titan_ckpt.format.names import (
    COMMIT_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    check_step,
    parse_turn_name,
    remote_step_name,
    step_name,
    turn_name,
)
from titan_ckpt.steps.claim import OWNER_NAME, Process, disown, name_owner, owner_of
from titan_ckpt.steps.listing import (
    Revision,
    all_revisions,
    is_unfinished,
    newest_revisions,
    next_revision,
    revisions_of,
    settled_revisions,
)
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.files import fsync_folder, remove_tree, write_plain
from titan_ckpt.storage.paths import ABSENT, RemotePath, StorePath, renames

_log = logging.getLogger("titan_ckpt")

TRASH = re.compile(r"\.trash-(?:step-\d{8,}(?:\.r\d+(?:\.[0-9a-f]{16})?)?|tmp-\d{8,}-[0-9a-f]{16})-[0-9a-f]{8}")

# A writer on another machine that has no manifest after this time counts as killed.
_FOREIGN_TURN_S = 60.0


def begin_save(root: StorePath, step: int, owner: Process) -> tuple[StorePath, str]:
    """Make the folder of an unfinished save; return it with its save id. It is not swept while ``owner`` is alive.

    Raises:
        ValueError: If the step is negative.
        OSError: If the folder cannot be made.
    """
    check_step(step)
    save_id = secrets.token_hex(8)
    if renames(root):
        folder = root / f".tmp-{step:08d}-{save_id}"
    else:
        folder = root / remote_step_name(step, next_revision(root, step), save_id)
    folder.mkdir(parents=True)
    try:
        name_owner(folder, owner)
    except OSError:
        remove_tree(folder)
        raise
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
    """Commit an unfinished save whose files are on disk, as the newest step. Returns the step's folder.

    Raises:
        OSError: If that fails. The step does not exist then, and earlier steps are intact.
    """
    root = folder.parent
    encoded, version = index.encode()
    serial = 1 + max((found.record.serial for found in all_revisions(root) if found.record), default=0)
    if not isinstance(folder, Path):
        serial = take_turn(folder, serial)
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    about = (step, save_id, world_size, serial, now, dict(versions), dict(metrics))
    manifest = Manifest(folder, *about, listed(files), (len(encoded), digest(encoded))).encode(version)
    for note in list(folder.glob(".*")):  # savers' reports
        if note.name != OWNER_NAME:
            note.unlink()
    write_plain(folder / COMMIT_NAME, CommitRecord(step, serial, dict(metrics)).encode(manifest))
    write_plain(folder / INDEX_NAME, encoded)
    if not isinstance(folder, Path):
        create_once(folder / MANIFEST_NAME, manifest)  # one object, whole or not at all: the commit
        disown(folder)
        end_turn(folder, serial)
        return folder
    assert isinstance(root, Path)
    write_plain(folder / (MANIFEST_NAME + ".part"), manifest)
    (folder / (MANIFEST_NAME + ".part")).rename(folder / MANIFEST_NAME)
    for parent in sorted({(folder / record.name).parent for record in files} | {folder}, reverse=True):
        fsync_folder(parent)
    final = root / step_name(step, next_revision(root, step))
    folder.rename(final)
    # After the rename: a trainer that starts at this moment waits for a save with a living owner.
    disown(final)
    fsync_folder(root)
    return final


def retire(path: StorePath) -> StorePath | None:
    """Turn a step or an unfinished save, in one instant, into something that is not a step.

    Returns:
        The folder to delete with `remove_tree`, or None if it was gone. After a crash it is swept.
    """
    if not isinstance(path, Path):
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        return path
    if TRASH.fullmatch(path.name):
        return path
    trash = path.parent / f".trash-{path.name.lstrip('.')}-{secrets.token_hex(4)}"
    try:
        path.rename(trash)
    except FileNotFoundError:
        return None
    return trash


def discard(path: StorePath) -> None:
    """Delete a step or an unfinished save, if it exists. A crash half way leaves nothing that looks like a step."""
    left = retire(path)
    if left is not None:
        remove_tree(left)


def discard_unfinished(path: StorePath) -> None:
    """Delete an unfinished save, if it exists. A step that is committed by now stays: its predecessors may be gone.

    Raises:
        OSError: If the storage does not answer. Only its owner's name is removed then: it is swept unless it is committed.
    """
    try:
        begun = is_unfinished(path)
    except OSError:
        disown(path)
        raise
    if begun:
        discard(path)


def purge(newest: StorePath, step: int, retention: Retention, distrusted: Sequence[int] = ()) -> list[StorePath]:
    """Retire older revisions of ``step``, and the steps that ``retention`` does not keep.

    ``newest``, the folder of ``step``, is committed. So a failure here is a warning, not an error of the save.
    ``distrusted`` steps, which a restore found damaged, count as damaged.

    Returns:
        The folders to delete with `remove_tree`. That is slow, so it is done after the save is reported.
    """
    left: list[StorePath] = []
    try:
        root = newest.parent
        others = [] if retention.keeps_all else all_revisions(root)
        doubted = [number for number in distrusted if number != step]
        for gone in [*revisions_of(root, step), *_surplus(others, retention, doubted, newest)]:
            if gone.name != newest.name:
                left += [trash] if (trash := retire(gone)) else []
    except Exception as err:  # stores raise errors of any type
        _log.warning("steps older than %s were not deleted; the next save tries again: %s", newest, err)
    return left


def surplus(root: StorePath, retention: Retention, distrusted: Sequence[int] = ()) -> list[StorePath]:
    """The folders that ``retention`` would delete: all revisions of each step, in the order of the commits.

    Only valid steps are counted and deleted. Damaged steps are kept for inspection.
    """
    return _surplus(settled_revisions(root), retention, distrusted)


def _surplus(
    found: Sequence[Revision], retention: Retention, distrusted: Sequence[int], intact: StorePath | None = None
) -> list[StorePath]:
    """As `surplus`, without a check of ``intact``. Only the steps that decide the deletion are checked."""
    kept = {
        newest.step: newest for newest in newest_revisions(found) if newest.record and newest.step not in distrusted
    }

    def is_valid(step: int) -> bool:
        path = kept[step].path
        if intact is not None and path.name == intact.name:
            return True
        try:
            Manifest.open(path)
        except (DamageError, ValueError):  # not counted, not deleted
            return False
        return True

    metrics = {step: newest.record.metrics for step, newest in kept.items() if newest.record}
    # The newest revision is deleted last. Otherwise a crash would bring the one before it back.
    revisions = sorted(found, key=lambda other: other.revision)
    return [other.path for step in retention.surplus(metrics, is_valid) for other in revisions if other.step == step]


def create_once(path: RemotePath, data: bytes) -> None:
    """A conditional put. It succeeds if the object has the same bytes: a client may repeat a request.

    Raises:
        FileExistsError: If the object exists with other bytes.
    """
    try:
        path.create(data)
    except FileExistsError:
        if path.read_bytes() != data:
            raise


def take_turn(folder: RemotePath, serial: int) -> int:
    """Reserve the serial of the commit of ``folder``, at least ``serial``.

    Raises:
        FileExistsError: If another writer commits at the same time.
    """
    root = folder.parent
    while True:
        path = root / turn_name(serial)
        try:
            create_once(path, json.dumps({"folder": folder.name, "began": time.time()}).encode())
            break
        except FileExistsError:
            if (rival := _holder(path)) is not None:
                raise _lost(root, rival) from None
        serial += 1
    # A later commit deletes earlier objects, so a slow writer may get an old serial.
    later = {number: turn for turn in root.iterdir() if (number := parse_turn_name(turn.name) or 0) > serial}
    if not later:
        return serial
    path.unlink(missing_ok=True)
    for turn in later.values():
        if (rival := _holder(turn)) is not None:
            raise _lost(root, rival)
    return take_turn(folder, 1 + max(later))


def end_turn(folder: RemotePath, serial: int) -> None:
    """Delete the objects of earlier commits. A failure is left for the next commit."""
    with contextlib.suppress(OSError):
        for path in list(folder.parent.iterdir()):
            if 0 < (parse_turn_name(path.name) or 0) < serial:
                path.unlink(missing_ok=True)


def _holder(path: RemotePath) -> str | None:
    """The folder of a reservation, if it is committed or still may be; else None."""
    try:
        value = json.loads(path.read_bytes())
        folder, began = path.parent / str(value["folder"]), float(value["began"])
    except (*ABSENT, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if (folder / MANIFEST_NAME).exists():
        return folder.name
    owner = owner_of(folder)
    if owner is None:
        return None
    waits = owner.alive if owner.local else time.time() - began < _FOREIGN_TURN_S
    return folder.name if waits else None


def _lost(root: RemotePath, rival: str) -> FileExistsError:
    return FileExistsError(
        errno.EEXIST,
        f"another writer committed {rival} below {root} at the same time, and this step was not committed. Two runs must "
        "not save to one folder: end one of them, or give each a folder of its own",
    )
