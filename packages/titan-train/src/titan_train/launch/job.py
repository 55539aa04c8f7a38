"""What the supervisor and every launcher share: an attempt, its ranks, how they end. No torch.

A launcher says how many ranks could run and starts an attempt; the job it returns is watched by the one loop of
`titan_train.launch.supervise.supervisor`, which alone decides what happens next.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from titan_train.config import Config
from titan_train.launch.rank.heartbeat import Beat
from titan_train.launch.rank.info import DeviceType, RankInfo
from titan_train.launch.rank.orders import Order


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all ranks."""

    number: int
    """From 0; the same on every machine."""
    config: Config
    """What the ranks train, its degrees fit for ``world_size``."""
    run_dir: Path
    world_size: int


@dataclass(frozen=True, slots=True)
class RankJob:
    """All that one rank receives."""

    config_toml: str
    run_dir: str
    board: str
    """A folder on the rank's machine where its heartbeat lies and its orders come from."""
    attempt: int
    ranks: RankInfo


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one rank ended."""

    rank: int
    code: int | None
    """0 for success, minus the signal's number if it was killed; None if its node is gone or the code is unknown."""
    note: str = ""
    """What else the launcher knows, such as that the node was lost."""


class RunningJob(Protocol):
    """The running ranks of one attempt."""

    def exits(self, timeout_s: float) -> list[RankExit]:
        """The ranks that ended since the last call; waits for one up to ``timeout_s`` seconds."""
        ...

    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of every rank that has one and whose node answers."""
        ...

    def order(self, order: Order) -> None:
        """Pass an order on to every rank."""
        ...

    def node_of(self, rank: int) -> str:
        """Where a rank runs, in words."""
        ...

    def end(self) -> None:
        """Kill what still runs and free what the attempt held. Safe to call twice.

        Raises:
            RuntimeError: A rank cannot be killed; the message names it.
        """
        ...


class Launcher(Protocol):
    """Something that can start ranks."""

    device: DeviceType

    def capacity(self) -> int:
        """Ranks that could run now."""
        ...

    def validate(self, config: Config, world_size: int) -> None:
        """Refuse what the model cannot do on this many ranks, before any of them starts.

        Raises:
            ValueError: The configuration cannot work.
        """
        ...

    def start(self, attempt: Attempt) -> RunningJob:
        """Start all ranks of an attempt.

        Raises:
            ValueError: They cannot run; the message says what is missing.
        """
        ...

    def adopt(self, run_dir: Path) -> tuple[Attempt, RunningJob] | None:
        """The attempt that a supervisor before this one left running; None if its ranks ended with it."""
        return None

    def close(self, exit_code: int = 1) -> None:
        """Give back everything, also what keeps restarts fast; nothing where that ends with this process."""
