"""The division of a rank's time, the ranks' figures together, and the causes found in them; all without ranks."""

import gzip
import json
import threading

import pytest
from titan_train.observe.timing import PHASES, Place, StepTimer, combine, find_causes, split_line
from titan_train.observe.timing.causes import shortest_calls
from titan_train.observe.timing.traces import read_traces, trace_file

TP2_DP2 = {"tp": ((0, 1), (2, 3)), "dp_shard": ((0, 2), (1, 3))}


class Clock:
    """Seconds that only pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def timer():
    timer = StepTimer(clock=Clock())
    timer.start()
    return timer


def test_every_moment_counts_once_and_waiting_is_taken_out(timer):
    timer.clock.now += 1  # host
    with timer.phase("forward"):
        timer.clock.now += 2
        with timer.waiting("pp"):
            timer.clock.now += 4
        with timer.phase("data"):
            timer.clock.now += 8
        timer.clock.now += 16
    timer.steps = 1
    window = timer.take()
    assert window.wall_s == 31
    assert {name: s for name, s in window.phases.items() if s} == {"host": 1, "forward": 18, "data": 8}
    assert window.axes["pp"].exposed_s == 4
    assert sum(timer.take().phases.values()) == 0


def test_what_lies_in_validation_or_a_checkpoint_is_part_of_it(timer):
    with timer.phase("validation"), timer.phase("forward"):
        timer.clock.now += 3
        with timer.waiting("pp"):
            timer.clock.now += 1
        assert not timer.counts_here()
    window = timer.take()
    assert window.phases["validation"] == 4
    assert not window.axes


def test_a_message_is_hidden_while_the_rank_computes_and_exposed_while_it_waits(timer):
    with timer.phase("forward"), timer.transfer("pp", 300):
        timer.clock.now += 2  # computes
        with timer.waiting("pp"):
            timer.clock.now += 1  # waits, and the message arrives
    with timer.phase("forward"), timer.waiting("pp"):
        timer.clock.now += 8  # the neighbour computes, nothing is on its way
        with timer.transfer("pp", 500):
            timer.clock.now += 1
    with timer.phase("validation"), timer.transfer("pp", 500):
        timer.clock.now += 1
    timer.steps = 1
    window = timer.take()
    pp = window.axes["pp"]
    assert (pp.exposed_s, pp.moving_s, pp.hidden_s, pp.latency_s, pp.bytes_per_s) == (10, 2, 2, 1, 500)
    pp.calls = 2
    place = Place(1, {"pp": ((0,),)})
    assert combine(1, place, [place.row(window)]).axes["pp"].overlapped == 0.5


def test_another_thread_of_python_is_not_part_of_the_step(timer):
    answers = []

    def ask():
        with timer.phase("backward"):
            answers.append(timer.counts_here())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [False]
    assert timer.counts_here()


def windows(place, *, base=None, exposed=None, latency=None, moving=0.0, calls=10, work=None):
    """One row per rank: 100 ms of a step, but for what ``base`` and the others say by rank."""
    rows = []
    for rank in range(place.world_size):
        timer = StepTimer(clock=Clock())
        timer.start()
        seconds = {"forward": 0.03, "backward": 0.05, "host": 0.01} | (base or {}).get(rank, {})
        for axis in place.groups:
            totals = timer.totals(axis)
            totals.calls, totals.sent_bytes = calls, 1e6
            totals.exposed_s, totals.moving_s = (exposed or {}).get((rank, axis), 0.001), moving
            totals.add_call((latency or {}).get((rank, axis), 1e-4), 1e5)
        timer.phases.update(seconds)
        timer.steps = 1
        timer.clock.now += sum(seconds.values()) + sum(t.exposed_s for t in timer.axes.values())
        timer.phases["host"] -= timer.clock.now - 100.0  # `take` adds what has passed
        rows.append(place.row(timer.take(), (work or {}).get(rank, 1.0)))
    return combine(7, place, rows)


def test_an_even_run_has_no_causes():
    place = Place(4, TP2_DP2)
    split = windows(place)
    assert find_causes(split, place, quickest=shortest_calls(split, place)) == []
    assert split_line(split).startswith(
        "split    step 7: 92.0 ms = forward 30.0, backward 50.0, host 10.0, tp 1.0, dp_shard 1.0"
    )
    fields = split.fields()
    assert fields["axes"]["tp"] == {
        "calls": 10, "bytes": 1000000, "exposed_ms": [1.0, 1.0, 1.0], "hidden_ms": [0.0, 0.0, 0.0], "overlapped": 0.0,
        "latency_us": 100.0, "gb_s": 1.0,
    }  # fmt: skip
    assert list(fields["phases_ms"]) == list(PHASES)


@pytest.mark.parametrize(("part", "kind"), [("data", "slow data"), ("host", "slow rank"), ("backward", "slow rank")])
def test_a_late_rank_is_named_with_the_axis_that_waits_for_it(part, kind):
    place = Place(4, TP2_DP2)
    split = windows(place, base={2: {part: 0.25}}, exposed={(3, "tp"): 0.2, (0, "dp_shard"): 0.1})
    (cause,) = find_causes(split, place)
    assert (cause.kind, cause.ranks, cause.axis, cause.part) == (kind, (2,), "tp", part)
    assert "rank 2" in cause.text
    assert "axis tp" in cause.text


@pytest.mark.parametrize(
    ("late", "named"),
    [((0.3, 0.3, 0.3, 0.3), True), ((2.0, 0.1, 0.1, 0.1), False), ((0.5, 0.1, 0.5, 0.1), False)],
)
def test_a_rank_is_slow_only_if_its_quick_steps_are_too(late, named):
    place = Place(2, {"dp_shard": ((0, 1),)})
    rows = []
    for seconds in ((0.1, 0.1, 0.12, 0.1), late):
        timer = StepTimer(clock=Clock())
        timer.start()
        for step in range(4):
            with timer.phase("forward"):
                timer.clock.now += seconds[step]
            with timer.waiting("dp_shard"):
                timer.clock.now += max(late) - seconds[step]
            timer.totals("dp_shard").calls += 1
            timer.step_made()
        rows.append(place.row(timer.take()))
    causes = find_causes(combine(4, place, rows), place)
    assert [(cause.kind, cause.ranks) for cause in causes] == ([("slow rank", (1,))] if named else [])


def test_a_stage_with_more_layers_is_unbalanced_and_one_with_as_many_is_a_slow_rank():
    stages = {"pp": ((0, 2), (1, 3))}
    base = {2: {"forward": 0.1}, 3: {"forward": 0.1}}
    place = Place(4, stages, stages=(0, 0, 1, 1))
    (cause,) = find_causes(windows(place, base=base), place)
    assert (cause.kind, cause.ranks, cause.stage) == ("unbalanced stage", (2, 3), 1)
    one = {"pp": ((0, 1),)}
    place = Place(2, one, stages=(0, 1))
    for work, kind in ((2.0, "unbalanced stage"), (1.1, "slow rank")):
        (cause,) = find_causes(windows(place, base={1: {"forward": 0.1}}, work={1: work}), place)
        assert (cause.kind, cause.ranks, cause.axis) == (kind, (1,), "pp")


def test_a_link_is_slow_when_even_its_shortest_call_is_and_nobody_was_late():
    place = Place(4, TP2_DP2)
    slow = {(0, "tp"): 0.01, (1, "tp"): 0.01}
    waits = {(0, "tp"): 0.1, (1, "tp"): 0.1}
    (cause,) = find_causes(windows(place, exposed=waits, latency=slow), place)
    assert (cause.kind, cause.ranks, cause.axis) == ("slow link", (0, 1), "tp")
    # the only group of an axis has itself in earlier windows to be compared with
    place = Place(2, {"tp": ((0, 1),)})
    even, late = windows(place), windows(place, exposed=waits, latency=slow)
    assert find_causes(late, place) == []
    (cause,) = find_causes(late, place, quickest=shortest_calls(even, place))
    assert (cause.kind, cause.axis) == ("slow link", "tp")
    # one call that waited for nobody was quick: the others came late, the link is well
    mixed = windows(place, exposed=waits, latency={(0, "tp"): 0.01})
    assert find_causes(mixed, place, quickest=shortest_calls(even, place)) == []


def test_a_link_of_a_pipeline_is_slow_when_the_messages_of_one_of_its_ranks_are():
    place = Place(2, {"pp": ((0, 1),)})
    waits = {(0, "pp"): 0.1, (1, "pp"): 0.1}
    even, late = (windows(place, exposed=waits, latency=slow, moving=0.001) for slow in ({}, {(1, "pp"): 0.01}))
    (cause,) = find_causes(late, place, quickest=shortest_calls(even, place))
    assert (cause.kind, cause.ranks, cause.axis) == ("slow link", (0, 1), "pp")


def test_a_timer_that_is_off_keeps_nothing(timer):
    timer.stop()
    for _ in range(3):
        timer.step_made()
    assert (timer.steps, timer._by_step) == (0, [])


@pytest.mark.parametrize("steps", [(10, 13), (20, 23)])
def test_traces_of_an_attempt_with_more_ranks_are_left_out(tmp_path, steps):
    of_two, of_four = Place(2, {"dp_shard": ((0, 1),)}), Place(4, TP2_DP2)
    for rank in range(4):
        place, traced = (of_two, (10, 13)) if rank < 2 else (of_four, steps)
        about = {
            "rank": rank, "steps": traced, "offset_s": 0.0, "row": [1.0] * place.width, "blocking": True,
            "place": {"world_size": place.world_size, "groups": place.groups, "stages": []},
        }  # fmt: skip
        trace_file(tmp_path, rank).parent.mkdir(exist_ok=True)
        with gzip.open(trace_file(tmp_path, rank), "wt") as file:
            json.dump({"titan": about, "traceEvents": [{"name": "step", "pid": rank, "ts": 5.0}]}, file)
    traces = read_traces(tmp_path, tmp_path / "all.json.gz")
    assert (traces.place.world_size, traces.split.step) == (2, 13)
    with gzip.open(tmp_path / "all.json.gz") as file:
        assert [event["pid"] for event in json.load(file)["traceEvents"]] == [0, 1]
