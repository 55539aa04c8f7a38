"""Launcher `local`: all ranks on this machine, forked from a server that has imported torch.

Ranks meet through a file, so no port is opened. A place (a GPU, or a CPU rank's number) whose rank was lost twice in a
row, or that a `lose` fault took, stays out of use for a while in elastic mode.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

from titan_train.config import Config, dump_config
from titan_train.config.faults import parse_faults, struck_file
from titan_train.files import parse_json
from titan_train.launch.job import Attempt, RankExit, RankJob
from titan_train.launch.launchers.forked import ForkedRanks, ForkServer
from titan_train.launch.rank.heartbeat import Beat
from titan_train.launch.rank.info import DeviceType, RankInfo
from titan_train.launch.rank.orders import Order
from titan_train.run_folder.temporary import owned_folder


class LocalLauncher:
    """Starts ranks on this machine."""

    def __init__(self, places: int, device: DeviceType) -> None:
        """Start the server that imports torch; it warms up in the background.

        Args:
            places: Ranks this machine can hold.
            device: "cpu", or "cuda" with one GPU a rank.
        """
        self.device: DeviceType = device
        self._places = _Places(places)
        # Ranks share the cores; more threads than cores make every one of them slower.
        self._server = ForkServer(max(1, (os.cpu_count() or 1) // places) if device == "cpu" else 1)

    def capacity(self) -> int:
        """Places in use or free to use."""
        return len(self._places.usable())

    def validate(self, config: Config, world_size: int) -> None:
        """See `titan_train.launch.job.Launcher`."""
        self._server.validate(config, world_size)

    def start(self, attempt: Attempt) -> "LocalJob":
        """Start all ranks of an attempt."""
        return LocalJob(self._server, attempt, self._places, self.device)

    def adopt(self, run_dir: Path) -> None:
        """None: the ranks end with the process that started them."""

    def close(self, exit_code: int = 1) -> None:
        """Nothing to give back: the server ends with this process."""


class LocalJob:
    """The ranks of one attempt."""

    def __init__(self, server: ForkServer, attempt: Attempt, places: "_Places", device: DeviceType) -> None:
        self._places = places
        self._attempt = attempt
        self._used = places.usable()[: attempt.world_size]
        size, text = attempt.world_size, dump_config(attempt.config)
        self._rendezvous = owned_folder("titan-train-")
        store = str(self._rendezvous / "store")
        jobs = [
            RankJob(text, str(attempt.run_dir), "", attempt.number, RankInfo(rank, place, size, size, device, store))
            for rank, place in enumerate(self._used)
        ]
        self._ranks = ForkedRanks(server, jobs, log_rank_0=False)

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.RunningJob`."""
        found = self._ranks.exits(timeout_s)
        for exit in found:
            if exit.code is not None and exit.code < 0:
                self._places.lost(self._used[exit.rank], self._attempt, exit.rank)
        return found

    def beats(self) -> dict[int, Beat]:
        """See `titan_train.launch.job.RunningJob`."""
        return self._ranks.beats()

    def order(self, order: Order) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        self._ranks.order(order)

    def node_of(self, rank: int) -> str:
        """Where on this machine."""
        return f"place {self._used[rank]} of this machine"

    def end(self) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        self._ranks.end()
        shutil.rmtree(self._rendezvous, ignore_errors=True)


class _Places:
    """Which places of this machine can be used, and which lost their rank."""

    def __init__(self, count: int) -> None:
        self._out_until = [0.0] * count
        self._last: int | None = None

    def usable(self) -> list[int]:
        now = time.monotonic()
        return [place for place, until in enumerate(self._out_until) if until <= now]

    def lost(self, place: int, attempt: Attempt, rank: int) -> None:
        launch = attempt.config.launch
        if not launch.elastic:
            return
        seconds = _asked_for(attempt, rank)
        if self._last == place:
            seconds = max(seconds, launch.rejoin_s)
        self._out_until[place] = time.monotonic() + seconds if seconds else 0.0
        self._last = place


def _asked_for(attempt: Attempt, rank: int) -> float:
    """Seconds that a `lose` fault which struck a moment ago asked for."""
    for fault in parse_faults(attempt.config.launch.faults):
        file = struck_file(attempt.run_dir, fault)
        if fault.kind == "lose" and fault.rank == rank and file.exists():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                struck = float(parse_json(file.read_text(encoding="utf-8"))["time"])
                if time.time() - struck < fault.seconds:
                    return fault.seconds
    return 0.0
