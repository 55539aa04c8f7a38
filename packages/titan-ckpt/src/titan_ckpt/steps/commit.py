"""The life of a step's folder: unfinished, committed, trash.

Every rank writes into ``.tmp-<step>-<save id>`` and brings its files to disk. Rank 0 then writes the index, the
manifest last, brings the folders to disk, and renames the folder to ``step-<step>``: the one instant at which the step
begins to exist. A save id is random, so a leftover of a crashed save (of another world size, say) can neither be
mistaken for this one nor be committed by it. Saving a step again commits it as the next revision, so that there is no
moment without a valid copy. Deleting renames to ``.trash-*`` first: a half deleted step is not a step.

In a store that cannot rename folders (`titan_ckpt.storage.paths`), a save writes to ``step-<step>.r<revision>.<save id>`` at
once, and the manifest, its last object, is the commit; deleting takes the manifest first.

Only what is proven to be ours and dead is deleted: its name is one that this module gives, and where the storage fails to
answer, nothing is.
"""

import datetime as dt
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_ckpt.errors import DamageError
from titan_ckpt.format.index import FileRecord, Index
from titan_ckpt.format.manifest import CommitRecord, Manifest, encode_manifest
from titan_ckpt.format.names import COMMIT_NAME, INDEX_NAME, MANIFEST_NAME, remote_step_name, step_name
from titan_ckpt.steps.claim import OWNER_NAME, Process, disown, name_owner
from titan_ckpt.steps.listing import (
    Revision,
    all_revisions,
    newest_revisions,
    next_revision,
    revisions_of,
    settled_revisions,
)
from titan_ckpt.steps.retention import Retention
from titan_ckpt.steps.turns import create_once, end_turn, take_turn
from titan_ckpt.storage.files import fsync_folder, remove_tree, write_plain
from titan_ckpt.storage.paths import StorePath, renames

_log = logging.getLogger("titan_ckpt")

TRASH = re.compile(r"\.trash-(?:step-\d{8,}(?:\.r\d+(?:\.[0-9a-f]{16})?)?|tmp-\d{8,}-[0-9a-f]{16})-[0-9a-f]{8}")


def begin_save(root: StorePath, step: int, owner: Process) -> tuple[StorePath, str]:
    """Make the folder of an unfinished save, kept while ``owner`` lives; return it with its save id.

    Raises:
        ValueError: If the step is negative.
        OSError: If the folder cannot be made.
    """
    if step < 0:
        raise ValueError(f"step={step} is negative. Count steps from 0.")
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
    """Turn an unfinished save whose files are on disk into a step, newer than all that are there.

    Returns:
        The step's folder.

    Raises:
        OSError: If the disk refuses; the step does not exist then, and earlier ones are untouched.
    """
    root = folder.parent
    encoded, version = index.encode()
    serial = 1 + max((found.record.serial for found in all_revisions(root) if found.record), default=0)
    if not isinstance(folder, Path):
        serial = take_turn(folder, serial)
    record = CommitRecord(step, serial, dict(metrics))
    manifest = encode_manifest(
        format_version=version,
        step=step,
        save_id=save_id,
        world_size=world_size,
        serial=record.serial,
        saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        versions=dict(versions),
        metrics=dict(metrics),
        files=files,
        index=encoded,
    )
    for note in list(folder.glob(".*")):  # savers' reports
        if note.name != OWNER_NAME:
            note.unlink()
    write_plain(folder / COMMIT_NAME, record.encode(manifest))
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
    # Only now: a trainer that starts in this moment waits for a save whose owner lives.
    disown(final)
    fsync_folder(root)
    return final


def retire(path: StorePath) -> StorePath | None:
    """Make a step, or an unfinished save, something that is no step, in one instant.

    Returns:
        What is left to delete with `remove_tree`; None if it was gone already. A crash before that is swept.
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
    """Delete a step, or an unfinished save, so that a crash half way leaves nothing that looks like a step.

    Does nothing if it is gone already.
    """
    left = retire(path)
    if left is not None:
        remove_tree(left)


def purge(newest: StorePath, step: int, retention: Retention, distrusted: Sequence[int] = ()) -> list[StorePath]:
    """Retire older revisions of ``step``, and the steps that ``retention`` no longer keeps.

    ``newest`` is the folder of the step just committed, so nothing that fails here is an error of the save: what cannot
    be retired is left, with a warning. ``distrusted`` steps, which a restore found damaged, count as damaged.

    Returns:
        What is left to delete with `remove_tree`: slow, so it is done after the save is reported.
    """
    left: list[StorePath] = []
    try:
        root = newest.parent
        others = [] if retention.keeps_all else all_revisions(root)
        doubted = [number for number in distrusted if number != step]
        for gone in [*revisions_of(root, step), *_surplus(others, retention, doubted, newest)]:
            if gone.name != newest.name:
                left += [trash] if (trash := retire(gone)) else []
    except Exception as err:  # whatever a store raises
        _log.warning("older steps than %s were left, the next save tries again: %s", newest, err)
    return left


def surplus(root: StorePath, retention: Retention, distrusted: Sequence[int] = ()) -> list[StorePath]:
    """What ``retention`` would delete: steps in the order of their commits, each with all its revisions, oldest first.

    Only valid steps count, and only they are deleted: damaged ones are left for someone to look at.
    """
    return _surplus(settled_revisions(root), retention, distrusted)


def _surplus(
    found: Sequence[Revision], retention: Retention, distrusted: Sequence[int], intact: StorePath | None = None
) -> list[StorePath]:
    """As `surplus`; ``intact`` need not be checked. Only steps that decide what is deleted are checked."""
    kept = {
        newest.step: newest for newest in newest_revisions(found) if newest.record and newest.step not in distrusted
    }

    def is_valid(step: int) -> bool:
        path = kept[step].path
        if intact is not None and path.name == intact.name:
            return True
        try:
            Manifest.open(path)
        except (DamageError, ValueError):  # neither counted nor deleted
            return False
        return True

    metrics = {step: newest.record.metrics for step, newest in kept.items() if newest.record}
    # The newest revision goes last: were it to go first, a crash would leave the one before it as the step.
    revisions = sorted(found, key=lambda other: other.revision)
    return [other.path for step in retention.surplus(metrics, is_valid) for other in revisions if other.step == step]
