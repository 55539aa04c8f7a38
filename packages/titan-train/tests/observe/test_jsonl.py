import contextlib
import json
import math
import os
import signal
import subprocess
import sys

import pytest
from titan_train.observe import JsonlTracker, ValidationRecord, read_metrics


def test_every_record_comes_back_as_it_was_logged(tmp_path, step_record):
    tracker = JsonlTracker(tmp_path, clock=lambda: 1000.25)
    records = [step_record(1, mfu=0.41), step_record(2, loss=math.inf, skipped=True)]
    for record in records:
        tracker.log_step(record)
    validation = ValidationRecord(step=2, loss=3.25, bits_per_byte=None, tokens=4096)
    tracker.log_validation(validation)
    tracker.log_event("checkpoint_saved", step=2, seconds=0.5)
    tracker.close()
    tracker.close()

    metrics = read_metrics(tmp_path)
    assert metrics.steps == records
    assert metrics.validations == [validation]
    (event,) = metrics.events
    assert (event.kind, event.step, event.time, event.fields) == ("checkpoint_saved", 2, 1000.25, {"seconds": 0.5})
    assert metrics.unreadable_lines == 0


def test_a_line_is_strict_json_even_when_the_loss_is_not_a_number(tmp_path, step_record):
    tracker = JsonlTracker(tmp_path)
    tracker.log_step(step_record(1, loss=math.nan, grad_norm=-math.inf))
    tracker.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None
    record = read_metrics(tmp_path).steps[0]
    assert math.isnan(record.loss)
    assert record.grad_norm == -math.inf


def test_tables_of_an_event_may_hold_what_is_not_finite(tmp_path):
    """A step whose gradient is not finite reports its layers' norms like any other."""
    tracker = JsonlTracker(tmp_path)
    tracker.log_event("groups", step=1, norms={"layers.0": math.nan, "other": math.inf}, rates=[1e-3, -math.inf])
    tracker.close()
    (event,) = read_metrics(tmp_path).events
    assert event.fields == {"norms": {"layers.0": None, "other": math.inf}, "rates": [1e-3, -math.inf]}


def test_resuming_drops_later_steps_so_that_none_is_counted_twice(tmp_path, step_record):
    first = JsonlTracker(tmp_path)
    for step in range(1, 11):
        first.log_step(step_record(step))
        first.log_event("checkpoint_saved", step=step)
    first.close()
    second = JsonlTracker(tmp_path, resume_step=6)
    second.log_event("checkpoint_restored", step=6)
    for step in range(7, 9):
        second.log_step(step_record(step, loss=1.0))
    second.close()

    metrics = read_metrics(tmp_path)
    assert [record.step for record in metrics.steps] == list(range(1, 9))
    assert [record.loss for record in metrics.steps[6:]] == [1.0, 1.0]
    assert [event.step for event in metrics.events] == [1, 2, 3, 4, 5, 6, 6]


def test_starting_again_from_step_0_starts_an_empty_file(tmp_path, step_record):
    first = JsonlTracker(tmp_path)
    first.log_event("started", step=0)
    first.log_step(step_record(1))
    first.close()
    JsonlTracker(tmp_path, resume_step=0).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_torn_last_line_is_skipped_by_readers_and_removed_on_resume(tmp_path, step_record):
    tracker = JsonlTracker(tmp_path)
    tracker.log_step(step_record(1))
    tracker.log_step(step_record(2))
    tracker.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"step","step":3,"lo')
    metrics = read_metrics(tmp_path)
    assert [record.step for record in metrics.steps] == [1, 2]
    assert metrics.unreadable_lines == 1

    resumed = JsonlTracker(tmp_path, resume_step=2)
    resumed.log_step(step_record(3))
    resumed.close()
    metrics = read_metrics(tmp_path)
    assert [record.step for record in metrics.steps] == [1, 2, 3]
    assert metrics.unreadable_lines == 0


@pytest.mark.parametrize(
    "line",
    [b"[1, 2]\n", b'{"kind": "step"}\n', b'{"kind": "step", "step": "x"}\n', b"\xff\xfe\n", b"\n", b'{"no": 1}\n'],
)
def test_a_line_that_is_not_a_record_is_counted_and_does_not_hide_the_others(tmp_path, step_record, line):
    tracker = JsonlTracker(tmp_path)
    tracker.log_step(step_record(1))
    tracker.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + path.read_bytes())
    metrics = read_metrics(tmp_path)
    assert [record.step for record in metrics.steps] == [1]
    assert metrics.unreadable_lines == 1


def test_a_missing_file_reads_as_an_empty_run(tmp_path):
    assert read_metrics(tmp_path).steps == []


def test_a_killed_process_loses_no_line_it_had_logged(tmp_path):
    # No close, no flush: the lines must be with the operating system when log_event returns.
    code = (
        "import sys; from titan_train.observe import JsonlTracker\n"
        f"tracker = JsonlTracker({str(tmp_path)!r})\n"
        "for step in range(200): tracker.log_event('tick', step=step)\n"
        "print('logged', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"logged\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert [event.step for event in read_metrics(tmp_path).events] == list(range(200))


def test_an_event_rejects_a_value_that_json_cannot_hold_and_names_it(tmp_path):
    tracker = JsonlTracker(tmp_path)
    with pytest.raises(ValueError, match=r"path=.*is not a JSON value"):
        tracker.log_event("x", step=1, path=tmp_path)
    with pytest.raises(ValueError, match="'time' is a key every line has"):
        tracker.log_event("x", step=1, time=3)
    tracker.close()
    with pytest.raises(RuntimeError, match="closed"):
        tracker.log_event("x", step=1)
    with pytest.raises(ValueError, match="resume_step=-1"):
        JsonlTracker(tmp_path, resume_step=-1)


def test_routing_is_written_for_a_mixture_of_experts_only(tmp_path, step_record):
    with contextlib.closing(JsonlTracker(tmp_path)) as tracker:
        tracker.log_step(step_record(1))
        tracker.log_step(step_record(2, routing={"load_max": 1.5}))
    dense, mixture = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "routing" not in dense
    assert '"routing":{"load_max":1.5}' in mixture
    assert [record.routing for record in read_metrics(tmp_path).steps] == [{}, {"load_max": 1.5}]
