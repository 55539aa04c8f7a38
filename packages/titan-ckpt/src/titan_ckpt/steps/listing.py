"""Which steps exist, while other processes commit and delete.

Steps are ordered by commit (`Manifest.serial`), not by number: a run that goes back from step 200 to 50 and then saves 60
continues from 60.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan_ckpt.errors import DamageError
from titan_ckpt.format.manifest import CommitRecord, Manifest
from titan_ckpt.format.names import MANIFEST_NAME, parse_step_name
from titan_ckpt.storage.paths import StorePath, is_folder, is_there, renames

# How often a listing is repeated if other processes change it.
_LISTINGS = 20

_UNFINISHED = re.compile(r"\.tmp-\d{8,}-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Revision:
    """One committed folder."""

    step: int
    revision: int
    path: StorePath
    record: CommitRecord | None
    """None if the manifest is damaged or has a newer format."""


def step_folders(root: StorePath) -> list[tuple[int, StorePath]]:
    """The committed steps in the order of their commits, oldest first, each with the folder of its newest revision.

    A step with a damaged manifest is listed too: to open it gives the reason. Its place is right after the last step with a
    smaller number.

    Raises:
        OSError: If the storage does not answer. The error names the file.
    """
    return [(found.step, found.path) for found in newest_revisions(settled_revisions(root))]


def open_steps(
    root: StorePath, invalid: Callable[[StorePath, Exception], None], most: int | None = None
) -> list[Manifest]:
    """The valid steps in the order of their commits, oldest first.

    Args:
        root: The root.
        invalid: Called with the folder and the reason, for each step that is not valid.
        most: Open only this many of the newest.

    Raises:
        OSError: If the storage does not answer, or other processes delete steps faster than they can be opened.
    """
    for _ in range(_LISTINGS):
        valid: list[Manifest] = []
        refused: list[tuple[StorePath, Exception]] = []
        for _, path in reversed(step_folders(root)):
            if most is not None and len(valid) == most:
                break
            try:
                valid.append(Manifest.open(path))
            except (DamageError, ValueError) as err:
                refused.append((path, err))
        if not any(is_gone(path) for path, _ in refused):
            for path, err in refused:
                invalid(path, err)
            return valid[::-1]
    raise TimeoutError(
        f"the steps below {root} are deleted faster than they can be read. Have the run keep more: keep_last=2 or more."
    )


def step_folder(root: StorePath, step: int) -> StorePath | None:
    """The newest revision of one step; None if there is no such step. Looks at no other step."""
    revisions = revisions_of(root, step)
    return revisions[-1] if revisions else None


def is_gone(path: StorePath) -> bool:
    """Whether a listed step was deleted or replaced since. Apparent damage is then none: list the steps again."""
    return not is_there(path if renames(path) else path / MANIFEST_NAME)


def is_unfinished(path: StorePath) -> bool:
    """Whether a folder belongs to a save that is not committed."""
    if renames(path):
        return _UNFINISHED.fullmatch(path.name) is not None and is_folder(path)
    return parse_step_name(path.name) is not None and is_folder(path) and not is_there(path / MANIFEST_NAME)


def unfinished(root: StorePath) -> list[StorePath]:
    """Folders of saves that are not committed; their writers may be alive or dead."""
    return [path for path in folders_below(root) if is_unfinished(path)]


def all_revisions(root: StorePath) -> list[Revision]:
    """Every revision of every committed step, unordered.

    Raises:
        OSError: If the storage does not answer. The order is unknown then, and nothing may be deleted.
    """
    return [revision for path in _step_paths(root) if (revision := _look(path))]


def revisions_of(root: StorePath, step: int) -> list[StorePath]:
    """The committed revisions of a step, oldest first."""
    numbered = [(parsed, path) for path in _step_paths(root) if (parsed := parse_step_name(path.name))]
    mine = [(parsed[1], path) for parsed, path in numbered if parsed[0] == step]
    return [path for _, path in sorted(mine, key=lambda item: item[0]) if is_folder(path) and not is_unfinished(path)]


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
    """As `all_revisions`, but consistent while other processes commit and delete.

    A step is deleted after a newer one is committed. One look at each folder may come too early for the newer step and too
    late for the older one. So the look is repeated until nothing changes.
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
    return [path for path in root.iterdir() if is_folder(path)] if is_folder(root) else []


def _step_paths(root: StorePath) -> list[StorePath]:
    return [path for path in root.iterdir() if parse_step_name(path.name)] if is_folder(root) else []


def _look(path: StorePath) -> Revision | None:
    """The revision in a folder; None if it is not a committed step."""
    parsed = parse_step_name(path.name)
    if parsed is None or not is_folder(path) or is_unfinished(path):
        return None
    record = None
    with contextlib.suppress(DamageError, ValueError):  # to open the step gives the reason
        record = CommitRecord.read(path)
    return Revision(*parsed, path, record)
