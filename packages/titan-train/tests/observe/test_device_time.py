"""A GPU's own time, on streams that keep CUDA's order and a clock that only passes when told to.

A call on the host takes microseconds and queues work; a stream runs it later, one piece after the other; a collective of NCCL
runs on a stream of its own, from when its last rank has come.
"""

import pytest
import torch
from titan_mesh import Layout, MeshSpec
from titan_train.observe.timing import Place, StepTimer, combine, find_causes
from titan_train.observe.timing import collectives as collectives_module
from titan_train.observe.timing.collectives import CollectiveMeter
from titan_train.observe.timing.device import DeviceTimeline

CALL_S = 5e-6  # of the host
GIGABYTE = 2**28  # elements of float32
LINK = 100e9  # bytes per second
STARTS_S = 20e-6


class Gpu:
    """One rank's device and host."""

    def __init__(self, slowdown=1.0):
        self.host = 100.0
        self.busy = {}  # stream -> when it has done all that is queued
        self.stream = 0
        self.slowdown = slowdown
        self.synchronized = 0

    def __call__(self):
        return self.host

    def compute(self, seconds):
        self.host += CALL_S
        self.busy[self.stream] = self.at(self.stream) + seconds * self.slowdown

    def at(self, stream):
        return max(self.busy.get(stream, 0.0), self.host)

    def wait(self, stream, until):
        self.host += CALL_S
        self.busy[stream] = max(self.at(stream), until)

    # what DeviceTimeline asks
    def event(self):
        return Event(self)

    def current(self):
        return self.stream

    def capturing(self):
        return False


class Event:
    """torch.cuda.Event as of torch 2.11, which leaves weak references to it dangling: it takes none."""

    __slots__ = ("__dict__",)

    def __init__(self, gpu):
        self.gpu = gpu

    def record(self, stream=None):
        self.time = self.gpu.busy[self.gpu.stream if stream is None else stream.cuda_stream] = self.gpu.at(
            self.gpu.stream if stream is None else stream.cuda_stream
        )

    def elapsed_time(self, later):
        return 1e3 * (later.time - self.time)

    def synchronize(self):
        self.gpu.synchronized += 1


class Stream:
    """torch.cuda.Stream as FSDP uses it."""

    def __init__(self, gpu, number):
        self.gpu, self.cuda_stream = gpu, number

    def record_event(self, event=None):
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event):
        self.gpu.wait(self.cuda_stream, event.time)


class Ranks:
    """Two ranks that all-reduce, as NCCL does it."""

    def __init__(self, monkeypatch, slowdowns=(1.0, 1.0), *, device=True, axis="dp_shard", every=5):
        layout = Layout(MeshSpec.parse("dp2"))
        self.gpus = [Gpu(slow) for slow in slowdowns]
        self.place = Place(2, {axis: ((0, 1),)})
        self.meters = []
        for rank, gpu in enumerate(self.gpus):
            timer = StepTimer(clock=gpu, device=DeviceTimeline(gpu, every) if device else None)
            self.meters.append(CollectiveMeter(timer, layout, rank))
        self.link = LINK
        monkeypatch.setattr(CollectiveMeter, "axis_of", lambda *_: (axis, 2))
        for meter in self.meters:
            meter.timer.start()

    def clock_of(self, monkeypatch, rank):
        monkeypatch.setattr(collectives_module.time, "perf_counter", self.gpus[rank])

    def step(self, monkeypatch, forward_s=0.01, backward_s=0.02, between_s=0.0, tensor=None):
        """Forward, an all-reduce that runs beside ``between_s`` of compute, backward."""
        tensor = torch.empty(GIGABYTE, device="meta") if tensor is None else tensor
        begun = []
        for rank, gpu in enumerate(self.gpus):
            meter = self.meters[rank]
            self.clock_of(monkeypatch, rank)
            with meter.timer.phase("forward"):
                gpu.compute(forward_s)
                begun.append(self.issue(gpu, meter, tensor))
                if between_s:
                    gpu.compute(between_s)
        ends = max(gpu.queued for gpu in self.gpus) + STARTS_S + tensor.numel() * 4 / self.link
        for rank, (gpu, work) in enumerate(zip(self.gpus, begun, strict=True)):
            self.clock_of(monkeypatch, rank)
            meter = self.meters[rank]
            with meter.timer.phase("forward"):
                meter._waited(lambda _, gpu=gpu: gpu.wait(0, ends))(work)
            with meter.timer.phase("backward"):
                gpu.compute(backward_s)
            meter.timer.step_made()
            gpu.host = max(gpu.host, gpu.at(0))  # the loss is read

    def issue(self, gpu, meter, tensor):
        def queue(group, tensors):
            gpu.host += CALL_S
            gpu.queued = gpu.at(gpu.stream)  # NCCL's stream waits for the current one
            return Work()

        return meter._counted(queue, "all-reduce")(None, [tensor])

    def split(self, step=5):
        rows = [self.place.row(meter.timer.take(), 1.0) for meter in self.meters]
        return combine(step, self.place, rows)


