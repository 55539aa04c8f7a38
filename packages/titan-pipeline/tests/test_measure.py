"""Measured steps become costs, the costs a better schedule, and the schedule is swapped in between two steps."""

import json

import pytest
from titan_pipeline import (
    Costs,
    Link,
    Measurement,
    ScheduleError,
    build_schedule,
    chrome_trace,
    fit_costs,
    simulate,
    solve,
)
from titan_pipeline.cli import main

UNEQUAL = Costs(
    forward=(0.010, 0.012, 0.010, 0.030), input_grad=(0.011, 0.013, 0.009, 0.026), weight_grad=(0.006, 0.007, 0.005, 0.02),
    activation=(1, 2, 3, 4), weight_context=(0.5, 1, 1.5, 2),
    links={(a, b): Link(latency=0.002) for a in range(4) for b in (a - 1, a + 1) if 0 <= b < 4},
)  # fmt: skip


def measure(schedule, costs):
    """What a perfect clock would measure."""
    return Measurement(schedule, simulate(schedule, costs).timeline)


def test_the_fit_returns_the_costs_that_were_played():
    measured = measure(build_schedule("zb_h1", 4, 8), UNEQUAL)
    costs = fit_costs([measured, measured], UNEQUAL)
    for name in ("forward", "input_grad", "weight_grad", "activation", "weight_context"):
        assert getattr(costs, name) == pytest.approx(getattr(UNEQUAL, name))
    for pair, link in UNEQUAL.links.items():
        assert costs.links[pair].latency == pytest.approx(link.latency)
    again = simulate(measured.schedule, costs)
    assert again.makespan == pytest.approx(measured.makespan)
    assert measured.largest_lag(again) == pytest.approx(0, abs=1e-9)


def test_one_slow_step_does_not_become_a_cost():
    schedule = build_schedule("zb_h1", 4, 8)
    fine, slow = (measure(schedule, c) for c in (UNEQUAL, Costs.uniform(4, forward=9.0)))
    assert fit_costs([fine, slow, fine]).forward == pytest.approx(UNEQUAL.forward)


def test_unsplit_backwards_are_taken_as_two_halves():
    costs = fit_costs([measure(build_schedule("1f1b", 4, 8), UNEQUAL)])
    for s in range(4):
        assert costs.backward_of(s) == pytest.approx(UNEQUAL.backward_of(s))
        assert costs.input_grad[s] == costs.weight_grad[s]


def test_a_measurement_survives_json_and_draws_like_a_simulation():
    measured = measure(build_schedule("zbv", 2, 4), Costs.uniform(4))
    again = Measurement.from_json(measured.to_json())
    assert again == measured
    timeline = again.timeline(Costs.uniform(4))
    assert timeline.makespan == pytest.approx(simulate(measured.schedule, Costs.uniform(4)).makespan)
    b = timeline.breakdown
    assert b.warm_up + b.steady + b.drain == pytest.approx(timeline.makespan - timeline.work)
    assert max(timeline.peak_memory) > 0


@pytest.mark.parametrize(("kept", "lost"), [('"schedule":', '"s":'), ('"ranks": [[[', '"r": [[['), ("}", "")])
def test_a_measurement_that_is_not_whole_is_refused(kept, lost):
    text = measure(build_schedule("gpipe", 2, 2), Costs.uniform(2)).to_json()
    with pytest.raises(ScheduleError, match="not a whole titan-pipeline/measurement file"):
        Measurement.from_json(text.replace(kept, lost))


def test_plan_and_measurement_lie_over_each_other_in_one_trace(tmp_path, capsys):
    schedule = build_schedule("zb_h1", 4, 4)
    measured = measure(schedule, UNEQUAL)
    trace = json.loads(
        chrome_trace(("planned", simulate(schedule)), ("measured", measured.timeline(UNEQUAL)))
    )["traceEvents"]  # fmt: skip
    for process in (0, 1):
        mine = [e for e in trace if e["pid"] == process]
        count = {ph: sum(e["ph"] == ph for e in mine) for ph in "XsfC"}
        assert count["X"] == sum(len(p) for p in schedule.ranks)
        assert count["s"] == count["f"] == 2 * 3 * 4  # an arrow a hop and microbatch, both ways
        assert count["C"] > 0
    arrows = [e["id"] for e in trace if e["ph"] == "s"]
    assert len(set(arrows)) == len(arrows)
    schedule.save(tmp_path / "s.json")
    measured.save(tmp_path / "m.json")
    call = ["trace", str(tmp_path / "s.json"), "--measured", str(tmp_path / "m.json"), "-o", str(tmp_path / "t.json")]
    assert main(call) == 0
    assert "largest lag" in capsys.readouterr().out
    assert {e["pid"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {0, 1}
    assert main(["fit", str(tmp_path / "m.json"), "-o", str(tmp_path / "c.json")]) == 0
    assert Costs.load(tmp_path / "c.json").forward == pytest.approx(UNEQUAL.forward)


def test_wrong_measurements_are_refused():
    schedule = build_schedule("zb_h1", 2, 2)
    with pytest.raises(ValueError, match="not those of schedule"):
        Measurement(schedule, measure(build_schedule("1f1b", 2, 2), Costs.uniform(2)).ranks)
    with pytest.raises(ValueError, match="at least one"):
        fit_costs([])
    with pytest.raises(ValueError, match="no backward"):
        fit_costs([measure(schedule.for_evaluation(), Costs.uniform(2))])
    with pytest.raises(ValueError, match="another schedule"):
        measure(schedule, Costs.uniform(2)).largest_lag(simulate(build_schedule("1f1b", 2, 2)))


def test_a_running_pipeline_is_measured_solved_again_and_swapped():
    torch = pytest.importorskip("torch")
    import time

    from titan_pipeline.runtime import Executor, ThreadHub, TorchStage

    sleeps = (0.001, 0.001, 0.001, 0.02)

    class Slow(torch.nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.linear, self.seconds = torch.nn.Linear(4, 4), seconds

        def forward(self, x):
            time.sleep(self.seconds)
            return self.linear(x)

    torch.manual_seed(0)
    modules = [Slow(s) for s in sleeps]
    data = [torch.randn(2, 4) for _ in range(8)]

    def work(transport):
        stage = TorchStage(modules[transport.rank], transport.rank, loss=torch.nn.functional.mse_loss)
        executor = Executor(build_schedule("zb_h1", 4, 8), [stage], transport, trace=True)
        with pytest.raises(RuntimeError, match="run a training step first"):
            executor.measured()
        before = executor.step(data, data)
        measured = [executor.measured()]
        executor.step(data, data)
        measured.append(executor.measured())
        costs = fit_costs(measured, Costs.uniform(4))
        better = solve(costs, 8, mem_limit=4, max_tries=50, time_limit=60).schedule
        executor.swap(better)
        after = executor.step(data, data)
        swapped = executor.measured().schedule.digest == better.digest
        assert executor.measured(-5.0).ranks == executor.measured().ranks  # all ranks' clocks alike
        executor.trace = False
        executor.step(data, data)
        with pytest.raises(RuntimeError, match="0 traced actions"):
            executor.measured()
        return before.loss, after.loss, costs.forward, swapped

    for before, after, forward, swapped in ThreadHub(4).run(work):
        assert before == after
        assert forward[3] > max(forward[:3])
        assert swapped
