"""How far the clocks of machines are apart.

Idea: the ranks exchange the time a few times. A message takes at least its latency, so the smallest difference in each
direction bounds the offset from both sides, and its middle is off by at most half a round trip.
"""

import socket
import time
import zlib

import torch
import torch.distributed as dist

_EXCHANGES = 8


def clock_offset(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Seconds that this rank's clock is ahead of that of the group's first rank. Collective; 0 where all share a machine.

    Args:
        device: Where the group communicates.
        group: All ranks by default.
    """
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
