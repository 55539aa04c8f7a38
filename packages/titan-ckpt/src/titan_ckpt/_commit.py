"""The life of a step's folder: unfinished, committed, trash.

Every rank writes into ``.tmp-<step>-<save id>`` and brings its files to disk. Rank 0 then writes the index, the
manifest last, brings the folders to disk, and renames the folder to ``step-<step>``: the one instant at which the step
begins to exist. A save id is random, so a leftover of a crashed save (of another world size, say) can neither be
mistaken for this one nor be committed by it. Saving a step again commits it as the next revision, so that there is no
moment without a valid copy. Deleting renames to ``.trash-*`` first: a half deleted step is not a step.

In a store that cannot rename folders (`titan_ckpt._storage`), a save writes to ``step-<step>.r<revision>.<save id>`` at
once, and the manifest, its last object, is the commit; deleting takes the manifest first.

Steps are old or new by the order of their commits, which their manifests count (`Manifest.serial`), not by their
numbers: a run that goes back to step 50 of 200 and saves 60 goes on from 60.

Whatever is deleted here was proven to be ours and to be dead: its name is one that this module gives, and where the
storage fails to answer, nothing is.
"""

import contextlib
import datetime as dt
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_ckpt._claim import drop_dead_claim
from titan_ckpt._errors import DamageError
from titan_ckpt._format import INDEX_NAME, MANIFEST_NAME, parse_step_name, remote_step_name, step_name
from titan_ckpt._index import FileRecord, Index
from titan_ckpt._manifest import Manifest, encode_manifest
from titan_ckpt._process import Process
from titan_ckpt._retention import Retention
from titan_ckpt._storage import ABSENT, StorePath, remove_tree, renames
from titan_ckpt._write import fsync_folder, write_plain

_log = logging.getLogger("titan_ckpt")

OWNER_NAME = ".owner.json"
"""Says who makes an unfinished save; gone once it is committed or given up."""

# Unfinished saves of another machine cannot be asked whether they are alive; they are left for a day.
_FOREIGN_AGE_S = 86_400
# Longer than a folder stays without a named owner while it is made.
_NAMELESS_AGE_S = 60
# How often a listing that other processes change meanwhile is taken again.
_LISTINGS = 20

