"""A device's own time, divided over phases and mesh axes by events on its streams.

Problem: on a GPU, collectives and kernels are queued: their calls return at once. A clock of the host around them says that
a gigabyte moves in 50 microseconds, that all communication is hidden, and that a throttled GPU is as quick as the others.

Idea: `StepTimer`'s marks become events on the stream that computes. What lies between two of them is the device's time: of a
phase, or of an axis where the stream waited for a collective. A collective's own events lie on the stream that it is issued
on. Torch's FSDP issues on streams of its own, and has the computing one wait for an event behind the collective: such an
event carries the axis. (No weak reference to it: torch 2.11 frees a CUDA event and leaves those to it dangling, and the next
garbage collection crashes.) All are read when a window ends, behind its last step; nothing waits inside of a step.

Cost: two or three events per collective, a few microseconds of the host, in about five steps of a window. A window's figures
are those of these steps.

Limits: as of `collectives`; DistributedDataParallel's and compiled code's collectives start in C++ and count as compute. While
a CUDA graph is captured or replayed nothing inside of it is seen. A collective found finished has no known duration.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

_SAMPLES = 5
"""Steps of a window that are measured."""
_WAITED_S = 5e-6
"""A stream that waited shorter than this found the collective finished, but for the events' own time."""


class Streams(Protocol):
    """What is asked of the device's runtime."""

    def event(self) -> Any:
        """A new event with time; it has ``record()``, ``elapsed_time(later)`` in milliseconds and ``synchronize()``."""
        ...

    def current(self) -> int:
        """The number of this thread's current stream."""
        ...

    def capturing(self) -> bool:
        """Whether that stream is being captured into a graph, which no event with time may be part of."""
        ...


