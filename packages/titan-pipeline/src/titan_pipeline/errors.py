"""The errors this package raises on purpose."""

from collections.abc import Sequence
from typing import Any


class ScheduleError(ValueError):
    """A schedule that cannot run as written.

    Attributes:
        code: What is wrong, one word a program can test: ``wrong_rank``, ``out_of_range``, ``duplicate``, ``missing``,
            ``order``, ``fifo``, ``deadlock``, ``memory``, ``needless_comm``, ``format``.
        rank: The rank whose program holds the fault, where one can be named.
        index: Position of the fault in that rank's program.
        action: The action at that position.
        cycle: For ``deadlock``: the actions that wait for each other, as ``(rank, index, action)``, first one repeated
            last.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        rank: int | None = None,
        index: int | None = None,
        action: Any = None,
        cycle: Sequence[tuple[int, int, Any]] = (),
    ) -> None:
        place = ""
        if rank is not None:
            place += f" at rank {rank}"
            if index is not None:
                place += f", position {index}"
            if action is not None:
                place += f" ({action})"
        if cycle:
            message += " Cycle: " + " -> ".join(f"rank {r} #{i} {a}" for r, i, a in cycle)
        super().__init__(f"[{code}]{place}: {message}")
        self.code = code
        self.rank = rank
        self.index = index
        self.action = action
        self.cycle = tuple(cycle)
