"""Long runs: `metrics.jsonl` is cut, never rewritten; blocks beside it make the report and a resume quick."""

import errno
import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from titan_train.observe import JsonlTracker, ValidationRecord, read_history, read_metrics
from titan_train.observe.log import STEPS, encode_line, read_blocks


def log_run(run_dir, step_record, first, last, *, resume=0, late=0, rng=None):
    """Log steps ``first`` to ``last`` with events between them; a checkpoint's event comes ``late`` steps late."""
    tracker = JsonlTracker(run_dir, resume_step=resume, clock=lambda: 1000.0)
    for step in range(first, last + 1):
        noise = rng.random() if rng else step % 7
        tracker.log_step(step_record(step, loss=5.0 + noise, mfu=0.4, elapsed_s=0.5 * (step - resume)))
        if step % 10 == late:
            tracker.log_event("checkpoint_saved", step=step - late)
        if step % 25 == 0:
            tracker.log_validation(ValidationRecord(step=step, loss=noise, bits_per_byte=None, tokens=64))
    tracker.close()


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def blocks(run_dir):
    return [block for block, _ in read_blocks(run_dir, run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("resume", [1, 63, 64, 65, 127, 128, 130, 199, 200])
@pytest.mark.parametrize("late", [0, 3])
def test_a_resume_keeps_exactly_what_happened_up_to_its_step(resume, late, tmp_path, step_record):
    log_run(tmp_path, step_record, 1, 200, late=late)
    before = lines(tmp_path)
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    log_run(tmp_path, step_record, resume + 1, 230, resume=resume, late=late)
    after = lines(tmp_path)
    kept = [line for line in before if line["step"] <= resume]
    steps = [line for line in kept if line["kind"] == "step"]
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode  # a reader or writer that has it open has this file
    assert [line for line in after if line["kind"] == "step"][:resume] == steps
    assert all(line in after for line in kept)
    assert [line["step"] for line in after if line["kind"] == "step"] == list(range(1, 231))
    assert sum(line["step"] <= resume for line in after) - late_again(after, resume, late) == len(kept)


def late_again(after, resume, late):
    """Events of steps up to ``resume`` that the second attempt logged, being late."""
    first = next(i for i, line in enumerate(after) if line["kind"] == "step" and line["step"] == resume + 1)
    return sum(line["kind"] == "event" and line["step"] <= resume for line in after[first:])


def test_the_blocks_after_any_resumes_are_those_of_the_lines(tmp_path, step_record):
    rng = random.Random(7)
    reached = 0
    for _ in range(12):
        resume = rng.randint(0, reached)
        reached = resume + rng.randint(1, 150)
        log_run(tmp_path, step_record, resume + 1, reached, resume=resume, late=rng.randint(0, 4), rng=rng)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "metrics.jsonl").write_bytes((tmp_path / "metrics.jsonl").read_bytes())
    JsonlTracker(tmp_path / "again", resume_step=reached).close()  # made anew from the lines alone
    assert blocks(tmp_path) == blocks(tmp_path / "again")
    assert sum(block.count for block in blocks(tmp_path)) == reached // STEPS * STEPS


def test_the_history_by_blocks_is_that_of_the_lines(tmp_path, step_record):
    rng = random.Random(3)
    log_run(tmp_path, step_record, 1, 2000, late=3, rng=rng)
    log_run(tmp_path, step_record, 1501, 3000, resume=1500, rng=rng)
    whole, short = read_history(tmp_path, whole_bytes=2**40), read_history(tmp_path, whole_bytes=0)
    assert len(short.steps) < 1200 < 3000 == len(whole.steps)
    assert short.steps[:1024] == whole.steps[:1024]
    assert (short.events, short.validations) == (whole.events, whole.validations)
    assert (short.tokens, short.tokens_per_step, short.skipped) == (whole.tokens, whole.tokens_per_step, whole.skipped)
    assert short.seconds == pytest.approx(whole.seconds)
    assert sum(short.counts) == 3000
    for name in ("loss", "mfu", "step_time_s", "tokens_per_s"):
        assert short.weighted(name) == pytest.approx(whole.weighted(name))
        assert max(short.curves[name].high) == max(whole.curves[name].high)
        assert min(short.curves[name].low) == min(whole.curves[name].low)
    assert all(math.isnan(value) for value in short.curves["load_max"].mean)


@pytest.mark.parametrize("damage", ["torn", "garbage", "missing", "of another file", "deep", "not utf-8"])
def test_damaged_blocks_are_made_again_and_mislead_nobody(damage, tmp_path, step_record):
    log_run(tmp_path, step_record, 1, 300)
    expected = blocks(tmp_path)
    path = tmp_path / "metrics.blocks.jsonl"
    if damage == "missing":
        path.unlink()
    elif damage == "of another file":
        metrics = tmp_path / "metrics.jsonl"
        metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[3:]))
        JsonlTracker(tmp_path, resume_step=300).close()
        assert sum(block.count for block in blocks(tmp_path)) == 256
        assert blocks(tmp_path)[0].first > 1
        return
    else:
        bad = {"torn": b'{"format":1,"fir', "garbage": b"garbage\n", "deep": b"[" * 10**5, "not utf-8": b"\xff\xfe\n"}
        text = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(text[0] + bad[damage] + b"".join(text[1:]))
    assert sum(read_history(tmp_path, whole_bytes=0).counts) == 300
    JsonlTracker(tmp_path, resume_step=300).close()
    assert blocks(tmp_path) == expected