class Work:
    def is_completed(self):
        return False


def test_a_links_bandwidth_and_latency_are_the_devices_not_the_calls(monkeypatch):
    found = {}
    for device in (False, True):
        ranks = Ranks(monkeypatch, device=device)
        for _ in range(5):
            ranks.step(monkeypatch)
            ranks.step(monkeypatch, tensor=torch.empty(8, device="meta"))
        found[device] = ranks.split().axes["dp_shard"]
    assert found[False].gb_s > 10_000  # the host's clock: the call and the wait return at once
    assert found[True].gb_s == pytest.approx(LINK / 1e9, rel=0.01)
    assert found[True].latency_us == pytest.approx(1e6 * STARTS_S, rel=0.05)


def test_what_runs_under_compute_is_hidden_and_the_rest_exposed(monkeypatch):
    ranks = Ranks(monkeypatch)
    for _ in range(5):
        ranks.step(monkeypatch, between_s=0.004)
    split = ranks.split()
    whole = STARTS_S + GIGABYTE * 4 / LINK
    axis = split.axes["dp_shard"]
    assert axis.hidden_s.median == pytest.approx(0.004, rel=0.01)
    assert axis.exposed_s.median == pytest.approx(whole - 0.004, rel=0.01)
    assert split.phases["forward"].median == pytest.approx(0.014, rel=0.01)
    assert split.phases["backward"].median == pytest.approx(0.02, rel=0.01)
    parts = sum(spread.median for spread in split.phases.values()) + axis.exposed_s.median
    assert parts == pytest.approx(split.wall_s.median)


def test_a_throttled_gpu_is_named_though_every_host_waits_alike(monkeypatch):
    causes = {}
    for device in (False, True):
        ranks = Ranks(monkeypatch, slowdowns=(1.0, 1.5), device=device)
        for _ in range(5):
            ranks.step(monkeypatch)
        causes[device] = find_causes(ranks.split(), ranks.place)
    assert not [cause for cause in causes[False] if cause.kind == "slow rank"]
    slow = [cause for cause in causes[True] if cause.kind == "slow rank"]
    assert {(cause.ranks, cause.part) for cause in slow} == {((1,), "backward")}


def test_a_slow_link_is_named_by_its_shortest_call(monkeypatch):
    ranks = Ranks(monkeypatch)
    ranks.link = LINK / 4
    for _ in range(5):
        ranks.step(monkeypatch)
    earlier = {("dp_shard", 0): STARTS_S + GIGABYTE * 4 / LINK}
    (cause,) = find_causes(ranks.split(), ranks.place, quickest=earlier)
    assert (cause.kind, cause.axis, cause.ranks) == ("slow link", "dp_shard", (0, 1))


def test_collectives_on_a_stream_of_fsdps_expose_what_the_computing_stream_waits(monkeypatch):
    """All-gathers run on a stream beside; the computing one waits for an event behind them."""
    gpu = Gpu()
    timer = StepTimer(clock=gpu, device=DeviceTimeline(gpu, 5))
    meter = CollectiveMeter(timer, Layout(MeshSpec.parse("dp2")), 0)
    monkeypatch.setattr(CollectiveMeter, "axis_of", lambda *_: ("dp_shard", 2))
    compute, beside, copies = Stream(gpu, 0), Stream(gpu, 7), Stream(gpu, 8)

    def gather(group, output, given):
        gpu.host += CALL_S
        gpu.busy[7] = gpu.at(7) + 0.010

    with timer.device.watching(Stream, lambda: timer.top, timer.counts_here):
        timer.start()
        for _ in range(5):
            with timer.phase("forward"):
                gpu.stream = 7
                meter._counted(gather, "all-gather")(None, torch.empty(8, device="meta"), torch.empty(4, device="meta"))
                done = beside.record_event()
                gpu.stream = 0
                gpu.compute(0.004)
                compute.wait_event(done)
                compute.wait_event(copies.record_event())  # of no collective
                gpu.compute(0.001)
            with timer.phase("validation"):  # its gathers are part of it
                gpu.busy[7] = gpu.at(7) + 0.010
                compute.wait_event(beside.record_event())
            timer.step_made()
            gpu.host = gpu.at(0)
        window = timer.take()
    axis = window.axes["dp_shard"]
    assert axis.exposed_s / 5 == pytest.approx(0.006, rel=0.01)
    assert axis.hidden_s / 5 == pytest.approx(0.004, rel=0.01)
    assert axis.latency_s == pytest.approx(0.010, rel=0.01)
    assert window.phases["forward"] / 5 == pytest.approx(0.005, rel=0.02)


