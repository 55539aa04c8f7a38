"""Which steps there are, whatever other processes commit and delete meanwhile.

Steps are old or new by the order of their commits, which their manifests count (`Manifest.serial`), not by their
numbers: a run that goes back to step 50 of 200 and saves 60 goes on from 60.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from titan_ckpt.errors import DamageError
from titan_ckpt.format.manifest import CommitRecord, Manifest
from titan_ckpt.format.names import MANIFEST_NAME, parse_step_name
from titan_ckpt.storage.paths import StorePath, renames

# How often a listing that other processes change meanwhile is taken again.
_LISTINGS = 20

_UNFINISHED = re.compile(r"\.tmp-\d{8,}-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Revision:
    """One committed folder."""

    step: int
    revision: int
    path: StorePath
    record: CommitRecord | None
    """None if its manifest is damaged, or of a newer format."""


def step_folders(root: StorePath) -> list[tuple[int, StorePath]]:
    """Committed steps in the order of their commits, oldest first; of one saved more than once, the newest revision.

    A step whose manifest cannot be read is listed too, so that opening it gives the reason. Its place is right after the
    last step with a smaller number.

    Raises:
        OSError: If the storage fails to answer; names the file.
    """
    return [(found.step, found.path) for found in newest_revisions(settled_revisions(root))]


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
    revisions = revisions_of(root, step)
    return revisions[-1] if revisions else None


def is_gone(path: StorePath) -> bool:
    """Whether a folder that was listed as a step has been deleted or replaced since.

    What looks like damage is not damage then: list the steps again.
    """
    return not (path if renames(path) else path / MANIFEST_NAME).exists()


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
    return [path for path in folders_below(root) if is_unfinished(path)]


def all_revisions(root: StorePath) -> list[Revision]:
    """Every revision of every committed step, in no order.

    Raises:
        OSError: If the storage fails to answer. The order is unknown then, and nothing may be deleted.
    """
    return [revision for path in _step_paths(root) if (revision := _look(path))]


def revisions_of(root: StorePath, step: int) -> list[StorePath]:
    """The committed revisions of a step, oldest first."""
    numbered = [(parsed, path) for path in _step_paths(root) if (parsed := parse_step_name(path.name))]
    mine = [(parsed[1], path) for parsed, path in numbered if parsed[0] == step]
    return [path for _, path in sorted(mine, key=lambda item: item[0]) if path.is_dir() and not is_unfinished(path)]


def next_revision(root: StorePath, step: int) -> int:
    taken = [parsed[1] for path in _step_paths(root) if (parsed := parse_step_name(path.name)) and parsed[0] == step]
    return max(taken) + 1 if taken else 0


def newest_revisions(found: Sequence[Revision]) -> list[Revision]:
    """The newest revision of each step, in the order of `step_folders`."""
    newest: dict[int, Revision] = {}
    for other in found:
        if other.step not in newest or newest[other.step].revision < other.revision:
            newest[other.step] = other
    ordered = [other for other in newest.values() if other.record]
    ordered.sort(key=lambda other: (other.record.serial if other.record else 0, other.step))
    for other in sorted((other for other in newest.values() if not other.record), key=lambda other: other.step):
        smaller = [i for i, known in enumerate(ordered) if known.step < other.step]
        ordered.insert(smaller[-1] + 1 if smaller else 0, other)
    return ordered


def settled_revisions(root: StorePath) -> list[Revision]:
    """As `all_revisions`, of one moment, though steps are committed and deleted meanwhile.

    A step is deleted after a newer one is committed. A look that meets the first without its manifest, but was past the
    newer one before its commit, would find neither.
    """
    found: list[Revision] = []
    for _ in range(_LISTINGS):
        before = _step_paths(root)
        found = [revision for path in before if (revision := _look(path))]
        missed = {path.name for path in before} - {revision.path.name for revision in found}
        after = {path.name for path in _step_paths(root)}
        gone = any(revision.record is None and is_gone(revision.path) for revision in found)
        if not gone and after == {path.name for path in before} and not any(_look(root / name) for name in missed):
            break
    return found


def folders_below(root: StorePath) -> list[StorePath]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _step_paths(root: StorePath) -> list[StorePath]:
    return [path for path in root.iterdir() if parse_step_name(path.name)] if root.is_dir() else []


def _look(path: StorePath) -> Revision | None:
    """What a folder with a step's name holds; None if it is no folder, or not committed."""
    parsed = parse_step_name(path.name)
    if parsed is None or not path.is_dir() or is_unfinished(path):
        return None
    record = None
    with contextlib.suppress(DamageError, ValueError):  # opening the step gives the reason
        record = CommitRecord.read(path)
    return Revision(*parsed, path, record)


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
