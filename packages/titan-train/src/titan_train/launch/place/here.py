"""Launcher `local`: one node agent, in this process. Ranks meet through a file, so no port is opened.

A place (a GPU, or a CPU rank's number) whose rank was lost twice in a row, or that a `lose` fault took, stays out of use for
a while in elastic mode.
"""

import contextlib
import time

from titan_train.config import Config
from titan_train.config.faults import parse_faults, struck_file
from titan_train.files import parse_json
from titan_train.launch.job import Attempt, Launcher, RankExit
from titan_train.launch.node.agent import NodeAgent, NodeJob, NodeRanks
from titan_train.launch.rank.info import DeviceType


class LocalLauncher(Launcher):
    """Starts ranks on this machine."""

    def __init__(self, places: int, device: DeviceType) -> None:
        """Start the agent; it warms up in the background.

        Args:
            places: Ranks this machine can hold.
            device: "cpu", or "cuda" with one GPU a rank.
        """
        self.device: DeviceType = device
        self._places = _Places(places)
        self._agent = NodeAgent.sharing_cores(places, device)

    def capacity(self) -> int:
        """Places in use or free to use."""
        return len(self._places.usable())

    def validate(self, config: Config, world_size: int) -> None:
        """See `titan_train.launch.job.Launcher`."""
        self._agent.validate(config, world_size)

    def start(self, attempt: Attempt) -> "LocalJob":
        """Start all ranks of an attempt."""
        return LocalJob(self._agent, attempt, self._places, self.device)


class LocalJob(NodeRanks):
    """The ranks of one attempt."""

    def __init__(self, agent: NodeAgent, attempt: Attempt, places: "_Places", device: DeviceType) -> None:
        self._places = places
        self._attempt = attempt
        self._used = tuple(places.usable()[: attempt.world_size])
        super().__init__(agent, NodeJob.of(attempt, 0, attempt.world_size, device, places=self._used))

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.RunningJob`."""
        found = super().exits(timeout_s)
        for exit in found:
            if exit.code is not None and exit.code < 0:
                self._places.lost(self._used[exit.rank], self._attempt, exit.rank)
        return found

    def node_of(self, rank: int) -> str:
        """Where on this machine."""
        return f"place {self._used[rank]} of this machine"


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
        if not launch.elastic or len(self.usable()) <= launch.min_ranks:  # the last places stay in use
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
