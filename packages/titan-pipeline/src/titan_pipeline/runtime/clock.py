"""When the actions of a step ran, without waiting for any of them.

Problem: an accelerator computes after the host has gone on, so the host's time says nothing. To wait for the device around
each action would: but a device waits for *all* that is queued on it, and a message of NCCL leaves only when its receiver
has posted the receive. Two ranks that each wait for their own messages before they go on then stand still for ever, in nine
of thirteen families.

Idea: on an accelerator an event is queued between the actions, and read when the step is over and all ranks have met. The
last event's time on the device and on the host are then known together, which puts all of them on the host's clock.

Limits: the times are those of the stream that computes: what a stage runs on streams of its own counts from when this one
waits for it. An event costs about a microsecond.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Gives marks while a step runs, and their times when it is over."""

    def mark(self) -> Any:
        """Now. Never waits for a device."""
        ...

    def times(self, marks: Sequence[Any]) -> list[float]:
        """Seconds since the epoch of each mark, in order. Called after the step; may wait for the last of them."""
        ...


class HostClock:
    """For stages whose actions have ended when they return, as those on the CPU."""

    def mark(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def times(self, marks: Sequence[float]) -> list[float]:
        """See `Clock`."""
        ahead = time.time() - time.perf_counter()
        return [mark + ahead for mark in marks]


class DeviceClock:
    """For stages on an accelerator: events on the stream that computes.

    Args:
        device: The accelerator; its current stream is where stages run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        """See `Clock`."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def times(self, marks: Sequence[torch.Event]) -> list[float]:
        """See `Clock`."""
        last = self.mark()
        last.synchronize()
        now = time.time()
        return [now - mark.elapsed_time(last) / 1e3 for mark in marks]
