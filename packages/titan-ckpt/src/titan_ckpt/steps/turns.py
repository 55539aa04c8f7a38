"""One commit at a time in a store that cannot rename folders.

The serial of a commit is one more than the largest serial. Two writers that look at the same time would take the same
one. So before its index and manifest, a writer creates ``commit-<serial>.json`` with a put that fails if the object exists.
One writer succeeds; the other raises and commits nothing. The object names the writer's folder. If that writer was killed
before its manifest, or its folder is gone, the next writer takes the next serial.
"""

import contextlib
import errno
import json
import time

from titan_ckpt.format.names import MANIFEST_NAME, parse_turn_name, turn_name
from titan_ckpt.steps.claim import owner_of
from titan_ckpt.storage.paths import ABSENT, RemotePath

# A writer on another machine that has no manifest after this time counts as killed.
_FOREIGN_TURN_S = 60.0


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
    later = [path.name for path in root.iterdir() if (parse_turn_name(path.name) or 0) > serial]
    if later:
        path.unlink(missing_ok=True)
        raise _lost(root, later[-1])
    return serial


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
