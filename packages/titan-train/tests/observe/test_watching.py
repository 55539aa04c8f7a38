"""Watching a run: new lines, goodput, the panel, the command, the live page."""

import io
import json
import os
import socket
import threading
from datetime import datetime, timedelta

import pytest
from rich.console import Console
from titan_train.cli import main
from titan_train.config import dump_config, parse_config
from titan_train.observe import JsonlTracker, RunInfo, read_history
from titan_train.observe.watching import Follower, find_goodput, goodput_line, panel


@pytest.fixture
def run_dir(tmp_path, step_record):
    """A run of 100 steps that is at step 6."""
    run_dir = tmp_path / "six"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(dump_config(parse_config({"train": {"steps": 100}})))
    RunInfo(run_dir, device="cpu", world_size=2)
    tracker = JsonlTracker(run_dir)
    for step in range(1, 7):
        tracker.log_step(step_record(step, loss=7.0 - step))
    tracker.log_event("straggler", step=6, text="slow rank 1: data", cause="slow data", ranks=[1])
    tracker.close()
    return run_dir


def test_new_lines_are_read_once_and_a_torn_one_waits(run_dir):
    follower = Follower(run_dir)
    assert [line["step"] for line in follower.new_lines()] == [1, 2, 3, 4, 5, 6, 6]
    assert follower.new_lines() == []
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"step","st')
        file.flush()
        assert follower.new_lines() == []
        file.write('ep":7}\n')
    assert [line["step"] for line in follower.new_lines()] == [7]
    (run_dir / "metrics.jsonl").write_text('{"kind":"step","step":1}\n')  # resumed from the start
    assert [line["step"] for line in follower.new_lines()] == [1]


def test_of_a_file_that_a_resumed_run_cut_only_what_is_new_is_read(run_dir, step_record):
    follower = Follower(run_dir, 4)
    follower.new_lines()
    for again in (5, 6):  # the file is longer after the second resume than it was when it was last read
        tracker = JsonlTracker(run_dir, resume_step=4)
        if again == 5:
            assert follower.new_lines() == []
            assert [line["step"] for line in follower.lines] == [1, 2, 3, 4]
        for step in range(5, 4 + again):
            tracker.log_step(step_record(step, loss=float(again)))
        tracker.close()
        new = follower.new_lines()
        assert [(line["step"], line["loss"]) for line in new] == [(step, again) for step in range(5, 4 + again)]
    assert [line["step"] for line in follower.lines] == [6, 7, 8, 9]


def test_the_panel_shows_what_it_can_of_a_file_that_may_be_anyone_s(run_dir):
    step = {"kind": "step", "step": 7, "loss": 2.0}
    wrong = [{"step": "x"}, {"step": 1e400}, {"loss": [1]}, {"lr": {}}, {"tokens_per_s": "x"}, {"split": 3},
             {"split": {"a": "b"}}, {"kind": ["step"]}, {"mfu": "x"}, {"step_time_s": []}]  # fmt: skip
    events = [{}, {"event": 3, "text": 4}, {"event": "step_split"}, {"event": "step_split", "step": 1, "phases_ms": 3}]
    lines = [step, *(step | more for more in wrong), *({"kind": "event"} | event for event in events), 3, None, "x"]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = Follower(run_dir).new_lines()
    assert shown == [step, {"kind": "event"}, {"kind": "event", "event": 3, "text": 4}]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel("a", "running", 100, shown, None, 80))
    assert "step 7 of 100" in console.export_text()


def test_goodput_names_what_took_the_rest(run_dir, step_record):
    tracker = JsonlTracker(run_dir, resume_step=4)
    for step in range(5, 9):
        tracker.log_step(step_record(step))
    tracker.log_event("checkpoint_saved", step=8, seconds=3.0)
    tracker.close()
    history = read_history(run_dir)
    step_s = history.curves["step_time_s"].mean[0]

    def at(seconds):
        return datetime.fromtimestamp(1_800_000_000 + seconds).astimezone().isoformat()

    attempts = [
        {"status": "failed", "started": at(0), "ended": at(10), "error": "rank 1 was killed"},
        {"status": "finished", "started": at(15), "ended": at(100), "error": None},
    ]
    goodput = find_goodput(history, attempts)
    assert goodput.progress_s == pytest.approx(8 * step_s)
    assert (goodput.wall_s, goodput.checkpoint_s, goodput.between_s) == (100, 3, 5)
    assert goodput.rest_s == pytest.approx(92 - 8 * step_s)
    assert goodput.share == pytest.approx(8 * step_s / 100)
    assert "1 restart (rank 1 was killed)" in goodput_line(goodput)
    assert find_goodput(history, []) is None


def test_a_killed_run_ended_when_it_last_wrote(run_dir, capsys):
    info = json.loads((run_dir / "run.json").read_text())
    started = datetime.now().astimezone() - timedelta(days=3)
    info["attempts"][-1]["started"] = started.isoformat()
    (run_dir / "run.json").write_text(json.dumps(info))
    for name in ("run.json", "metrics.jsonl"):
        os.utime(run_dir / name, times=(started.timestamp() + 600,) * 2)
    assert main(["watch", str(run_dir), "--once"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("run killed; goodput ")
    assert " of 10:00:" in last


def test_the_panel_shows_where_the_run_is(run_dir):
    lines = Follower(run_dir).new_lines()
    lines[-2]["split"] = {"forward": 0.03, "tp exposed": 0.01, "tp hidden": 0.5}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel("six", "running", 100, lines, None, 100))
    text = console.export_text()
    for part in ("six · running", "step 6 of 100 (6%)", "forward 75%", "tp exposed 25%", "slow rank 1: data"):
        assert part in text


def test_without_a_terminal_the_command_prints_lines_and_ends_with_the_run(run_dir, capsys):
    RunInfo.running(run_dir).finish("finished", step=6)
    assert main(["watch", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step=1/100 loss=6 ")
    assert lines[6] == "step 6: slow rank 1: data"
    assert lines[-1].startswith("run finished; goodput ")


def test_the_page_is_live_on_loopback_only(run_dir):
    httpx = pytest.importorskip("httpx")
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from titan_train.report.live import build_live_app

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = build_live_app(run_dir, every_s=0.05)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with httpx.Client(base_url=address, timeout=60) as client:
                page = client.get("/")
                assert page.status_code == 200
                assert 'EventSource("/events")' in page.text
                assert client.get("/", headers={"Host": "elsewhere.example"}).status_code == 400
                retry, data, *_ = client.get("/events").text.splitlines()
                assert retry == "retry: 50"
                assert f'data-state="{data.removeprefix("data: ")}"' in page.text
                with (run_dir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"kind": "event", "event": "x", "step": 6, "time": 1.0}) + "\n")
                assert client.get("/events").text.splitlines()[1] != data
        finally:
            server.should_exit = True
            thread.join()
    assert not (run_dir / "report.html").exists()


def test_the_goodput_of_a_branch_is_of_its_own_steps(tmp_path, step_record):
    tracker = JsonlTracker(tmp_path)
    for step in range(101, 105):
        tracker.log_step(step_record(step, step_time_s=0.5))
    tracker.close()
    start, end = (datetime.fromtimestamp(1_800_000_000 + s).astimezone().isoformat() for s in (0, 10))
    attempts = [{"status": "finished", "started": start, "ended": end, "from_step": 100}]
    goodput = find_goodput(read_history(tmp_path), attempts)
    assert (goodput.wall_s, goodput.progress_s) == (10, pytest.approx(2.0))  # was (52, 52)
