"""How fast the ranks of this machine talk to each other when nothing else runs: latency and bandwidth of each collective.

The same figures as a run records for each mesh axis (`titan-train report --trace`), so the two can be compared. Two ranks on
CPU, one per GPU where there are several. Pipeline stages do not meet in collectives: their messages are measured through the
transport that a run uses.
"""

import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.child_processes import interrupts_blocked, without_working_directory

_ROWS = "rows.json"
_SMALL, _LARGE, _CALLS = 64, {"cpu": 2**22, "cuda": 2**26}, 7  # bytes per rank; calls of each
_BETWEEN = (2**12, 2**16, 2**19, 2**22)  # further sizes of the table


_AXES = {
    "all-reduce": "dp_replicate, tp",
    "all-gather": "dp_shard, tp, cp",
    "reduce-scatter": "dp_shard, tp, cp",
    "all-to-all": "ep, cp",
    "send and recv": "cp",
    "stage to stage": "pp",
}


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One collective, or the messages between neighbouring pipeline stages, on the idle machine."""

    operation: str
    latency_us: float
    """Median time of a call of 64 bytes."""
    gb_s: float
    """What a rank sends per second in a large call (4 MiB a rank, 64 MiB on GPUs), the fastest of a few."""
    ranks: int
    device: str
    """cpu or cuda."""
    table: tuple[tuple[int, float], ...] = ()
    """Bytes of the whole message, and median seconds of a call with them."""

    @property
    def axes(self) -> str:
        """The mesh axes whose communication this is."""
        return _AXES[self.operation]


def measure_links() -> list[LinkSpeed]:
    """Start ranks on this machine, measure, end them.

    Raises:
        RuntimeError: The ranks could not meet within a minute or failed.
    """
    import torch

    gpus = torch.cuda.device_count()
    size = gpus if gpus > 1 else 2
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, size, gpus > 1, folder)) for rank in range(size)]
        found: list[tuple[str, float, float, list[tuple[int, float]]]] = []
        patience = 0.0  # with ranks that an interrupt or an error leaves behind
        try:
            with without_working_directory(), interrupts_blocked():
                for rank in ranks:
                    rank.start()
            ranks[0].join(120)
            rows = Path(folder) / _ROWS
            found = json.loads(rows.read_text()) if rows.is_file() else []
            patience = 10.0
        finally:
            for rank in (rank for rank in ranks if rank.pid is not None):
                rank.join(patience)
                if rank.is_alive():
                    rank.kill()
                    rank.join()
    if not found:
        raise RuntimeError(
            "two ranks on this machine could not talk to each other; see the error above, if there is one."
        )
    device = "cuda" if gpus > 1 else "cpu"
    return [LinkSpeed(name, us, rate, size, device, tuple((n, s) for n, s in times)) for name, us, rate, times in found]


def _rank(rank: int, size: int, gpus: bool, folder: str) -> None:
    import torch
    import torch.distributed as dist

    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder) / "store"), size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        "nccl" if gpus else "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    rows: list[tuple[str, float, float, list[tuple[int, float]]]] = []
    large_bytes = _LARGE[device.type]
    for name, make, parts in _operations(size, device):
        sizes = sorted({_SMALL, *(n for n in _BETWEEN if n < large_bytes), large_bytes})
        times = {n: _times(make, n, device) for n in sizes}
        small, large = statistics.median(times[_SMALL]), min(times[large_bytes])
        whole = 1 if name in ("all-reduce", "send and recv") else size
        table = [(whole * n, max(statistics.median(times[n]), 1e-9)) for n in sizes]
        rows.append((name, 1e6 * small, parts * large_bytes / max(large, 1e-9) / 1e9, table))
    small, large = _stage_times(rank, size, device)
    rows.append(("stage to stage", 1e6 * statistics.median(small), large_bytes / max(min(large), 1e-9) / 1e9, []))
    if rank == 0:
        (Path(folder) / _ROWS).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _operations(size: int, device: Any) -> list[tuple[str, Callable[[int], Callable[[], object]], float]]:
    """Name, what makes a call for some bytes per rank, and what a rank sends per byte of it."""
    import torch
    import torch.distributed as dist

    def part(count: int) -> Any:
        return torch.ones(count // 4, device=device)

    def gather(count: int) -> Callable[[], object]:
        mine, whole = part(count), part(size * count)
        return lambda: dist.all_gather_into_tensor(whole, mine)

    def scatter(count: int) -> Callable[[], object]:
        mine, whole = part(count), part(size * count)
        return lambda: dist.reduce_scatter_tensor(mine, whole)

    def reduce(count: int) -> Callable[[], object]:
        whole = part(count)
        return lambda: dist.all_reduce(whole)

    def exchange(count: int) -> Callable[[], object]:
        mine, theirs = part(size * count), part(size * count)
        return lambda: dist.all_to_all_single(theirs, mine)

    def ring(count: int) -> Callable[[], object]:
        rank, mine, theirs = dist.get_rank(), part(count), part(count)

        def call() -> None:
            ops = [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, theirs, (rank - 1) % size)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return call

    others = size - 1
    return [
        ("all-reduce", reduce, 2 * others / size),
        ("all-gather", gather, others),
        ("reduce-scatter", scatter, others),
        ("all-to-all", exchange, others),
        ("send and recv", ring, 1),
    ]


def _stage_times(rank: int, size: int, device: Any) -> tuple[list[float], list[float]]:
    """Seconds of messages between the first two stages, small and large: half of each way there and back."""
    import torch
    from titan_pipeline.runtime import DeviceTransport, host_transport
    from torch.distributed.device_mesh import init_device_mesh

    if device.type == "cpu":
        transport = host_transport()
    else:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("pp",))
        transport = DeviceTransport(mesh, "pp", range(size), device, timeout_s=60)
    # by rank: the keys of its messages, an activation for stage 1 and its gradient for stage 0, and where they go
    keys = [[(kind, target, n) for n in range(_CALLS + 1)] for kind, target in ((0, 1), (1, 0))]

    def make(count: int) -> Callable[[], object]:
        hidden = (torch.ones(count // 4, device=device),)
        taking_part = rank < 2
        transport.begin(
            {1 - rank: keys[1 - rank]} if taking_part else {}, {1 - rank: _CALLS + 1} if taking_part else {}
        )
        turns = iter(range(_CALLS + 1))

        def call() -> None:
            turn = next(turns)
            if rank == 0:
                transport.send(1, keys[0][turn], hidden)
            if taking_part:
                transport.receive(1 - rank, keys[1 - rank][turn])
            if rank == 1:
                transport.send(0, keys[1][turn], hidden)

        return call

    found: list[list[float]] = []
    for count in (_SMALL, _LARGE[device.type]):
        found.append([seconds / 2 for seconds in _times(make, count, device)])
        transport.close_step(None, ())
    return found[0], found[1]


def _times(make: Callable[[int], Callable[[], object]], count: int, device: Any) -> list[float]:
    import torch

    call = make(count)
    found: list[float] = []
    for _ in range(_CALLS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found[1:]  # the first connects
