"""Name the rank that hangs, instead of waiting for it without a word.

Problem: a rank that is stuck (in a collective, a lock, a data loader) keeps its neighbours waiting, they keep theirs, and
the whole job stands still until some time-out of another library names the wrong rank.

Idea: one thread per rank looks now and then whether its rank moves through its program, and writes what it sees on a board
that all ranks can read: a store of torch.distributed, or a dict for threads. A rank that has stood still for the time-out
reads the board. As long as anyone moves, it waits on. If nobody does, somebody is not waiting for a message: this rank is
the one that hangs. The verdict goes on the board, every rank stops waiting and raises `PipelineAborted` with it. The
rank that hangs cannot be interrupted; its thread logs where it stands, and it raises too, should it ever come back.
Where the board itself fails, as the process that holds it has died, each rank gives up when it has stood still so long.

The ranks cannot meet any more after that, so `Executor.reset` refuses: restart the job. Actions cost nothing extra.
"""

import json
import logging
import sys
import threading
import time
import traceback
import weakref
from typing import Any, NamedTuple, Protocol

from titan_pipeline.runtime.transport.base import StatusBoard
from titan_pipeline.runtime.transport.messages import PeerFailure

_logger = logging.getLogger("titan_pipeline")
_VERDICT = "hang"
_ABSENT = {"step": "it has not begun the step", "meet": "it has not come to where all ranks meet"}


class Progress(Protocol):
    """What the watchdog looks at: a step's state."""

    position: int
    """Index of the current action; -1 outside."""
    waiting: int
    """Rank whose message the step waits for; -1 while it computes."""


class Watched(Protocol):
    """What the watchdog needs of a transport."""

    rank: int
    num_ranks: int

    @property
    def board(self) -> StatusBoard | None:
        """Where every rank writes what it does."""
        ...

    def give_up(self, failure: PeerFailure) -> None:
        """Stop waiting for anybody."""
        ...


class RankStatus(NamedTuple):
    """What one rank's watchdog wrote."""

    beat: int
    """Grows with every look."""
    begun: int
    """Steps and meetings that the rank has come to: all ranks come to the same ones."""
    phase: str
    """``"idle"`` between steps, ``"step"``, or ``"meet"`` where all ranks meet."""
    position: int
    action: str
    waiting: int
    still_s: float
    """Seconds without a change of the fields above."""


