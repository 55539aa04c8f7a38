"""A rank's time, divided over phases.

Idea: one mark and a stack of phases. Each time a phase begins or ends, the time since the mark goes to the phase on top,
so every moment counts once and the phases add up to the whole. Time in which the rank waits in a collective is taken out
of the phase around it and counted for the collective's mesh axis.

Cost: two readings of a clock per phase, about a microsecond.

On a GPU the host runs ahead, and its time says nothing. There each mark is an event too, and a window's figures are the
device's (see `device`), but for saves and validations; one in which no step was measured has the host's phases, and no
figure of an axis.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan_train.observe.timing.device import DeviceAxis, DeviceTimeline

PHASES = ("forward", "backward", "optimizer", "data", "checkpoint", "validation", "host")
"""What a rank's own time is divided into; host is all that is not one of the others."""
_APART = ("checkpoint", "validation")  # their collectives are part of them


@dataclass(slots=True)
class AxisTotals:
    """Communication of one rank on one mesh axis."""

    calls: int = 0
    sent_bytes: float = 0.0
    """What this rank sends, as the usual algorithms do it: an all-reduce of n bytes sends 2 (k - 1) / k * n."""
    exposed_s: float = 0.0
    """The rank did nothing else: starting and waiting, also for ranks that come later."""
    moving_s: float = 0.0
    """The part of a pipeline's exposed time in which a message was on its way; in the rest a neighbour computes."""
    hidden_s: float = 0.0
    """Under way while the rank computed. An operation found finished counts until it was asked for, so this is at most."""
    latency_s: float = 0.0
    """The shortest call; 0 if none was waited for."""
    bytes_per_s: float = 0.0
    """The bandwidth of the fastest call, one that no rank came late to."""

    def add_call(self, seconds: float, sent_bytes: float) -> None:
        """Take the duration of one call, from its start to its end."""
        if seconds > 0:
            self.latency_s = min(self.latency_s, seconds) if self.latency_s else seconds
            self.bytes_per_s = max(self.bytes_per_s, sent_bytes / seconds)


@dataclass(frozen=True, slots=True)
class Window:
    """What one rank did in the steps since the window before."""

    steps: int
    wall_s: float
    phases: dict[str, float]
    """Seconds by phase, waiting for other ranks left out."""
    axes: dict[str, AxisTotals]
    low: dict[str, float]
    """Seconds of a phase that a quarter of the steps stayed below."""
    high: dict[str, float]
    """Seconds of a phase that a quarter of the steps took longer than."""


