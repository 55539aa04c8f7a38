"""Compare replicas: ranks that hold the same box of a tensor should hold the same values, since one rank's are saved."""

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
    """Names of tensors whose values differ between ranks that hold the same box; rank 0 logs them. Collective."""
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
    reply = None if gathered is None else _differing(gathered).tobytes()
    differing = {int(number) for number in np.frombuffer(comm.broadcast(reply), dtype="<u8")}
    if not differing:
        return []
    mine = sorted({names[number] for number in differing if number in names})
    found = sorted({name for reply in comm.all_gather("\n".join(mine).encode()) for name in reply.decode().split("\n")})
    found = [name for name in found if name]
    if comm.rank == 0:
        _log.warning(
            "%d tensors differ between ranks that hold the same part of them; one rank's values are saved: %s%s. If each "
            "is a part of a larger tensor, describe it in TrainState(shards=). Otherwise make them equal or leave them out",
            len(found), ", ".join(found[:_MOST_NAMES]), ", …" if len(found) > _MOST_NAMES else "",
        )  # fmt: skip
    return found


def _sample(view: Tensor) -> Tensor:
    """The first values of a box."""
    while view.dim() > 1 and view.numel() > _SAMPLE_ELEMENTS:
        view = view[0]
    return view[:_SAMPLE_ELEMENTS] if view.dim() == 1 else view


def _differing(gathered: list[bytes]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Numbers of the boxes for which ranks have different samples."""
    rows = np.unique(np.concatenate([np.frombuffer(reply, dtype=_BOXES) for reply in gathered]))
    boxes = rows["box"]  # sorted; a box appears once per distinct sample
    return np.unique(boxes[1:][boxes[1:] == boxes[:-1]])
