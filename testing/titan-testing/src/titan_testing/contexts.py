"""Which CUDA devices a thread would open a context on: torch's own stream and device guards over stand-ins for the C calls.

A context takes about 0.5 GB of device memory. c10's rules: a new thread is on device 0; ``set_device``, the entry of
``torch.cuda.device`` and ``set_stream`` switch the device for real, which opens a context (CUDA 12 and later); leaving
``torch.cuda.device`` only notes a device that has none.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class FakeContexts:
    """Devices with a context, and the current device of every thread."""

    opened: set[int] = field(default_factory=set[int])
    _threads: Any = field(default_factory=threading.local)

    def current(self) -> int:
        """The calling thread's device."""
        noted = getattr(self._threads, "noted", None)
        return getattr(self._threads, "real", 0) if noted is None else noted

    def switch(self, device: int) -> int:
        """``cudaSetDevice``; returns the device before."""
        before = self.current()
        self._threads.noted = None
        if device != getattr(self._threads, "real", 0):
            self._threads.real = device
            self.opened.add(device)
        return before

    def leave(self, device: int) -> int:
        """Go back to ``device``, in name only where it has no context."""
        before = self.current()
        if device in self.opened:
            self.switch(device)
        else:
            self._threads.noted = device
        return before


class _Stream:
    """A stream's identity, and calls that do nothing."""

    stream_id, device_type = 7, 1

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_index = device, device.index

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


def fake_contexts(monkeypatch: Any) -> FakeContexts:
    """Put the stand-ins under ``torch.cuda``, for as long as ``monkeypatch`` lasts."""
    contexts = FakeContexts()

    def index(device: Any = None, optional: bool = False, allow_cpu: bool = False) -> int:
        if device is None:
            return contexts.current()
        return device if isinstance(device, int) else torch.device(device).index

    def new_stream(device: torch.device) -> _Stream:
        with torch.cuda.device(device):
            return _Stream(device)

    def set_stream(stream: Any) -> None:
        if contexts.current() != stream.device_index:
            contexts.switch(stream.device_index)

    class Event:
        def record(self, stream: Any = None) -> None: ...
        def synchronize(self) -> None: ...

    for name, value in {
        "_get_device_index": index,
        "_exchange_device": lambda device: contexts.switch(device) if device >= 0 else -1,
        "_maybe_exchange_device": lambda device: contexts.leave(device) if device >= 0 else -1,
        "set_device": lambda device: contexts.switch(index(device)),
        "current_device": contexts.current,
        "current_stream": lambda device=None: _Stream(torch.device("cuda", index(device))),
        "set_stream": set_stream,
        "Stream": new_stream,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return contexts
