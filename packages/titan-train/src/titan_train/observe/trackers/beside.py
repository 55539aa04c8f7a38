"""A tracker on a thread of its own: a run neither waits for a dashboard's server nor ends with it.

Opening a tracker, or one request of it, may take minutes when its server is down. So the training loop only leaves its
records here. What fails is opened again later, after one warning; records wait for it, the newest ones. `metrics.jsonl` has
no such grace: a disk that cannot take it cannot take a checkpoint either.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from titan_train.observe.jsonl import FILE_NAME
from titan_train.observe.records import StepRecord, Tracker, ValidationRecord

log = logging.getLogger(__name__)

_MOST_RECORDS = 10_000  # about 10 MB
_RETRY_S = (30.0, 900.0)  # the first wait, which doubles, and the longest
_CLOSE_S = 30.0


class TrackerBeside:
    """Hands every record on to a tracker, in order."""

    def __init__(
        self, name: str, open_: Callable[[int], Tracker], resume_step: int, *, retry_s: tuple[float, float] = _RETRY_S
    ) -> None:
        """Start the thread, which opens the tracker.

        Args:
            name: Of the tracker, for messages.
            open_: Opens it for a run that continues from the given step.
            resume_step: Of the run.
            retry_s: Seconds until the first new try, and the most between two.
        """
        self._name = name
        self._open = open_
        self._step = resume_step  # the last one that the tracker took
        self._retry_s, self._longest_s = retry_s
        self._calls: deque[tuple[int, Callable[[Tracker], None]]] = deque(maxlen=_MOST_RECORDS)
        self._changed = threading.Condition()
        self._closing = False
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log_step(self, record: StepRecord) -> None:
        """Leave a step."""
        self._leave(record.step, lambda tracker: tracker.log_step(record))

    def log_validation(self, record: ValidationRecord) -> None:
        """Leave a validation."""
        self._leave(record.step, lambda tracker: tracker.log_validation(record))

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Leave an event."""
        self._leave(step, lambda tracker: tracker.log_event(kind, step=step, **fields))

    def close(self) -> None:
        """Wait until the tracker has taken what was left and is closed, 30 s at most. Safe to call twice."""
        if self._closing:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(
                "slow", f"did not end within {_CLOSE_S:g} s; it may lack the last records, which {FILE_NAME} has"
            )

    def _leave(self, step: int, call: Callable[[Tracker], None]) -> None:
        with self._changed:
            if len(self._calls) == _MOST_RECORDS:
                self._warn(
                    "full", f"is {_MOST_RECORDS:,} records behind; it will lack the oldest, which {FILE_NAME} has"
                )
            self._calls.append((step, call))
            self._changed.notify()

    def _run(self) -> None:
        wait_s = self._retry_s
        while True:
            tracker: Tracker | None = None
            try:
                tracker = self._open(self._step)
                if "failed" in self._told:
                    log.info("%s is back", self._name)
                self._hand_on(tracker)
                return
            except BaseException as err:  # whatever a third party's client raises, the run goes on
                reason = " ".join(str(err).split())[:300] or type(err).__name__
                self._warn("failed", f"failed and is opened again later; the run goes on without it: {reason}")
                if tracker is not None:
                    with contextlib.suppress(BaseException):
                        tracker.close()
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, wait_s):
                    return
            wait_s = min(2 * wait_s, self._longest_s)

    def _hand_on(self, tracker: Tracker) -> None:
        """Until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing)
                if not self._calls:
                    break
                step, call = self._calls.popleft()
            call(tracker)
            self._step = max(self._step, step)
        tracker.close()

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.warning("%s %s", self._name, what)