def test_a_full_disk_leaves_no_torn_line(tmp_path, step_record, monkeypatch):
    tracker = JsonlTracker(tmp_path)
    tracker.log_step(step_record(1))
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    with pytest.raises(OSError, match="No space left") as caught:
        tracker.log_step(step_record(2))
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    tracker.log_step(step_record(3))
    tracker.close()
    metrics = read_metrics(tmp_path)
    assert [record.step for record in metrics.steps] == [1, 3]
    assert metrics.unreadable_lines == 0


def test_a_file_of_blocks_that_cannot_be_written_does_not_stop_the_run(tmp_path, step_record):
    (tmp_path / "metrics.blocks.jsonl").mkdir()
    log_run(tmp_path, step_record, 1, 200)
    assert len(read_metrics(tmp_path).steps) == 200
    assert sum(read_history(tmp_path, whole_bytes=0).counts) == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_steps_are_reported_and_resumed_in_three_seconds(tmp_path, step_record):
    import resource

    template = encode_line({"kind": "step", **asdict(step_record(1, mfu=0.4)), "time": 1000.25}).decode()
    assert template.startswith('{"kind":"step","step":1,"loss":')
    rest = template.partition('"grad_norm"')[2]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            file.write(f'{{"kind":"step","step":{step},"loss":{10.0 / step**0.1},"grad_norm"{rest}')
            if step % 500 == 0:
                file.write(f'{{"kind":"event","event":"checkpoint_saved","step":{step},"time":1000.25}}\n')
    JsonlTracker(tmp_path, resume_step=1_000_000).close()  # makes the blocks
    (tmp_path / "config.toml").write_text("[train]\nsteps = 1000000\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "titan_train", "report", str(tmp_path)], check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    resume_s = {}
    for step in (999_990, 500_010):
        started = time.process_time()
        JsonlTracker(tmp_path, resume_step=step).close()
        resume_s[step] = time.process_time() - started
    print(f"report {report_s:.2f} CPU-s, resume {resume_s}")
    assert report_s < 3
    assert max(resume_s.values()) < 3


def test_the_median_counts_steps_not_points(tmp_path, step_record):
    tracker = JsonlTracker(tmp_path)
    for step in range(1, 4001):  # the first 1,024 are points of their own when blocks are read
        early = step <= 1024
        tracker.log_step(step_record(step, tokens_per_s=100.0 if early else 1000.0, step_time_s=1.0 if early else 0.25))
    tracker.close()
    for whole_bytes in (0, 2**40):
        history = read_history(tmp_path, whole_bytes=whole_bytes)
        assert history.median("tokens_per_s") == 1000.0  # over points it was 100
        assert history.median("step_time_s", later=True) == 0.25
    assert math.isnan(history.median("mfu"))
