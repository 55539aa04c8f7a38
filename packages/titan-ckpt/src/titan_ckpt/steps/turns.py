"""One commit at a time in a store that cannot rename: a conditional put of a small object for each commit.

A commit's serial is one more than the largest there is, so two writers that look at the same time take the same. Before
it writes its index and manifest, a writer creates ``commit-<serial>.json`` with a put that fails if the object exists.
One of the two wins; the other raises and commits nothing. The object names the folder it was made for: one whose writer
was killed before its manifest, or whose folder is gone, holds up nobody.
"""

import contextlib
import errno
import json
import time

from titan_ckpt.format.names import MANIFEST_NAME, parse_turn_name, turn_name
from titan_ckpt.steps.claim import owner_of
from titan_ckpt.storage.paths import ABSENT, RemotePath

# A writer of another machine, which cannot be asked, writes index and manifest within this time, or was killed.
_FOREIGN_TURN_S = 60.0


def create_once(path: RemotePath, data: bytes) -> None:
    """A conditional put. That the object is there with just these bytes is success: a client may send a request twice.

    Raises:
        FileExistsError: If it is there with other bytes.
    """
    try:
        path.create(data)
    except FileExistsError:
        if path.read_bytes() != data:
            raise


def take_turn(folder: RemotePath, serial: int) -> int:
    """Reserve the serial of the commit of ``folder``, at least ``serial``.

    Raises:
        FileExistsError: If another writer commits, or has committed, at the same time.
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
    # One that looked long ago finds its object free again, since a later commit deletes those before it.
    later = [path.name for path in root.iterdir() if (parse_turn_name(path.name) or 0) > serial]
    if later:
        path.unlink(missing_ok=True)
        raise _lost(root, later[-1])
    return serial


def end_turn(folder: RemotePath, serial: int) -> None:
    """Delete the objects of commits before ``serial``. What cannot be deleted is left for the next commit."""
    with contextlib.suppress(OSError):
        for path in list(folder.parent.iterdir()):
            if 0 < (parse_turn_name(path.name) or 0) < serial:
                path.unlink(missing_ok=True)


def _holder(path: RemotePath) -> str | None:
    """The folder for which an object was made, if it is committed or may be; None if not."""
    try:
        value = json.loads(path.read_bytes())
        folder, began = path.parent / str(value["folder"]), float(value["began"])
    except (*ABSENT, ValueError, KeyError, TypeError, RecursionError):
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