_UNFINISHED = re.compile(r"\.tmp-\d{8,}-[0-9a-f]{16}")
_TRASH = re.compile(r"\.trash-(?:step-\d{8,}(?:\.r\d+(?:\.[0-9a-f]{16})?)?|tmp-\d{8,}-[0-9a-f]{16})-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class _Revision:
    """One committed folder."""

    step: int
    revision: int
    path: StorePath
    manifest: Manifest | None
    """None if it is damaged, or of a newer format."""


def step_folders(root: StorePath) -> list[tuple[int, StorePath]]:
    """Committed steps in the order of their commits, oldest first; of one saved more than once, the newest revision.

    A step whose manifest cannot be read is listed too, so that whoever opens it learns why. It stands right after the
    last step with a smaller number: where steps were committed in the order of their numbers, that is its place.

    Raises:
        OSError: If the storage fails to answer; names the file.
    """
    return [(found.step, found.path) for found in _newest(_settled(root))]


def open_steps(
    root: StorePath, invalid: Callable[[StorePath, Exception], None], most: int | None = None
) -> list[Manifest]:
    """The valid steps in the order of their commits, oldest first, while another process may save and delete.

    Args:
        root: The folder of the steps.
        invalid: Called with the folder and the reason for each step that is not valid.
        most: Only so many of the newest; older ones are not opened.

    Raises:
        OSError: If the storage fails to answer.
    """
    for _ in range(_LISTINGS):
        opened = _open(reversed(step_folders(root)), most)
        if opened is None:
            continue
        for path, err in opened[1]:
            invalid(path, err)
        return opened[0][::-1]
    raise TimeoutError(
        f"the steps below {root} are deleted faster than they can be read. Have the run keep more: keep_last=2 or more."
    )


def step_folder(root: StorePath, step: int) -> StorePath | None:
    """The newest revision of one step, found without a look at any other; None if there is no such step."""
    revisions = _revisions(root, step)
    return revisions[-1] if revisions else None


def is_gone(path: StorePath) -> bool:
    """Whether a folder that was listed as a step is none any more: deleted, or replaced by its next revision.

    What seems to be damage is none then; list the steps again.
    """
    return not (path if renames(path) else path / MANIFEST_NAME).exists()


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
        folder = root / remote_step_name(step, _next_revision(root, step), save_id)
    folder.mkdir(parents=True)
    try:
        (folder / OWNER_NAME).write_bytes(json.dumps({**asdict(owner), "began": time.time()}).encode())
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
    encoded = index.encode()
    write_plain(folder / INDEX_NAME, encoded)
    manifest = encode_manifest(
        format_version=index.format,
        step=step,
        save_id=save_id,
        world_size=world_size,
        serial=1 + max((found.manifest.serial for found in _committed(root) if found.manifest), default=0),
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
        _disown(folder)
        return folder
    assert isinstance(root, Path)
    write_plain(folder / (MANIFEST_NAME + ".part"), manifest)
    (folder / (MANIFEST_NAME + ".part")).rename(folder / MANIFEST_NAME)
    for parent in sorted({(folder / record.name).parent for record in files} | {folder}, reverse=True):
        fsync_folder(parent)
    final = root / step_name(step, _next_revision(root, step))
    folder.rename(final)
    # Only now: a trainer that starts in this moment waits for a save whose owner lives.
    _disown(final)
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
    if _TRASH.fullmatch(path.name):
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

    The new step is committed already, so nothing that goes wrong here is an error of the save: what cannot be retired
    is left, with a warning.

    Args:
        newest: The folder of the step just committed; it stays.
        step: Its number.
        retention: The rules.
        distrusted: Numbers of steps that a restore found damaged although they seem valid; they count as damaged.

    Returns:
        What is left to delete with `remove_tree`. That takes as long as writing a good part of a step, so it is not
        done before the save is reported.
    """
    left: list[StorePath] = []
    try:
        root = newest.parent
        others = [] if retention.keeps_all else _committed(root)
        doubted = [number for number in distrusted if number != step]
        for gone in [*_revisions(root, step), *_surplus(others, retention, doubted)]:
            if gone.name != newest.name:
                left += [trash] if (trash := retire(gone)) else []
    except Exception as err:  # whatever a store raises
        _log.warning("older steps than %s were left, the next save tries again: %s", newest, err)
    return left


def surplus(root: StorePath, retention: Retention, distrusted: Sequence[int] = ()) -> list[StorePath]:
    """What ``retention`` would delete: steps in the order of their commits, each with all its revisions, oldest first.

    Only valid steps count, and only they are deleted: damaged ones are left for someone to look at.
    """
    return _surplus(_settled(root), retention, distrusted)


def sweep(root: StorePath) -> list[StorePath]:
    """Delete what crashed saves and deletions left; return what was removed.

    An unfinished save is left alone while the process that makes it may be alive: on this machine that is looked up,
    on another it is assumed for a day.

    Raises:
        OSError: If the storage fails to answer.
    """
    removed: list[StorePath] = []
    for path in leftovers(root):
        with contextlib.suppress(OSError):  # another user's, say
            discard(path)
            removed.append(path)
    drop_dead_claim(root)
    return removed


def leftovers(root: StorePath) -> list[StorePath]:
    """What `sweep` would delete: unfinished saves of the dead, half deleted steps, and replaced revisions.

    A revision of a step is replaced if there is a newer one that is valid.
    """
    return [path for path in _children(root) if is_leftover(path)] + _superseded(root)


def is_leftover(path: StorePath) -> bool:
    """Whether a folder is what a crashed save or deletion left, by its own look: not a replaced revision."""
    if renames(path) and _TRASH.fullmatch(path.name):
        return path.is_dir()
    return is_unfinished(path) and not _owner_alive(path)


def is_unfinished(path: StorePath) -> bool:
    """Whether a folder is of a save that is not committed.

    Raises:
        OSError: If the storage fails to answer.
    """
    if renames(path):
        return _UNFINISHED.fullmatch(path.name) is not None and path.is_dir()
    return parse_step_name(path.name) is not None and path.is_dir() and not (path / MANIFEST_NAME).exists()


def unfinished(root: StorePath) -> list[StorePath]:
    """Folders of saves that are not committed, of living and dead processes."""
    return [path for path in _children(root) if is_unfinished(path)]


def owner_of(folder: StorePath) -> Process | None:
    """Who makes an unfinished save; None in the moment before it is named."""
    try:
        return _owner(folder)[0]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _settled(root: StorePath) -> list[_Revision]:
    """As `_committed`, of one moment, though steps are committed and deleted meanwhile.

    A step is deleted after a newer one is committed. A look that meets the first without its manifest, but was past the
    newer one before its commit, would find neither.
    """
    found: list[_Revision] = []
    for _ in range(_LISTINGS):
        before = _step_paths(root)
        found = [revision for path in before if (revision := _look(path))]
        missed = {path.name for path in before} - {revision.path.name for revision in found}
        after = {path.name for path in _step_paths(root)}
        gone = any(revision.manifest is None and is_gone(revision.path) for revision in found)
        if not gone and after == {path.name for path in before} and not any(_look(root / name) for name in missed):
            break
    return found


def _committed(root: StorePath) -> list[_Revision]:
    """Every revision of every committed step, in no order.

    Raises:
        OSError: If the storage fails to answer: no order can be told then, and nothing be deleted.
    """
    return [revision for path in _step_paths(root) if (revision := _look(path))]


def _step_paths(root: StorePath) -> list[StorePath]:
    return [path for path in root.iterdir() if parse_step_name(path.name)] if root.is_dir() else []


def _revisions(root: StorePath, step: int) -> list[StorePath]:
    """The committed revisions of a step, oldest first."""
    numbered = [(parsed, path) for path in _step_paths(root) if (parsed := parse_step_name(path.name))]
    mine = [(parsed[1], path) for parsed, path in numbered if parsed[0] == step]
    return [path for _, path in sorted(mine, key=lambda item: item[0]) if path.is_dir() and not is_unfinished(path)]


def _look(path: StorePath) -> _Revision | None:
    """What a folder with a step's name holds; None if it is no folder, or not committed."""
    parsed = parse_step_name(path.name)
    if parsed is None or not path.is_dir() or is_unfinished(path):
        return None
    manifest = None
    with contextlib.suppress(DamageError, ValueError):  # whoever opens the step gets the reason
        manifest = Manifest.read(path)
    return _Revision(*parsed, path, manifest)


def _newest(found: Sequence[_Revision]) -> list[_Revision]:
    """The newest revision of each step, in the order of `step_folders`."""
    newest: dict[int, _Revision] = {}
    for other in found:
        if other.step not in newest or newest[other.step].revision < other.revision:
            newest[other.step] = other
    ordered = [other for other in newest.values() if other.manifest]
    ordered.sort(key=lambda other: (other.manifest.serial if other.manifest else 0, other.step))
    for other in sorted((other for other in newest.values() if not other.manifest), key=lambda other: other.step):
        smaller = [i for i, known in enumerate(ordered) if known.step < other.step]
        ordered.insert(smaller[-1] + 1 if smaller else 0, other)
    return ordered


def _surplus(found: Sequence[_Revision], retention: Retention, distrusted: Sequence[int]) -> list[StorePath]:
    valid: dict[int, Mapping[str, float]] = {}
    for newest in _newest(found):
        if newest.manifest is None or newest.step in distrusted:
            continue
        with contextlib.suppress(DamageError):  # neither counted nor deleted
            newest.manifest.check_files()
            valid[newest.step] = newest.manifest.metrics
    # The newest revision goes last: were it to go first, a crash would leave the one before it as the step.
    revisions = sorted(found, key=lambda other: other.revision)
    return [other.path for step in retention.surplus(valid) for other in revisions if other.step == step]


def _superseded(root: StorePath) -> list[StorePath]:
    """Revisions of a step that has a newer one which is valid."""
    found = _committed(root)
    replaced: list[StorePath] = []
    for newest in _newest(found):
        older = [other.path for other in found if other.step == newest.step and other.path != newest.path]
        with contextlib.suppress(DamageError, ValueError):
            if older and Manifest.open(newest.path):
                replaced += older
    return replaced


def _open(
    folders: Iterable[tuple[int, StorePath]], most: int | None
) -> tuple[list[Manifest], list[tuple[StorePath, Exception]]] | None:
    """The first ``most`` valid ones, and what is wrong with those before; None if one was deleted meanwhile."""
    valid: list[Manifest] = []
    refused: list[tuple[StorePath, Exception]] = []
    for _, path in folders:
        if most is not None and len(valid) == most:
            break
        try:
            valid.append(Manifest.open(path))
        except (DamageError, ValueError) as err:
            if is_gone(path):
                return None
            refused.append((path, err))
    return valid, refused


def _next_revision(root: StorePath, step: int) -> int:
    taken = [parsed[1] for path in _step_paths(root) if (parsed := parse_step_name(path.name)) and parsed[0] == step]
    return max(taken) + 1 if taken else 0


def _children(root: StorePath) -> list[StorePath]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _disown(folder: StorePath) -> None:
    """Take the owner's name off a step. It is committed: that it stays is no reason to call the save failed."""
    with contextlib.suppress(OSError):
        (folder / OWNER_NAME).unlink(missing_ok=True)


def _owner(folder: StorePath) -> tuple[Process, float]:
    """Who makes a save, and since when."""
    told = json.loads((folder / OWNER_NAME).read_bytes())
    return Process.decode(told), told["began"]


def _owner_alive(folder: StorePath) -> bool:
    """Whether the process that makes a save may be alive; True unless it is proven not to be."""
    try:
        owner, began = _owner(folder)
    except (*ABSENT, ValueError, KeyError, TypeError):
        # On a file system it is named in a moment, or never. Of objects, the name is the first to be written and, but
        # for a commit, goes with the rest: this is half deleted.
        return renames(folder) and _age_s(folder, 0.0) < _NAMELESS_AGE_S
    except OSError:
        return True
    return owner.alive and (owner.local or _age_s(folder, began) < _FOREIGN_AGE_S)


def _age_s(folder: StorePath, began: float) -> float:
    """How long a save was not written to; of objects, how long ago it began."""
    try:
        return time.time() - (folder.stat().st_mtime if isinstance(folder, Path) else began)
    except FileNotFoundError:
        return 0.0
