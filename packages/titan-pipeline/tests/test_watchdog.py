"""A rank that hangs is named on every rank, with its action, within the time-out; slow ranks are left alone."""

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

from titan_pipeline import build_schedule  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    Executor,
    GlooTransport,
    PipelineAborted,
    ThreadHub,
    TiedWeight,
    TorchStage,
    clip_grad_norm,
    host_transport,
)
from torch import nn  # noqa: E402

TIMEOUT_S = 1.0


class Slow(nn.Linear):
    """Takes its time in one forward."""

    def __init__(self, wait):
        super().__init__(3, 3)
        self.wait, self.calls = wait, 0

    def forward(self, x):
        self.calls += 1
        self.wait(self.calls)
        return super().forward(x)


def build_executor(schedule, transport, wait, at=1, **options):
    def nothing(calls):
        return None

    stages = [
        TorchStage(Slow(wait if s == at else nothing), s, loss=nn.functional.mse_loss)
        for s in schedule.stages_of(transport.rank)
    ]
    return Executor(schedule, stages, transport, **options)


def step(executor, m):
    data = [torch.ones(2, 3)] * m
    return executor.step(data, data)


def test_a_rank_that_hangs_in_its_stage_is_named_on_every_rank(caplog):
    schedule = build_schedule("1f1b", 3, 4)
    stuck, free = threading.Event(), threading.Event()

    def wait(calls):
        if calls == 2:
            stuck.set()
            free.wait()

    errors = {}

    def work(transport):
        executor = build_executor(schedule, transport, wait, hang_timeout_s=TIMEOUT_S)
        try:
            step(executor, 4)
        except PipelineAborted as err:
            errors[transport.rank] = err
            if len(errors) == 2:  # both that wait for it; its own thread may look a tenth of the time-out later
                threading.Timer(TIMEOUT_S, free.set).start()
        with pytest.raises(RuntimeError, match="There is no next step: restart the job"):
            executor.reset()

    with caplog.at_level(logging.ERROR, "titan_pipeline"):
        ThreadHub(3).run(work)
    assert sorted(errors) == [0, 1, 2]
    for err in errors.values():
        assert err.failure.hung
        assert err.failure.rank == 1
        assert err.failure.action == "1F1"
        assert "rank 1 hangs at action 1F1" in str(err)
        assert "no rank has made progress for 1 s, and it computes" in str(err)
        assert "rank 2 waits at 2F1 for rank 1" in str(err)
        assert "restart the job" in str(err)
    assert "free.wait()" in caplog.text  # its own stack


class Gone:
    """A board whose process has died."""

    def get(self, key):
        raise RuntimeError("Broken pipe")

    set = get


def test_without_the_board_a_rank_that_waits_gives_up_after_the_time_limit():
    schedule = build_schedule("1f1b", 2, 2)
    free, errors = threading.Event(), {}

    def work(transport):
        transport.board = Gone()
        executor = build_executor(schedule, transport, lambda calls: free.wait(30), at=0, hang_timeout_s=TIMEOUT_S)
        with pytest.raises(PipelineAborted) as caught:
            step(executor, 2)
        errors[transport.rank] = caught.value.failure
        free.set()

    ThreadHub(2).run(work)
    assert errors[0].hung  # by its own watchdog, or by the news from rank 1
    assert (errors[1].rank, errors[1].hung) == (1, True)
    assert "no progress for 1 s and waits for rank 0. Which rank holds it up is unknown" in errors[1].error


def test_a_slow_rank_is_left_alone():
    schedule = build_schedule("1f1b", 2, 6)
    work = ThreadHub(2).run(
        lambda transport: (
            step(build_executor(schedule, transport, lambda calls: time.sleep(0.4), hang_timeout_s=TIMEOUT_S), 6).loss
        )
    )  # longer than the time-out together, though not each
    assert work[0] == work[1]


