"""Ranks with different schedules are refused everywhere in seconds; a searched schedule comes from rank 0."""

import logging
import time

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

from titan_pipeline import Costs, Schedule, build_schedule  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    Executor,
    GlooTransport,
    PipelineAborted,
    ThreadHub,
    TorchStage,
    host_transport,
    solve_on_rank0,
)
from torch import nn  # noqa: E402


def stages_for(schedule, rank, make=lambda: nn.Linear(2, 2)):
    return [TorchStage(make(), s, loss=nn.functional.mse_loss) for s in schedule.stages_of(rank)]


def differ(transport, swapped):
    """Rank 1 has another schedule of the same placement, from the start or from a swap."""
    ours, other = build_schedule("zb_h1", 2, 4), build_schedule("1f1b", 2, 4)
    stages = stages_for(ours, transport.rank)
    wrong = other if transport.rank == 1 else ours
    began = time.monotonic()
    said = "nothing"
    try:
        executor = Executor(ours if swapped else wrong, stages, transport)
        if swapped:
            executor.swap(wrong)
    except ValueError as err:
        said = str(err)
    took = time.monotonic() - began
    executor = Executor(ours, stages, transport)  # the transport is clean
    data = [torch.ones(1, 2)] * 4
    executor.step(data, data)
    return said, took


def _differ(swapped):
    return differ(GlooTransport(), swapped)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize("swapped", [False, True])
def test_different_schedules_are_refused_on_all_ranks(kind, swapped):
    results = (
        testing.run_ranks(_differ, 2, swapped) if kind == "gloo" else ThreadHub(2).run(lambda t: differ(t, swapped))
    )
    for rank, (said, took) in enumerate(results):
        assert took < 5
        assert "the ranks have different schedules (ranks [0]: digest" in said
        assert f"Rank {rank} has " + ("'1f1b'" if rank else "'zb_h1'") in said


def refuses(transport):
    """The middle one of three ranks holds the same stages in a loop and in a V, and has nothing against the swap."""
    loop, turned = build_schedule("interleaved_1f1b", 3, 6), build_schedule("zbv", 3, 6)
    executor = Executor(loop, stages_for(loop, transport.rank), transport, hang_timeout_s=45)
    with pytest.raises((ValueError, PipelineAborted), match="Build those, or use a schedule with this placement"):
        executor.swap(turned)
    assert all(stage.deferred_share == 0 for stage in executor.stages.values()), "not split, as before"
    data = [torch.ones(1, 2)] * 6
    return executor.step(data, data).loss


def _refuses():
    torch.manual_seed(0)
    return refuses(host_transport())


def test_a_swap_that_some_ranks_refuse_is_refused_on_all_and_changes_nothing():
    assert len(set(testing.run_ranks(_refuses, 3))) == 1
    assert len(set(ThreadHub(3).run(refuses))) == 1


def test_a_rank_that_cannot_run_its_schedule_stops_the_others_at_once():
    """The middle one of three ranks holds other stages than the schedule gives it."""
    schedule = build_schedule("1f1b", 3, 3)

    def build(transport):
        stages = stages_for(schedule, 0 if transport.rank == 1 else transport.rank)
        began = time.monotonic()
        with pytest.raises((ValueError, PipelineAborted), match="rank 1 holds stages") as got:
            Executor(schedule, stages, transport, hang_timeout_s=45)
        return got.type, time.monotonic() - began

    kinds, took = zip(*ThreadHub(3).run(build), strict=True)
    assert kinds == (PipelineAborted, ValueError, PipelineAborted)
    assert max(took) < 40  # not by the watchdog


def test_a_swapped_schedule_is_not_measured_by_the_step_before():
    """The program of the last rank is the same in both schedules."""
    schedule, gpipe = build_schedule("1f1b", 2, 4), build_schedule("gpipe", 2, 4)
    eager = Schedule("eager", 4, schedule.placement, (gpipe.ranks[0], schedule.ranks[1]))
    data = [torch.ones(1, 2)] * 4

    def work(transport):
        stages = stages_for(schedule, transport.rank)
        executor = Executor(schedule, stages, transport, trace=True, hang_timeout_s=45)
        executor.step(data, data)
        executor.swap(eager)
        with pytest.raises(RuntimeError, match="run a training step first"):
            executor.measured()

    ThreadHub(2).run(work)


def search(transport):
    costs = Costs.uniform(2) if transport.rank == 0 else None
    schedule = solve_on_rank0(transport, costs, 4, time_limit=0.2)
    executor = Executor(schedule, stages_for(schedule, transport.rank), transport)
    data = [torch.ones(1, 2)] * 4
    executor.step(data, data)
    return schedule.digest


def _search():
    return search(host_transport())


def test_rank_0_searches_for_all():
    assert len(set(testing.run_ranks(_search, 2))) == 1
    assert len(set(ThreadHub(2).run(search))) == 1


def test_a_search_that_rank_0_refuses_ends_on_all_ranks():
    def work(transport):
        try:
            solve_on_rank0(transport, None, 4)
        except (ValueError, PipelineAborted) as err:
            return str(err)
        return ""

    for said in ThreadHub(3).run(work):
        assert "costs=None on rank 0" in said


class CustomProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Opaque(nn.Module):
    """Its backward computes both gradients at once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, x):
        return CustomProduct.apply(x, self.weight)


def test_the_executor_says_what_a_split_backward_gains(caplog):
    schedule = build_schedule("zbv", 2, 8)
    data = [torch.ones(1, 2)] * 8

    def work(transport):
        make = (lambda: nn.Linear(2, 2)) if transport.rank == 0 else Opaque
        executor = Executor(schedule, stages_for(schedule, transport.rank, make), transport)
        forecast = executor.deferred
        for _ in range(2):
            executor.step(data, data)
        return forecast, executor.deferred

    with caplog.at_level(logging.WARNING, "titan_pipeline"):
        results = ThreadHub(2).run(work)
    for forecast, _ in results:
        assert forecast.shares == (1, 1, 1, 1)
        assert forecast.expected_bubble == forecast.planned_bubble
    seen = results[1][1]
    assert seen.shares == (1, 0, 0, 1)
    assert seen.expected_bubble > seen.planned_bubble
    assert "expected bubble" in str(seen)
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 2, messages  # once per stage, not once per step
    for stage, message in zip((1, 2), sorted(messages), strict=True):
        assert message.startswith(f"stage {stage} defers 0 % of its weight gradients")
        assert "CustomProduct: its backward returns all gradients at once" in message


def test_compiled_stages_are_reported_when_the_executor_is_built(caplog):
    module = nn.Sequential(nn.Linear(2, 2))
    module.compile(backend="eager")
    with caplog.at_level(logging.WARNING, "titan_pipeline"):
        executor = Executor(build_schedule("zb_h1", 1, 2), [TorchStage(module, 0)])
    assert executor.deferred.shares == (0,)
    assert "inside a compiled module" in caplog.text
    assert Executor(build_schedule("1f1b", 1, 2), [TorchStage(module, 0)]).deferred is None