@dataclass(slots=True)
class StepTimer:
    """Divides the time of one rank. Off until `start`."""

    clock: Callable[[], float] = time.perf_counter
    device: "DeviceTimeline | None" = None
    """Measures a GPU's own time; None where the host does the work."""
    steps: int = 0
    """Steps since the last window."""
    running: bool = False
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    axes: dict[str, AxisTotals] = field(default_factory=dict[str, AxisTotals])
    delays: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds to add to each call or message on an axis: the fault ``slow-link``."""
    _by_step: list[list[float]] = field(default_factory=list[list[float]])
    _before: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    _stack: list[str] = field(default_factory=lambda: ["host"])
    _mark: float = 0.0
    _began: float = 0.0
    _thread: int = 0
    waits: bool = False
    """Inside a block of `waiting`, whose collectives are not counted a second time."""
    _waited_s: float = 0.0
    _waits_since: float = 0.0

    def start(self) -> None:
        """Begin a window; the calling thread is the one whose time is divided."""
        self._began = self._mark = self.clock()
        self._thread = threading.get_ident()
        self.running = True
        self._reset()
        if self.device is not None:
            self.device.begin(self.top)

    @property
    def top(self) -> str:
        """The phase at hand."""
        return self._stack[-1]

    def phase(self, name: str) -> "_Phase":
        """A block whose time goes to the phase ``name``, one of `PHASES`; blocks may lie in each other."""
        return _Phase(self, name)

    def waiting(self, axis: str) -> "_Waiting":
        """A block in which the rank waits for others on ``axis``."""
        return _Waiting(self, axis)

    @contextmanager
    def transfer(self, axis: str, num_bytes: int) -> Generator[None]:
        """A block, in any thread, in which a message comes in: exposed where the rank waits meanwhile, else hidden."""
        began, waited_s = self.clock(), self._waited()
        self.delay(axis)
        yield
        if not self.running or self._stack[-1] in _APART:
            return
        seconds = self.clock() - began
        waited_s = min(seconds, max(0.0, self._waited() - waited_s))
        totals = self.totals(axis)
        totals.moving_s += waited_s
        totals.hidden_s += seconds - waited_s
        totals.add_call(seconds, num_bytes)

    def delay(self, axis: str) -> None:
        """Take the time that a slow link on the axis is to add."""
        if self.delays:
            time.sleep(self.delays.get(axis, 0.0))

    def _waited(self) -> float:
        """Seconds spent in blocks of `waiting` until now."""
        return self._waited_s + (self.clock() - self._waits_since if self.waits else 0.0)

    def totals(self, axis: str) -> AxisTotals:
        """One axis, in this window."""
        totals = self.axes.get(axis)
        if totals is None:
            totals = self.axes[axis] = AxisTotals()
        return totals

    def waited(self, axis: str, seconds: float) -> AxisTotals:
        """Take ``seconds`` that just passed out of the phase on top: the rank was in a collective on ``axis``."""
        totals = self.totals(axis)
        totals.exposed_s += seconds
        self.phases[self._stack[-1]] -= seconds
        return totals

    def counts_here(self) -> bool:
        """Whether a collective that begins now is part of a step: on this thread, or on autograd's in a backward."""
        top = self._stack[-1]
        if not self.running or top in _APART or self.waits:
            return False
        if threading.get_ident() == self._thread:
            return True
        return top == "backward" and threading.current_thread().name.startswith(
            "Dummy-"
        )  # one that Python did not start

    def take(self) -> Window:
        """End the window and begin the next."""
        now = self.clock()
        self._add(now)
        mean = [self.phases[name] / max(1, self.steps) for name in PHASES]
        columns = [sorted(values) for values in zip(*(self._by_step or [mean]), strict=True)]
        low, high = ({n: _quantile(c, q) for n, c in zip(PHASES, columns, strict=True)} for q in (0.25, 0.75))
        window = Window(self.steps, now - self._began, self.phases, self.axes, low, high)
        self._began = now
        self._reset()
        return window if self.device is None else _device_window(window, *self.device.take(self.top))

    def step_made(self) -> None:
        """Count a step that has ended."""
        if not self.running:
            return
        self._add(self.clock())
        now = [self.phases[name] for name in PHASES]
        self._by_step.append([after - before for after, before in zip(now, self._before, strict=True)])
        self._before = now
        self.steps += 1
        if self.device is not None:
            self.device.step_made(self.steps, self.top)

    def _reset(self) -> None:
        self.steps = 0
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.axes = {}
        self._by_step, self._before = [], [0.0] * len(PHASES)

    def stop(self) -> None:
        """Divide no more time until the next `start`."""
        self.running = False
        if self.device is not None:
            self.device.end()

    def _add(self, now: float) -> None:
        self.phases[self._stack[-1]] += now - self._mark
        self._mark = now

    def enter(self, name: str) -> None:
        """Begin a phase; `phase` does it as a block."""
        self._add(self.clock())
        top = self._stack[-1]
        self._stack.append(top if top in _APART else name)
        self._mark_device(self.top)

    def leave(self) -> None:
        """End the phase that began last."""
        self._add(self.clock())
        self._stack.pop()
        self._mark_device(self.top)

    def begin_wait(self, axis: str) -> None:
        """Begin to wait; `waiting` does it as a block."""
        self._waits_since, self.waits = self.clock(), True
        self._mark_device(f"axis:{axis}")

    def end_wait(self, axis: str) -> None:
        """End the wait."""
        seconds = self.clock() - self._waits_since
        self._waited_s += seconds
        self.waits = False
        self.waited(axis, seconds)
        self._mark_device(self.top)

    def _mark_device(self, label: str) -> None:
        if self.device is not None and self.running:
            self.device.mark(label)


def _device_window(host: Window, steps: "list[dict[str, float]]", axes: "dict[str, DeviceAxis]") -> Window:
    """The window as the device saw its sampled steps; without any, the host's, and no figure of an axis.

    Phases apart are the host's, which waits in them: they come once in many steps, and always in a sampled one where they
    follow the last step of a window.
    """
    if not steps:
        return Window(host.steps, host.wall_s, host.phases, {}, host.low, host.high)
    columns = {name: sorted(step.get(name, 0.0) for step in steps) for name in PHASES}
    apart = {name: host.phases[name] * len(steps) / max(1, host.steps) for name in _APART}
    quarters = [{name: _quantile(column, q) for name, column in columns.items()} for q in (0.25, 0.75)]
    totals: dict[str, AxisTotals] = {}
    for axis, found in axes.items():
        totals[axis] = AxisTotals(found.calls, found.sent_bytes, found.exposed_s, hidden_s=found.hidden_s)
        for seconds, sent_bytes in found.durations:
            totals[axis].add_call(seconds, sent_bytes)
    return Window(
        len(steps),
        sum(seconds for step in steps for name, seconds in step.items() if name not in _APART) + sum(apart.values()),
        {name: sum(column) for name, column in columns.items()} | apart,
        totals,
        *(
            of_device | {n: of_host[n] for n in _APART}
            for of_device, of_host in zip(quarters, (host.low, host.high), strict=True)
        ),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest of some values in rising order."""
    at = share * (len(ordered) - 1)
    below = int(at)
    return ordered[below] + (at - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


class _Phase:
    __slots__ = ("_name", "_timer")

    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._timer.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._timer.leave()


class _Waiting:
    __slots__ = ("_axis", "_counts", "_timer")

    def __init__(self, timer: StepTimer, axis: str) -> None:
        self._timer = timer
        self._axis = axis

    def __enter__(self) -> None:
        self._counts = self._timer.counts_here()
        if self._counts:
            self._timer.begin_wait(self._axis)

    def __exit__(self, *_: object) -> None:
        if self._counts:
            self._timer.end_wait(self._axis)
