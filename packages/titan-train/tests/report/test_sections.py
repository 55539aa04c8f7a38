"""What the report draws beside curves: where time went, memory, faults, the ranks and the pipeline."""

import json
import math
import re
from datetime import datetime

import pytest
from titan_pipeline import Costs, Measurement, Slot, build_schedule, simulate
from titan_train.config import parse_config
from titan_train.config.load import dump_config
from titan_train.report import build_report
from titan_train.report.chart import Layer, build_stack
from titan_train.report.drawings import draw_layout, draw_pipeline
from titan_train.report.faults import faults
from titan_train.report.folder import read_folder
from titan_train.report.timeline import memory_timeline, time_split


def add_to_steps(run_dir, **tables):
    """Adds to each step's line what measuring adds."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | (tables if line["kind"] == "step" else {})) + "\n" for line in lines))


def configure(run_dir, world_size, device="cpu", **sections):
    (run_dir / "config.toml").write_text(dump_config(parse_config({"model": {"name": "llama3_debug"}, **sections})))
    info = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(info | {"world_size": world_size, "device": device}))
    return read_folder(run_dir)


def test_the_parts_of_a_step_are_stacked_and_their_sum_is_the_top(make_run):
    run_dir = make_run(40)
    add_to_steps(
        run_dir, split={"data": 0.1, "forward": 1.0, "tp exposed": 0.5, "tp hidden": 9.0, "backward": 2.0, "odd": None}
    )
    chart = time_split(run_dir)
    assert [name for _, name in chart.legend] == ["forward", "backward", "tp exposed", "data"]
    assert [path.role for path in chart.paths] == ["area run0", "area run1", "area run2", "area run3"]
    low, high = chart.hover["y"]
    assert low == 0
    tops = []
    for path in chart.paths:
        ys = [float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.d)]
        tops.append((1 - ys[0] / 1000) * high)
        assert len(ys) == 80
    assert tops == pytest.approx([1.0, 3.0, 3.5, 3.6], abs=0.001 * high)
    assert "Time of a step" in (build_report(run_dir)).read_text()


def test_a_run_that_measured_nothing_more_has_no_split_and_its_peak_memory(make_run):
    run_dir = make_run(5)
    assert time_split(run_dir) is None
    assert memory_timeline(run_dir) is None
    html = build_report(run_dir).read_text()
    assert "Time of a step" not in html
    assert "Peak memory" in html


def test_memory_is_drawn_over_the_run(make_run):
    run_dir = make_run(30)
    add_to_steps(run_dir, memory={"active_gib": 2.0, "reserved_gib": 3.0, "peak_gib": 2.5})
    assert [name for _, name in memory_timeline(run_dir).legend] == ["peak", "reserved", "active"]
    short = make_run(1, name="short")
    add_to_steps(short, memory={"active_gib": 2.0})
    assert memory_timeline(short) is None  # the peak of each step says more than one point


def test_of_a_long_file_steps_all_over_it_are_read(make_run, monkeypatch):
    monkeypatch.setattr("titan_train.report.timeline._WHOLE_BYTES", 10_000)
    monkeypatch.setattr("titan_train.report.timeline._MOST_LINES", 20)
    run_dir = make_run(400)
    add_to_steps(run_dir, split={"forward": 1.0})
    (line,) = time_split(run_dir).hover["lines"]
    assert 15 <= len(line["x"]) <= 21
    assert line["x"][0] < 40
    assert line["x"][-1] > 360


def test_of_a_long_file_the_steps_that_measured_are_read(make_run, monkeypatch):
    monkeypatch.setattr("titan_train.report.timeline._WHOLE_BYTES", 10_000)
    monkeypatch.setattr("titan_train.report.timeline._MOST_LINES", 20)
    run_dir = make_run(400)
    add_to_steps(run_dir, split={"forward": 1.0})
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["step"] % 10:
            line["split"] = {}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (line,) = time_split(run_dir).hover["lines"]
    assert 15 <= len(line["x"]) <= 21


@pytest.mark.parametrize("steps", [1, 2, 5000])
def test_a_stack_of_any_length_stays_inside_the_chart(steps):
    layers = [Layer("a", [1.0] * steps, "run0"), Layer("b", [math.sin(i) + 1 for i in range(steps)], "run1")]
    chart = build_stack("t", "s", range(1, steps + 1), layers)
    numbers = [float(n) for path in chart.paths for n in re.findall(r"-?[\d.]+", path.d)]
    assert all(-0.1 <= n <= 1000.1 for n in numbers)
    assert len(numbers) >= 16


def test_faults_name_step_cause_and_what_was_done(make_run):
    run_dir = make_run(40)
    journal = [
        {"attempt": 0, "time": 1.5e9, "world_size": 4, "from_step": 0, "to_step": 22, "end": "rank 3 <b>died</b>"},
        {"attempt": 1, "time": 1.6e9, "world_size": 3, "from_step": 20, "to_step": 40, "end": "finished", "recovered_s": 2.25},
    ]  # fmt: skip
    (run_dir / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal) + '{"end')
    event = {"kind": "event", "event": "straggler", "step": 31, "time": 1.0, "rank": 2, "cause": "slow data"}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    found = faults(read_folder(run_dir))
    assert [(f.step, f.what) for f in found] == [(22, "attempt ended"), (31, "straggler")]
    assert found[0].cause == "rank 3 <b>died</b>"
    assert found[0].then == "continued from step 20 on 3 ranks after 2.2 s"
    assert found[1].cause == "rank 2, cause slow data"
    html = build_report(run_dir).read_text()
    assert "rank 3 &lt;b&gt;died" in html
    assert faults(read_folder(make_run(10, name="quiet"))) == []


@pytest.mark.parametrize("supervised", [True, False])
def test_a_lost_attempt_names_the_one_that_went_on(make_run, supervised):
    run_dir = make_run(40, status=None)
    info = json.loads((run_dir / "run.json").read_text())
    lost = {"status": "killed", "started": "2020-01-01T00:00:00+00:00", "to_step": 22, "from_step": 0, "world_size": 4}
    again = {"status": "running", "started": "2020-01-01T01:00:00+00:00", "from_step": 20, "world_size": 3}
    (run_dir / "run.json").write_text(json.dumps(info | {"attempts": [lost]}))
    if supervised:
        ended = datetime.fromisoformat("2020-01-01T00:30:00+00:00").timestamp()
        line = {"attempt": 0, "time": ended, "world_size": 4, "from_step": 0, "to_step": 22, "end": "rank 3 died"}
        (run_dir / "attempts.jsonl").write_text(json.dumps(line) + "\n")
    assert [fault.then for fault in faults(read_folder(run_dir))] == ["the run ended"]
    (run_dir / "run.json").write_text(json.dumps(info | {"attempts": [lost, again]}))
    (found,) = faults(read_folder(run_dir))
    assert (found.step, found.then) == (22, "continued from step 20 on 3 ranks")


def test_a_killed_attempt_that_no_supervisor_saw_stays_a_fault_when_the_next_one_ends(make_run):
    run_dir = make_run(40, status=None)
    lost = {
        "status": "killed",
        "started": "2020-01-01T00:00:00+00:00",
        "to_step": None,
        "from_step": 0,
        "world_size": 4,
    }
    again = {"status": "finished", "started": "2020-01-01T01:00:00+00:00", "from_step": 20, "world_size": 3}
    info = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(info | {"attempts": [lost, again]}))
    ended = datetime.fromisoformat("2020-01-01T02:00:00+00:00").timestamp()
    line = {"attempt": 0, "time": ended, "world_size": 3, "from_step": 20, "to_step": 40, "end": "finished"}
    (run_dir / "attempts.jsonl").write_text(json.dumps(line) + "\n")
    (found,) = faults(read_folder(run_dir))
    assert (found.cause, found.then) == ("killed", "continued from step 20 on 3 ranks")


def test_the_ranks_are_drawn_and_cpus_have_no_nvlink(make_run):
    drawing = draw_layout(configure(make_run(5), 4, parallel={"tp": 2}))
    assert "dp_shard=2 x tp=2 on 4 ranks" in drawing.svg
    assert "nvlink" not in drawing.svg.lower()
    assert "GPU" not in drawing.svg
    assert draw_layout(configure(make_run(5, name="odd"), 3, parallel={"tp": 2})) is None


def test_a_pipeline_is_drawn_as_planned_and_as_it_ran_where_a_step_was_measured(make_run):
    parts = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}, "train": {"global_batch": 4, "microbatch": 1}}
    folder = configure(make_run(5), 2, **parts)
    planned = draw_pipeline(folder)
    assert "no step of this run was measured" in planned.note
    assert "time, forwards of one rank" in planned.svg
    plan = simulate(build_schedule("1f1b", 2, 4), Costs.uniform(2, forward=0.01))
    times = (tuple(Slot(s.action, s.start, s.end) for s in slots) for slots in plan.timeline)
    Measurement(plan.schedule, tuple(times)).save(folder.path / "pipeline.json")
    executed = draw_pipeline(folder)
    assert "Thin rows: the plan" in executed.svg
    assert "<svg" in build_report(folder.path).read_text()
    (folder.path / "pipeline.json").write_text('{"format": 3')
    assert draw_pipeline(folder) == planned
    assert draw_pipeline(configure(make_run(5, name="no_pipeline"), 2)) is None


def test_a_pipeline_of_thousands_of_actions_is_not_drawn(make_run):
    parts = {"parallel": {"pp": 8}, "pipeline": {"schedule": "gpipe"}, "train": {"global_batch": 512, "microbatch": 1}}
    parts["model"] = {"name": "llama3_8b"}
    drawing = draw_pipeline(configure(make_run(5), 8, **parts))
    assert drawing.svg == ""
    assert "8,192 actions are too many to draw" in drawing.note


def test_ranks_and_axes_are_tables_of_the_newest_measurement_and_no_event(make_run):
    run_dir = make_run(40)
    axis = {"calls": 8, "bytes": 2**21, "exposed_ms": [1, 2, 3], "hidden_ms": [4, 5, 6], "overlapped": 0.714}
    event = {"kind": "event", "event": "step_split", "time": 1.0, "steps": 20, "wall_ms": [100, 101, 102]}
    event |= {"phases_ms": {"forward": [30, 31, 45.5]}, "axes": {"tp": axis | {"latency_us": 12.5, "gb_s": None}}}
    older = event | {"step": 20, "phases_ms": {"forward": [77, 77, 77]}}
    with (run_dir / "metrics.jsonl").open("a") as file:
        for line in (older, event | {"step": 40}, {"kind": "event", "event": "step_split", "step": 60, "time": 1.0}):
            file.write(json.dumps(line) + "\n")
    html = build_report(run_dir).read_text()
    cells = re.findall(r"<td>([^<]*)</td>", html[html.index("Ranks and mesh axes") : html.index("Configuration")])
    assert cells[:8] == ["whole step", "100", "101", "102", "forward", "30", "31", "45.5"]
    assert cells[8:16] == ["tp", "8", "2", "2", "5", "71%", "12.5 µs", "–"]
    assert "77" not in cells
    assert "step split" not in html


@pytest.mark.parametrize("kind", ["attention_logits", "activations"])
def test_what_is_measured_every_few_steps_is_no_event_of_the_page(make_run, kind):
    run_dir = make_run(10)
    line = {"kind": "event", "event": kind, "time": 1.0, "largest": {"layers.0": 3.0}}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line | {"step": 10}) + "\n" for _ in range(300))
    html = build_report(run_dir).read_text()
    assert f"</i>{kind.replace('_', ' ')}" not in html
    assert "are not shown" not in html  # 200 of them hid the checkpoint