class Watchdog:
    """Watches one rank. `step`, `meet` and `rest` say what the rank does.

    Args:
        transport: To the other ranks.
        timeout_s: Seconds without any progress on any rank after which the ranks give up.
    """

    def __init__(self, transport: Watched, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._phase = "idle"
        self._begun = 0
        self._run: Progress | None = None
        self._where: Any = None
        self._main = threading.get_ident()
        self._seen: tuple[Any, ...] = ()
        self._since = time.monotonic()
        self._beat = 0
        self._others: dict[int, tuple[int, float]] = {}
        self._has_board = True
        self._ended = threading.Event()
        if transport.board is not None and transport.num_ranks > 1:
            period = min(5.0, timeout_s / 10)
            thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._ended, period), name="pipeline-watchdog", daemon=True
            )
            weakref.finalize(self, self._ended.set)
            thread.start()

    def step(self, run: Progress, where: Any) -> None:
        """A step begins; ``where(position)`` gives the position in the program and the name of the action."""
        self._main = threading.get_ident()
        self._begun += 1
        self._run, self._where, self._phase = run, where, "step"

    def meet(self) -> None:
        """The rank waits for all others."""
        self._main = threading.get_ident()
        self._begun += 1
        self._phase = "meet"

    def rest(self) -> None:
        """The rank is outside of the pipeline."""
        self._phase, self._run = "idle", None

    def look(self) -> bool:
        """One look, in the thread. False when there is nothing more to watch."""
        status = self._status()
        try:
            verdict = self._read(status) if self._has_board else self._alone(status)
        except RuntimeError:  # the process that holds the board has died, or the job is ending
            self._has_board, verdict = False, None
        if verdict is None:
            return True
        rank, position, action, error = json.loads(verdict)
        if rank == self._transport.rank:
            frame = sys._current_frames().get(self._main)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            _logger.error("rank %d hangs at %s: %s. Its stack:\n%s", rank, action or "no action", error, stack)
        self._transport.give_up(PeerFailure(rank, position, action, error, hung=True))
        return False

    def _read(self, mine: RankStatus) -> str | None:
        """Write on the board what this rank does; the verdict that stands there, or that this look finds."""
        board = self._transport.board
        assert board is not None
        verdict = board.get(_VERDICT)
        board.set(f"rank{self._transport.rank}", json.dumps(mine))
        if verdict is None and mine.phase != "idle" and mine.still_s >= 0.5 * self._timeout_s:
            rows = self._observed(board, mine)
            if mine.still_s >= self._timeout_s:
                verdict = self._judge(rows, mine)
            if verdict is not None:
                board.set(_VERDICT, verdict)
        return verdict

    def _alone(self, mine: RankStatus) -> str | None:
        """Without a board nobody knows who hangs, and nothing else limits how long a message may take."""
        if mine.phase == "idle" or mine.still_s < self._timeout_s:
            return None
        doing = f"waits for rank {mine.waiting}" if mine.waiting >= 0 else "computes"
        error = (
            f"it has made no progress for {self._timeout_s:g} s and {doing if mine.phase == 'step' else 'waits for all ranks'}. "
            "Which rank holds it up is unknown: the store of torch.distributed does not answer, so its process has probably died"
        )
        return json.dumps([self._transport.rank, mine.position, mine.action, error])

    def _status(self) -> RankStatus:
        run, phase = self._run, self._phase
        position, action = self._where(run.position) if run is not None and phase == "step" else (-1, "")
        waiting = run.waiting if run is not None and phase == "step" else -1
        seen = (self._begun, phase, position, action, waiting)
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        self._beat += 1
        return RankStatus(self._beat, *seen, now - self._since)

    def _observed(self, board: StatusBoard, mine: RankStatus) -> dict[int, RankStatus]:
        """What every rank wrote, and when it last wrote something new."""
        now = time.monotonic()
        rows: dict[int, RankStatus] = {}
        for rank in range(self._transport.num_ranks):
            text = board.get(f"rank{rank}")
            row = RankStatus(0, 0, "idle", -1, "", -1, mine.still_s) if text is None else RankStatus(*json.loads(text))
            rows[rank] = row
            if self._others.get(rank, (-1, now))[0] != row.beat:
                self._others[rank] = (row.beat, now)
        return rows

    def _judge(self, rows: dict[int, RankStatus], mine: RankStatus) -> str | None:
        """Who hangs, as text; None while anybody moves."""
        now = time.monotonic()
        others = [r for r in rows if r != self._transport.rank]
        silent = [r for r in others if now - self._others[r][1] >= 0.4 * self._timeout_s]
        moving = [
            r for r in others if rows[r].still_s < self._timeout_s and rows[r].phase != "idle" and r not in silent
        ]
        return None if moving else self._named(rows, silent, mine)

    def _named(self, rows: dict[int, RankStatus], silent: list[int], mine: RankStatus) -> str | None:
        computing = [r for r, row in rows.items() if row.phase == "step" and row.waiting < 0 and r not in silent]
        late = [r for r, row in rows.items() if row.phase == "idle" and row.begun < mine.begun]
        waiting = [r for r, row in rows.items() if row.waiting >= 0]
        peers = ", ".join(
            f"rank {r} waits {_place(rows[r].action)} for rank {rows[r].waiting}" for r in waiting if r not in silent
        )
        if computing:
            rank, error = computing[0], "it computes"
        elif silent:
            rank, error = silent[0], "its process does not answer any more"
        elif late:
            rank, error = late[0], _ABSENT[mine.phase]
        elif waiting:
            rank, error = waiting[0], f"it waits for a message of rank {rows[waiting[0]].waiting}"
        else:
            return None
        row = rows[rank]
        text = f"no rank has made progress for {self._timeout_s:g} s, and {error}"
        return json.dumps([rank, row.position, row.action, f"{text} ({peers})" if peers else text])


def _place(action: str) -> str:
    return f"at {action}" if action else "after its actions, for a tied weight's gradient,"


def _watch(watchdog: "weakref.ref[Watchdog]", ended: threading.Event, period: float) -> None:
    while not ended.wait(period):
        alive = watchdog()
        if alive is None or not alive.look():
            return
        del alive