def test_a_rank_that_does_not_come_to_the_step_is_named():
    schedule = build_schedule("gpipe", 2, 2)
    free = threading.Event()
    errors = {}

    def work(transport):
        executor = build_executor(schedule, transport, lambda calls: None, hang_timeout_s=TIMEOUT_S)
        if transport.rank == 0:
            free.wait()
        try:
            step(executor, 2)
        except PipelineAborted as err:
            errors[transport.rank] = str(err)
            free.set()

    ThreadHub(2).run(work)
    assert len(errors) == 2
    for text in errors.values():
        assert "rank 0 hangs outside of its actions: no rank has made progress for 1 s, and it has not begun" in text


def test_a_rank_that_others_wait_for_with_a_tied_weight_is_named():
    schedule = build_schedule("zb_h1", 2, 2)
    free = threading.Event()
    errors, waits = {}, []

    def work(transport):
        def finish(module):
            if transport.rank == 1:
                free.wait()

        stages = [TorchStage(nn.Linear(3, 3), transport.rank, loss=nn.functional.mse_loss, finish=finish)]
        tied = [TiedWeight({0: "weight", 1: "weight"})]
        executor = Executor(schedule, stages, transport, tied=tied, hang_timeout_s=TIMEOUT_S)
        if transport.rank == 0:
            executor.around = lambda action: waits.append(action) or contextlib.nullcontext()
        with pytest.raises(PipelineAborted) as caught:
            step(executor, 2)
        errors[transport.rank] = caught.value.failure
        threading.Timer(TIMEOUT_S, free.set).start()

    ThreadHub(2).run(work)
    for failure in (errors[0], errors[1]):
        assert (failure.rank, failure.action) == (1, "the reduction after 1W1")
        assert "rank 0 waits after its actions, for a tied weight's gradient, for rank 1" in failure.error
    assert waits[-2:] == [None, None]  # for the gradient, and for all ranks


def test_a_rank_that_does_not_come_to_the_clip_is_named():
    schedule = build_schedule("gpipe", 2, 2)
    free = threading.Event()
    errors = {}

    def work(transport):
        executor = build_executor(schedule, transport, lambda calls: None, hang_timeout_s=TIMEOUT_S)
        step(executor, 2)
        if transport.rank == 0:
            free.wait()
        with pytest.raises(PipelineAborted) as caught:
            clip_grad_norm(executor, 1.0)
        errors[transport.rank] = caught.value.failure
        threading.Timer(TIMEOUT_S, free.set).start()  # its own thread may look a tenth of the time-out later

    ThreadHub(2).run(work)
    for failure in (errors[0], errors[1]):
        assert failure.hung
        assert failure.rank == 0
        assert "it has not come to where all ranks meet" in failure.error


@pytest.mark.parametrize(
    ("make", "how", "words"),
    [
        (GlooTransport, "stop", "its process does not answer any more"),
        (host_transport, "sleep", "hangs at action 1F1"),
        (host_transport, "stop", "its process does not answer any more"),
    ],
)
def test_processes_name_a_rank_that_hangs_and_one_that_is_stopped(make, how, words, tmp_path):
    testing.run_ranks(_hang, 3, make, how, str(tmp_path), allow_death=True, timeout_s=60)
    for rank in (0, 2):
        took, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert "rank 1 hangs" in text
        assert words in text
        assert float(took) < 10 * TIMEOUT_S


def _hang(make, how, folder):
    transport = make()
    schedule = build_schedule("1f1b", 3, 4)

    def wait(calls):
        if calls == 2:
            pid = os.getpid()
            if how == "stop" and os.fork():  # the child ends what nobody else would
                os.kill(pid, signal.SIGSTOP)
            time.sleep(6 * TIMEOUT_S)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)

    executor = build_executor(schedule, transport, wait, hang_timeout_s=TIMEOUT_S)
    began = time.monotonic()
    with pytest.raises(PipelineAborted) as caught:
        step(executor, 4)
    Path(folder, str(transport.rank)).write_text(f"{time.monotonic() - began} {caught.value}")
    os._exit(0)  # no rank will meet the others again


def test_the_time_out_is_checked():
    with pytest.raises(ValueError, match="give seconds above 0, or None"):
        Executor(build_schedule("gpipe", 1, 1), [TorchStage(nn.Linear(1, 1), 0)], hang_timeout_s=0)
