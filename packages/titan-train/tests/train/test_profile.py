"""Traces of a few steps: their names, one clock for all ranks, and what `titan-train report --trace` says of them."""

import gzip
import json
import shutil

import pytest
from tiny_run import tiny_run, write_text
from titan_testing import run_ranks
from titan_train.cli import main
from titan_train.config.metrics import ProfileConfig
from titan_train.inputs import prepare_inputs
from titan_train.observe.timing.clocks import errors_of_clocks
from titan_train.observe.timing.traces import read_traces, trace_file
from titan_train.train import Trainer
from titan_train.train.observer import Observer
from titan_train.train.profile import in_our_words


def configure(folder):
    # step 8 would end a window too: a window holds all of a trace's steps, or none
    return tiny_run(
        folder,
        "traced",
        train={"steps": 12, "global_batch": 4},
        parallel={"pp": 2},
        profile={"steps": "6:8"},
        launch={"timeout_s": 400.0},
    )


def train(folder):
    with Trainer(configure(folder)) as trainer:
        trainer.fit()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run on two pipeline ranks whose steps 6 and 7 were traced."""
    folder = tmp_path_factory.mktemp("profile")
    write_text(folder)
    prepare_inputs(configure(folder), quiet=True)
    run_ranks(train, 2, folder, timeout_s=500.0)
    return folder / "runs" / "traced"


def assert_stages_follow_each_other(events):
    """On one clock, what a stage receives was sent before. A block begins with its wait, so their ends are compared."""
    ends = {(event["pid"], event["name"]): event["ts"] + event["dur"] for event in reversed(events) if "dur" in event}
    for microbatch in range(4):
        assert ends[0, f"pp stage 0 F mb{microbatch}"] < ends[1, f"pp stage 1 F mb{microbatch}"]
        assert ends[1, f"pp stage 1 B mb{microbatch}"] < ends[0, f"pp stage 0 B mb{microbatch}"]


def test_a_trace_names_what_ran_in_the_words_of_the_field(run_dir):
    for rank in range(2):
        with gzip.open(trace_file(run_dir, rank), "rt") as file:
            trace = json.load(file)
        names = [event["name"] for event in trace["traceEvents"]]
        assert names.count(f"pp stage {rank} F mb3") == 3  # one per step
        assert names.count(f"pp stage {rank} B mb0") == 3
        assert "pp wait" in names
        assert "pp all-reduce" in names
        assert {event["pid"] for event in trace["traceEvents"]} == {rank}
        assert trace["titan"]["steps"] == [6, 8]
        assert trace["titan"]["offset_s"] == 0.0  # one machine, one clock


def test_writing_a_trace_is_allowed_the_time_of_a_save(tmp_path):
    seen = []

    class Phases(Observer):
        def phase(self, name, step):
            seen.append((name, step))
            return super().phase(name, step)

    write_text(tmp_path)
    config = tiny_run(tmp_path, train={"steps": 3, "global_batch": 4}, profile={"steps": "1:1"})
    with Trainer(config, callbacks=[Phases()]) as trainer:
        trainer.fit()
    assert ("checkpoint", 1) in seen


def test_the_command_puts_the_ranks_on_one_clock_and_tells_communication_per_axis(run_dir, tmp_path, capsys):
    assert main(["report", str(run_dir), "--trace", "--out", str(tmp_path / "all.json.gz")]) == 0
    text = capsys.readouterr().out
    assert "steps 6 to 8, 2 ranks" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("pp "))
    calls, sent, exposed, hidden = map(float, row[1:5])
    assert min(calls, sent, exposed) > 0
    assert hidden >= 0
    with gzip.open(tmp_path / "all.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert_stages_follow_each_other(events)


def test_a_rank_whose_clock_is_ahead_is_moved_back(run_dir, tmp_path):
    copy = tmp_path / "run"
    (copy / "traces").mkdir(parents=True)
    for rank in range(2):
        with gzip.open(trace_file(run_dir, rank), "rt") as file:
            trace = json.load(file)
        ahead_s = 3600.0 * rank
        trace["titan"]["offset_s"] = ahead_s
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += 1e6 * ahead_s
        with gzip.open(trace_file(copy, rank), "wt") as file:
            json.dump(trace, file)
    moved, straight = tmp_path / "moved.json.gz", tmp_path / "straight.json.gz"
    read_traces(copy, moved)
    read_traces(run_dir, straight)
    first, second = (json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in (moved, straight))
    assert [e.get("ts") for e in first] == pytest.approx([e.get("ts") for e in second], abs=1.0)


def test_a_clock_that_no_exchange_told_of_is_found_by_matching_collectives(run_dir, tmp_path):
    copy = tmp_path / "run"
    (copy / "traces").mkdir(parents=True)
    for rank in range(2):
        with gzip.open(trace_file(run_dir, rank), "rt") as file:
            trace = json.load(file)
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += 3e6 * rank
        with gzip.open(trace_file(copy, rank), "wt") as file:
            json.dump(trace, file)
    read_traces(copy, tmp_path / "all.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))["traceEvents"]
    assert_stages_follow_each_other(events)


def test_clocks_are_moved_only_where_collectives_of_their_axis_prove_them_wrong():
    axes = {"tp": [(0, 1), (2, 3)], "pp": [(0, 2), (1, 3)]}
    calls = {
        0: [("tp barrier", 5.0, 6.0), ("pp barrier", 7.0, 8.0)],
        1: [("tp barrier", 5.5, 6.1)],
        2: [("tp barrier", 90.0, 91.0), ("pp barrier", 57.0, 58.0)],
        3: [("tp barrier", 90.0, 91.0)],
    }
    assert errors_of_clocks(calls, axes) == {2: 50.0, 3: 50.0}


def test_missing_and_damaged_traces_are_named(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir / "traces", copy / "traces")
    with gzip.open(trace_file(copy, 1), "rt") as file:
        trace = json.load(file)
    trace["titan"]["row"].pop()
    with gzip.open(trace_file(copy, 1), "wt") as file:
        json.dump(trace, file)
    with pytest.raises(ValueError, match="is a trace of another version"):
        read_traces(copy)
    trace_file(copy, 1).unlink()
    with pytest.raises(ValueError, match="lacks the traces of ranks 1"):
        read_traces(copy)
    trace_file(copy, 0).write_bytes(trace_file(run_dir, 0).read_bytes()[:5000])
    with pytest.raises(ValueError, match="not a complete trace"):
        read_traces(copy)
    trace_file(copy, 0).unlink()
    with pytest.raises(ValueError, match=r"--profile\.steps FIRST:LAST"):
        read_traces(copy)


def test_the_names_of_torchs_fsdp_become_the_fields():
    events = [
        {"ph": "X", "name": f"FSDP::{name}", "ts": 1, "dur": 1}
        for name in ("all_gather (layers.7)", "root_pre_forward")
    ]
    trace = in_our_words({"traceEvents": events, "baseTimeNanoseconds": 5000}, {"rank": 3, "host": "here"})
    assert [e["name"] for e in trace["traceEvents"][2:]] == ["fsdp all-gather layers.7", "fsdp root pre forward"]
    assert trace["traceEvents"][2]["ts"] == 6.0


@pytest.mark.parametrize("steps", ["10", "13:10", "0:3", "a:b", "1:1000"])
def test_a_malformed_range_is_refused(steps):
    with pytest.raises(ValueError, match=r"profile\.steps"):
        ProfileConfig(steps=steps)


def test_training_that_ends_within_the_steps_to_trace_has_one_trace_up_to_there(tmp_path):
    write_text(tmp_path)
    config = tiny_run(tmp_path, "short", train={"steps": 5, "global_batch": 4}, profile={"steps": "2:9"})
    with Trainer(config) as trainer:
        trainer.fit(until=3)
        trainer.fit()
    with gzip.open(trace_file(trainer.run_dir, 0), "rt") as file:
        assert json.load(file)["titan"]["steps"] == [2, 3]


def test_a_trace_without_splits_measures_the_traced_steps_and_keeps_nothing_of_others(tmp_path):
    write_text(tmp_path)
    config = tiny_run(tmp_path, profile={"steps": "3:4"}, metrics={"progress": "off", "split_every": 0})
    prepare_inputs(config, quiet=True)
    with Trainer(config) as trainer:
        trainer.fit()
        assert not trainer.timer.running
        assert trainer.timer._by_step == []  # held steps 5 to 12
    assert read_traces(tmp_path / "runs" / "run").split.steps == 2
