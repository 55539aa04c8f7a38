"""A step is recorded without waiting for the device, so that recording hangs no schedule where sends wait for receives."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from titan_pipeline import FAMILIES, build_schedule  # noqa: E402
from titan_pipeline.runtime import DeviceClock, Executor, ThreadHub, TorchStage  # noqa: E402
from titan_pipeline.runtime.transport.threads import ThreadTransport  # noqa: E402
from torch import nn  # noqa: E402


class Deadlock(Exception):
    """Every rank waits, and for nothing that will come."""


class RendezvousHub(ThreadHub):
    """Threads whose messages keep NCCL's rule: one has left only when its receiver has posted the receive, which it does when
    it needs the message. `wait_for_device` waits for all of a rank's, as every wait for a whole device does."""

    def __init__(self, num_ranks):
        super().__init__(num_ranks)
        self.changed = threading.Condition()
        self.sent, self.posted = [set() for _ in range(num_ranks)], set()
        self.waiting, self.stuck = {}, False

    def transport(self, rank):
        return RendezvousTransport(self, rank)

    def wait(self, rank, ready, meeting=False):
        with self.changed:
            self.waiting[rank] = ready, meeting
            waiting = self.waiting.values()
            if len(waiting) == self.num_ranks:
                if all(m for _, m in waiting):
                    self.waiting.clear()
                elif not any(r() for r, _ in waiting):
                    self.stuck = True
                self.changed.notify_all()
            if meeting:
                return
            while not ready() and not self.stuck:
                self.changed.wait()
            del self.waiting[rank]
            if self.stuck:
                raise Deadlock

    def wait_for_device(self, rank):
        self.wait(rank, lambda: self.sent[rank] <= self.posted)


class RendezvousTransport(ThreadTransport):
    def send(self, target, key, payload):
        with self._hub.changed:
            self._hub.sent[self.rank].add((self.rank, target, key))
            super().send(target, key, payload)
            self._hub.changed.notify_all()

    def receive(self, source, key):
        self._hub.wait(self.rank, lambda: (source, key) in self._receiver.arrived)
        with self._hub.changed:
            self._hub.posted.add((source, self.rank, key))
            self._hub.changed.notify_all()
        return super().receive(source, key)

    def close_step(self, failure, values):
        if failure is None:
            self._hub.wait(self.rank, lambda: False, meeting=True)
        return super().close_step(failure, values)


class WaitingClock:
    """What the executor did before: it waits for the device at every mark."""

    def __init__(self, hub, rank):
        self.wait = lambda: hub.wait_for_device(rank)

    def mark(self):
        self.wait()
        return time.time()

    def times(self, marks):
        return marks


class Event:
    """An event of a device whose time runs a thousand seconds ahead; to wait for it is to wait for the device."""

    waits = 0

    def __init__(self, device, *, enable_timing):
        assert enable_timing
        self.at = None

    def record(self, stream):
        self.at = time.perf_counter() + 1000

    def synchronize(self):
        Event.waits += 1

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def trace(schedule, clock_of):
    hub = RendezvousHub(schedule.num_ranks)
    data = [torch.ones(1, 2)] * schedule.num_microbatches

    def work(transport):
        stages = [
            TorchStage(nn.Linear(2, 2), s, loss=nn.functional.mse_loss) for s in schedule.stages_of(transport.rank)
        ]
        executor = Executor(
            schedule, stages, transport, trace=True, clock=clock_of(hub, transport.rank), hang_timeout_s=None
        )
        executor.step(data, data)
        return executor.measured()

    return hub.run(work)


def deadlocks(schedule, clock_of):
    try:
        trace(schedule, clock_of)
    except Exception as err:
        return isinstance(err, Deadlock) or "Deadlock" in str(err)
    return False


def test_a_clock_that_waits_for_the_device_hangs_nine_families_and_events_hang_none(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    schedules = [build_schedule(name, 4, 8) for name in FAMILIES]
    assert {s.name for s in schedules if deadlocks(s, WaitingClock)} == {
        "interleaved_1f1b", "looped_bfs", "zb_h2", "interleaved_zb", "zbv", "zb_auto", "v_half", "1f1b_v", "dualpipe_v",
    }  # fmt: skip
    for schedule in schedules:
        assert not deadlocks(schedule, lambda hub, rank: DeviceClock(torch.device("cuda", 0)))


def test_events_are_read_after_the_step_and_put_on_the_clock_of_the_host(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    waits = []

    class Noting(nn.Linear):
        def forward(self, x):
            waits.append(Event.waits)
            time.sleep(0.002)
            return super().forward(x)

    Event.waits = 0
    schedule = build_schedule("zb_h1", 1, 3)
    stage = TorchStage(Noting(2, 2), 0, loss=nn.functional.mse_loss)
    executor = Executor(schedule, [stage], trace=True, clock=DeviceClock(torch.device("cuda", 0)))
    data = [torch.ones(1, 2)] * 3
    before = time.time()
    executor.step(data, data)
    after = time.time()
    assert waits == [0, 0, 0]
    assert Event.waits == 1  # for the last event alone
    assert [span.action for span in executor.spans] == list(schedule.ranks[0])
    assert before <= executor._began <= executor._began + executor.spans[-1].end <= after + 1e-3
    assert all(s.end - s.start >= 0.002 for s in executor.spans if s.action.kind.value == "F")