@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_messages_that_nccl_collects_are_one_exchange(monkeypatch, axis):
    """As in the ring of attention: a block is on its way while the one before is used. A pipeline times its own waits."""
    gpu = Gpu()

    class Group:
        def send(self, tensors, peer, tag):
            gpu.host += CALL_S

        recv = send

        def _start_coalescing(self, device):
            gpu.host += CALL_S

        def _end_coalescing(self, device):
            gpu.host += CALL_S
            return Exchange(gpu.at(0) + 0.010)

    class Exchange(Work):
        def __init__(self, until):
            self.until = until

        def wait(self):
            gpu.wait(0, self.until)

    timer = StepTimer(clock=gpu, device=DeviceTimeline(gpu, 5))
    meter = CollectiveMeter(timer, Layout(MeshSpec.parse("dp2")), 0)
    monkeypatch.setattr(CollectiveMeter, "axis_of", lambda *_: (axis, 2))
    monkeypatch.setattr(torch.distributed, "ProcessGroup", Group)
    monkeypatch.setattr(torch.distributed, "Work", Exchange)
    group, mib = Group(), [torch.empty(2**18, device="meta")]
    with meter.installed():
        timer.start()
        for _ in range(5):
            with timer.phase("forward"):
                group._start_coalescing("cuda")
                group.send(mib, 1, 0)
                group.recv(mib, 1, 0)
                work = group._end_coalescing("cuda")
                gpu.compute(0.004)
                work.wait()
                gpu.compute(0.001)
            timer.step_made()
            gpu.host = gpu.at(0)
        window = timer.take()
    found = window.axes[axis]
    assert (found.calls, found.sent_bytes) == (5, 5 * 2**20)
    waits = (0.0, 0.0, 0.011) if axis == "pp" else (0.006, 0.004, 0.005)
    assert found.exposed_s / 5 == pytest.approx(waits[0], rel=0.01, abs=1e-4)
    assert found.hidden_s / 5 == pytest.approx(waits[1], rel=0.01, abs=1e-4)
    assert window.phases["forward"] / 5 == pytest.approx(waits[2], rel=0.02)
    assert found.latency_s == pytest.approx(0.0 if axis == "pp" else 0.010, rel=0.01)


def test_nothing_waits_for_the_device_before_a_window_ends_and_few_steps_are_measured(monkeypatch):
    ranks = Ranks(monkeypatch, every=20)
    for _ in range(20):
        ranks.step(monkeypatch)
        assert [gpu.synchronized for gpu in ranks.gpus] == [0, 0]
    window = ranks.meters[0].timer.take()
    assert window.steps == 5
    assert window.axes["dp_shard"].calls == 5
    assert ranks.gpus[0].synchronized > 0


def test_a_validation_after_the_last_step_of_a_window_counts_once_in_its_steps():
    gpu = Gpu()
    timer = StepTimer(clock=gpu, device=DeviceTimeline(gpu, 20))
    timer.start()
    for _ in range(20):
        with timer.phase("validation"):  # the first step is one of five that are measured
            if timer.steps == 0:
                gpu.compute(2.0)
                gpu.host = gpu.at(0)
        with timer.phase("forward"):
            gpu.compute(0.01)
        timer.step_made()
        gpu.host = gpu.at(0)
    window = timer.take()
    assert window.steps == 5
    assert window.phases["validation"] / 5 == pytest.approx(2.0 / 20, rel=0.01)
    assert window.wall_s / 5 == pytest.approx(0.01 + 2.0 / 20, rel=0.01)
    assert window.high["validation"] == pytest.approx(0.0, abs=1e-4)


def test_a_window_without_a_measured_step_has_no_figure_of_an_axis(monkeypatch):
    ranks = Ranks(monkeypatch)
    monkeypatch.setattr(Gpu, "capturing", lambda _: True)
    for meter in ranks.meters:
        meter.timer.take()
    for _ in range(3):
        ranks.step(monkeypatch)
    window = ranks.meters[0].timer.take()
    assert window.axes == {}
    assert window.wall_s > 0
    assert window.steps == 3


def test_a_timer_that_was_stopped_records_no_events():
    gpu = Gpu()
    timer = StepTimer(clock=gpu, device=DeviceTimeline(gpu, 0))
    timer.start()
    timer.step_made()
    timer.take()
    timer.stop()
    kept = len(timer.device._used)
    for _ in range(3):
        with timer.phase("forward"):
            gpu.compute(1.0)
        timer.step_made()
    assert not timer.device.sampling()
    assert (len(timer.device._used), timer.device._steps) == (kept, [])
    timer.start()
    with timer.phase("forward"):
        gpu.compute(1.0)
    timer.step_made()
    timer.stop()
    timer.start()  # a trace that begins at once ends the window before its first step
    assert timer.take().steps == 1
