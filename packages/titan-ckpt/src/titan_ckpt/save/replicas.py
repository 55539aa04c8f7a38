"""Notice tensors that ranks hold as the same box of one tensor, but with different values.

Only one rank's values of such a box are saved. That is what replicas mean, and wrong for what only looks like them:
experts of different ranks under one name, or batch statistics that nothing keeps equal. So the first save of a state
compares a sample of every box, its first values, over the ranks that hold it.
"""

import logging

import numpy as np
import xxhash
from torch import Tensor

from titan_ckpt.comm import ByteComm
from titan_ckpt.save.plan import Held
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.state.sharding import LocalPart

_log = logging.getLogger("titan_ckpt")

_SAMPLE_ELEMENTS = 4096
_MOST_NAMES = 6
_BOXES = np.dtype([("box", "<u8"), ("sample", "<u8")])


def compare_replicas(parts: list[LocalPart], held: list[Held], comm: ByteComm) -> list[str]:
    """Names of tensors whose boxes differ between ranks that hold the same; logs them on rank 0. Collective."""
    if comm.size == 1:
        return []
    names: dict[int, str] = {}
    rows: list[tuple[int, int]] = []
    for part, kept in zip(parts, held, strict=True):
        for i, box in enumerate(kept.boxes):
            number = xxhash.xxh3_64_intdigest(f"{kept.section}/{kept.key}/{box}".encode())
            names[number] = f"{kept.section}.{kept.key}"
            rows.append((number, xxhash.xxh3_64_intdigest(tensor_bytes(_sample(part.view(i))))))
    gathered = comm.gather(np.array(rows, dtype=_BOXES).tobytes())
    told = None if gathered is None else _differing(gathered).tobytes()
    differing = {int(number) for number in np.frombuffer(comm.broadcast(told), dtype="<u8")}
    if not differing:
        return []
    mine = sorted({names[number] for number in differing if number in names})
    found = sorted({name for reply in comm.all_gather("\n".join(mine).encode()) for name in reply.decode().split("\n")})
    found = [name for name in found if name]
    if comm.rank == 0:
        _log.warning(
            "%d tensors differ between ranks that hold the same part of them; one rank's values are saved: %s%s. If they "
            "are parts of a larger tensor, name it in TrainState(shards=); if not, keep them equal or out of the state",
            len(found), ", ".join(found[:_MOST_NAMES]), ", …" if len(found) > _MOST_NAMES else "",
        )  # fmt: skip
    return found


def _sample(view: Tensor) -> Tensor:
    """The first values of a box."""
    while view.dim() > 1 and view.numel() > _SAMPLE_ELEMENTS:
        view = view[0]
    return view[:_SAMPLE_ELEMENTS] if view.dim() == 1 else view


def _differing(gathered: list[bytes]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Numbers of the boxes of which ranks gave different samples."""
    rows = np.unique(np.concatenate([np.frombuffer(reply, dtype=_BOXES) for reply in gathered]))
    boxes = rows["box"]  # sorted; a box stands once for each of its samples
    return np.unique(boxes[1:][boxes[1:] == boxes[:-1]])
