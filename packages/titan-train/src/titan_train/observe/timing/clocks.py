"""How far the clocks of machines, and of their traces, are apart.

`clock_offset`, before a trace: the ranks exchange the time a few times. A message takes at least its latency, so the smallest
difference in each direction bounds the offset from both sides, and its middle is off by at most half a round trip.

`errors_of_clocks`, after it: a clock may be set while a run goes on, and hosts may share a name, so that the exchange misses
something. A collective ends on no rank before it has begun on every rank. So each one that two ranks have in common bounds
from both sides how far their clocks are apart. A clock within all bounds is left alone; one outside of them is moved to their
middle, right to about half of the shortest collective. Ranks that share no collective of an axis with others (a pipeline's
stages only send) are not compared with them. An accelerator's collective ends later than the call that waits for it; traces
with those are not compared.
"""

import socket
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_EXCHANGES = 8
_MEET = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")

Call = tuple[str, float, float]
"""Name with the axis, start and end of a collective on one rank."""


def clock_offset(device: "torch.device", group: "dist.ProcessGroup | None" = None) -> float:
    """Seconds that this rank's clock is ahead of that of the group's first rank. Collective; 0 where all share a machine.

    Args:
        device: Where the group communicates.
        group: All ranks by default.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return 0.0
    if "gloo" in dist.get_backend(group):  # a device's collective has not arrived when its call returns
        device = torch.device("cpu")
    size = dist.get_world_size(group)
    host = float(zlib.crc32(socket.gethostname().encode()))
    arrivals: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []
    for _ in range(_EXCHANGES):
        dist.barrier(group)
        mine = torch.tensor([time.time(), host], dtype=torch.float64, device=device)
        every = mine.new_empty(2 * size)
        dist.all_gather_into_tensor(every, mine, group=group)
        arrivals.append(torch.tensor([time.time()], dtype=torch.float64, device=device))
        sent.append(every.view(size, 2))
    if len({row[1].item() for row in sent[0]}) == 1:
        return 0.0
    # how much later than it was sent, by the two clocks, each rank's time arrived here, and here's arrived there
    here = torch.stack([arrival - times[:, 0] for arrival, times in zip(arrivals, sent, strict=True)]).min(0).values
    every = here.new_empty(size * size)
    dist.all_gather_into_tensor(every, here, group=group)
    delays = every.view(size, size)  # [at, from]
    rank = dist.get_rank(group)
    return float((delays[rank, 0] - delays[0, rank]) / 2)


def calls_of(events: Iterable[Mapping[str, Any]]) -> list[Call]:
    """The collectives of one rank's trace that were waited for as soon as they were started, in order."""
    found: list[Call] = []
    labelled = [e for e in events if "dur" in e and str(e["name"]).count(" ") == 1]
    labelled.sort(key=lambda e: float(e["ts"]))
    open_calls = 0
    for event, following in zip(labelled, [*labelled[1:], {"name": ""}], strict=False):
        axis, operation = str(event["name"]).split()
        if operation == "wait":
            open_calls = max(0, open_calls - 1)
        elif operation in _MEET:
            if open_calls == 0 and following["name"] == f"{axis} wait" and following["tid"] == event["tid"]:
                found.append((event["name"], float(event["ts"]), float(following["ts"]) + float(following["dur"])))
            open_calls += 1
    return found


def errors_of_clocks(
    calls: Mapping[int, Sequence[Call]], groups: Mapping[str, Iterable[Sequence[int]]]
) -> dict[int, float]:
    """How far ahead of the first rank's clock each other clock is, where collectives prove it wrong; in the calls' unit.

    Args:
        calls: Each rank's.
        groups: Ranks of each group, by axis.
    """
    pairs = [(axis, a, b) for axis in groups for group in groups[axis] for a in group for b in group if a != b]
    ahead = {min(calls): 0.0}
    found = True
    while found:
        found = False
        for axis, known, other in pairs:
            if known not in ahead or other in ahead:
                continue
            bounds = _bounds(axis, calls[known], calls[other])
            if bounds is not None:
                low, high = (bound + ahead[known] for bound in bounds)
                ahead[other] = 0.0 if low <= 0 <= high else (low + high) / 2
                found = True
    return {rank: value for rank, value in ahead.items() if value}


def _bounds(axis: str, mine: Sequence[Call], other: Sequence[Call]) -> tuple[float, float] | None:
    """Between which bounds the other clock is ahead of mine; None without one in common."""
    low, high = float("-inf"), float("inf")
    for name in {call[0] for call in mine if call[0].startswith(f"{axis} ")}:
        here, there = ([call for call in calls if call[0] == name] for calls in (mine, other))
        if len(here) != len(there):  # not the same collectives
            continue
        for (_, start, end), (_, other_start, other_end) in zip(here, there, strict=True):
            low, high = max(low, other_start - end), min(high, other_end - start)
    return (low, high) if float("-inf") < low <= high else None
