"""All ranks compare notes before any of them enters a collective.

Problem: process groups are made by collectives. If one rank was given another layout, it waits for ranks that never
come, and everybody hangs until the time limit, half an hour by default, with no hint at the cause.

Idea: the store that ranks met through needs no group. Each rank writes its text and adds itself to a counter under its
digest; the last to arrive opens a gate; behind it, a rank whose digest does not count the whole world knows that texts
differ. Six store operations a rank when all is well; only on failure does each rank read all texts, to name who
differs.

What only matters where it is equal (``also``) is counted the same way: ranks learn whether it is, and nobody fails.

Limit: a rank that dies before it arrives looks like a slow one, until ``within`` has passed.
"""

import contextlib
import time
from collections import defaultdict
from datetime import timedelta

from titan_mesh.groups.torch_private import PrefixStore, Store
from titan_mesh.layout.explain import show_ranks

# Ranks that fail wait this long for the others to have read the texts too: rank 0 usually serves the store, and
# takes it away when it exits.
_LINGER_S = 1.0


def agree(store: Store, rank: int, world_size: int, digest: str, text: str, within: timedelta, also: str = "") -> bool:
    """Return if every rank came with the same ``digest``: whether all brought the same ``also`` too.

    Args:
        store: A store that all ranks share.
        rank: This rank.
        world_size: How many ranks must come.
        digest: What must be equal.
        text: What to show for it in an error.
        within: How long to wait for the last rank.
        also: What may differ.

    Raises:
        ValueError: Digests differ; the message lists which ranks brought which text. On every rank.
        RuntimeError: Some ranks did not come in time; the message lists them.
    """
    # The n-th call of each rank belongs together, without any state outside the store.
    call = PrefixStore(f"titan_mesh/{rank}", store).add("calls", 1)
    room = PrefixStore(f"titan_mesh/agree/{call}", store)
    room.set(f"text/{rank}", f"{digest}|{text}")
    room.add(f"count/{digest}", 1)
    room.add(f"also/{also}", 1)
    if room.add("arrived", 1) == world_size:
        room.set("gate", "open")
    try:
        room.wait(["gate"], within)
    except RuntimeError as err:  # every store's timeout error derives from it
        raise RuntimeError(_absent(room, world_size, within)) from err
    if room.add(f"count/{digest}", 0) != world_size:
        raise ValueError(_disagreement(room, world_size))
    return room.add(f"also/{also}", 0) == world_size


def _absent(room: Store, world_size: int, within: timedelta) -> str:
    texts = _texts(room, world_size)
    missing = [rank for rank in range(world_size) if rank not in texts]
    _linger(room, world_size - len(missing))
    message = (
        f"ranks {show_ranks(missing)} did not call build within {within.total_seconds():g} s of the others: they "
        "failed before it (look for their error), were given a layout that was rejected, or are slow. For slow "
        "ranks, raise agree_within."
    )
    if len({digest for digest, _ in texts.values()}) > 1:
        message += f" Those that came were given different layouts: {_by_text(texts)}."
    return message


def _disagreement(room: Store, world_size: int) -> str:
    texts = _texts(room, world_size)
    _linger(room, world_size)
    return f"ranks were given different layouts: {_by_text(texts)}. Give every rank the same spec and world size."


def _texts(room: Store, world_size: int) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for rank in range(world_size):
        if room.check([f"text/{rank}"]):
            digest, _, text = room.get(f"text/{rank}").decode().partition("|")
            found[rank] = (digest, text)
    return found


def _by_text(texts: dict[int, tuple[str, str]]) -> str:
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, brought in texts.items():
        ranks[brought].append(rank)
    return "; ".join(f"ranks {show_ranks(who)} have {text!r}" for (_, text), who in ranks.items())


def _linger(room: Store, readers: int) -> None:
    """Stay until ``readers`` ranks have read the texts, or a second has passed."""
    end = time.monotonic() + _LINGER_S
    with contextlib.suppress(RuntimeError):  # the store is gone: so are its readers
        count = room.add("read", 1)
        while count < readers and time.monotonic() < end:
            time.sleep(0.02)
            count = room.add("read", 0)