class CudaStreams:
    """CUDA's, through torch."""

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def current(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class _Span(NamedTuple):
    """One collective, by its events."""

    axis: str
    began: Any
    asked: Any
    """Before the wait; None of one that the stream waits for at once."""
    ended: Any
    sent_bytes: float
    timed: bool
    beside: bool
    """Issued on another stream than the one that computes."""


@dataclass(slots=True)
class DeviceAxis:
    """What the sampled steps of a window say of one axis."""

    calls: int = 0
    sent_bytes: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    durations: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Seconds and bytes of the calls whose duration is known."""


class DeviceTimeline:
    """Events of one rank's sampled steps.

    Args:
        streams: The device's.
        every: Steps of a window.
    """

    def __init__(self, streams: Streams, every: int) -> None:
        self._streams = streams
        self.windows = 0
        """Windows that have ended. Events of an earlier one are useless: they are recorded again."""
        self._stride = max(1, every // _SAMPLES)
        self._compute = -1
        self._steps: list[list[tuple[Any, str]]] = []
        self._open: list[tuple[Any, str]] | None = None
        self._spans: list[_Span] = []
        self._counts: dict[str, DeviceAxis] = {}
        self._free: list[Any] = []
        self._used: list[Any] = []
        self._beside: dict[int, str] = {}
        """The axis of the last collective on each stream that does not compute."""

    def begin(self, label: str) -> None:
        """Begin a window, on the stream that computes."""
        self._compute = self._streams.current()
        self._begin_step(0, label)

    def end(self) -> None:
        """Measure no more until the next `begin`."""
        self._open = None

    def step_made(self, steps: int, label: str) -> None:
        """End a step, the ``steps``-th of the window, and begin the next."""
        self._end_step()
        self._begin_step(steps, label)

    def sampling(self) -> bool:
        """Whether what happens now is to be measured."""
        return self._open is not None and not self._streams.capturing()

    def event(self) -> Any:
        """An event recorded on the current stream."""
        event = self._free.pop() if self._free else self._streams.event()
        self._used.append(event)
        event.record()
        return event

    def mark(self, label: str) -> Any:
        """From here on the device's time belongs to ``label``, a phase or ``axis:tp``; other streams do not count."""
        if self._open is None or self._streams.capturing():
            return None
        event = self.event()
        if self._streams.current() == self._compute:
            self._open.append((event, label))
        return event

    def span(self, axis: str, began: Any, asked: Any, ended: Any, sent_bytes: float, *, timed: bool) -> None:
        """Take a collective that was issued at ``began``, waited for from ``asked`` on and over at ``ended``."""
        if began is None or ended is None:  # a graph was captured meanwhile
            return
        beside = self._streams.current() != self._compute
        self._spans.append(_Span(axis, began, asked, ended, sent_bytes, timed, beside))

    def called(self, axis: str, sent_bytes: float) -> None:
        """Count a collective of a sampled step."""
        totals = self._counts.setdefault(axis, DeviceAxis())
        totals.calls += 1
        totals.sent_bytes += sent_bytes
        stream = self._streams.current()
        if stream != self._compute:
            self._beside[stream] = axis

    @contextmanager
    def watching(self, stream_class: Any, top: Callable[[], str], counts: Callable[[], bool]) -> Generator[None]:
        """Inside the block, see where the computing stream waits for events behind collectives.

        Args:
            stream_class: `torch.cuda.Stream`.
            top: The phase at hand.
            counts: Whether a wait is part of a step.
        """
        record, wait = stream_class.record_event, stream_class.wait_event

        def recorded(stream: Any, event: Any = None) -> Any:
            made = record(stream, event)
            axis = self._beside.get(stream.cuda_stream)
            if axis is not None:
                with suppress(AttributeError):  # torch.Event takes none
                    made.titan_behind = axis
            return made

        def waited(stream: Any, event: Any) -> Any:
            axis = getattr(event, "titan_behind", None) if stream.cuda_stream == self._compute else None
            if axis is None or not self.sampling() or not counts():
                return wait(stream, event)
            self.mark(f"axis:{axis}")
            result = wait(stream, event)
            self.mark(top())
            return result

        stream_class.record_event, stream_class.wait_event = recorded, waited
        try:
            yield
        finally:
            stream_class.record_event, stream_class.wait_event = record, wait

    def take(self, label: str) -> tuple[list[dict[str, float]], dict[str, DeviceAxis]]:
        """End the window and begin the next. Waits for the device.

        Returns:
            Seconds by label of each sampled step, and what is known of each axis.
        """
        self._open = None  # a step that has not ended
        steps = [self._seconds(marks) for marks in self._steps]
        axes = self._counts
        for seconds in steps:
            for name in [name for name in seconds if name.startswith("axis:")]:
                axes.setdefault(name[5:], DeviceAxis()).exposed_s += seconds[name]
        beside: dict[str, float] = {}
        for span in self._spans:
            span.ended.synchronize()
            totals = axes.setdefault(span.axis, DeviceAxis())
            seconds = _between(span.began, span.ended)
            blocked = seconds if span.asked is None else _between(span.asked, span.ended)
            if span.beside:
                beside[span.axis] = beside.get(span.axis, 0.0) + seconds
            elif span.asked is not None:
                totals.hidden_s += seconds - blocked
            if span.timed and blocked > _WAITED_S:
                totals.durations.append((seconds, span.sent_bytes))
        for axis, seconds in beside.items():
            axes[axis].hidden_s += max(0.0, seconds - axes[axis].exposed_s)
        self._steps, self._spans, self._counts = [], [], {}
        self._free += self._used
        self._used = []
        self.windows += 1
        self._begin_step(0, label)
        return steps, axes

    def _begin_step(self, steps: int, label: str) -> None:
        self._open = None
        if steps % self._stride == 0 and not self._streams.capturing():
            self._open = []
            self.mark(label)

    def _end_step(self) -> None:
        if self._open is not None:
            self.mark("")
            self._steps.append(self._open)

    def _seconds(self, marks: list[tuple[Any, str]]) -> dict[str, float]:
        found: dict[str, float] = {}
        marks[-1][0].synchronize()
        for (began, label), (ended, _) in pairwise(marks):
            found[label] = found.get(label, 0.0) + _between(began, ended)
        return found


def _between(began: Any, ended: Any) -> float:
    return 1e-3 * began.elapsed_time(ended)
