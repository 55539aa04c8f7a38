import json
import subprocess
import time
from datetime import datetime

import pytest
from titan_train.observe import RunInfo, add_run_info, read_run_info


def test_run_info_records_how_an_attempt_ended(tmp_path):
    info = RunInfo(
        tmp_path, device="cpu", world_size=2, parameters=1234, command=["titan-train", "run", "x"], backend="gloo"
    )
    started = read_run_info(tmp_path)
    assert started["attempts"][0]["status"] == "running"
    assert started["attempts"][0]["ended"] is None
    info.finish("failed", step=7, error="rank 1: out of memory")
    info.finish("finished", step=8)  # too late: the first word counts
    done = read_run_info(tmp_path)
    assert done["command"] == ["titan-train", "run", "x"]
    assert done["backend"] == "gloo"
    assert done["parameters"] == 1234
    assert done["versions"]["torch"]
    (attempt,) = done["attempts"]
    assert (attempt["status"], attempt["to_step"], attempt["error"]) == ("failed", 7, "rank 1: out of memory")


def test_an_attempt_that_never_ended_was_killed_once_there_is_a_next_one(tmp_path):
    RunInfo(tmp_path, device="cpu", world_size=1)
    RunInfo(tmp_path, device="cpu", world_size=1, resume_step=5).finish("finished", step=10)
    attempts = read_run_info(tmp_path)["attempts"]
    assert [(a["status"], a["from_step"], a["to_step"]) for a in attempts] == [("killed", 0, None), ("finished", 5, 10)]
    RunInfo(tmp_path, device="cpu", world_size=1)  # from step 0: another run
    assert len(read_run_info(tmp_path)["attempts"]) == 1


def test_run_info_tells_a_changed_working_tree_from_a_clean_one(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    run_dir = tmp_path / "run"
    RunInfo(run_dir, device="cpu", world_size=1)
    assert read_run_info(run_dir)["git_commit"] is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "--short=12", "HEAD")
    RunInfo(run_dir, device="cpu", world_size=1)
    assert read_run_info(run_dir)["git_commit"] == commit
    (tmp_path / "a").write_text("2")
    RunInfo(run_dir, device="cpu", world_size=1)
    assert read_run_info(run_dir)["git_commit"] == f"{commit}+changes"
    (tmp_path / ".git" / "index").write_bytes(b"torn")  # git status fails, as where it takes too long
    RunInfo(run_dir, device="cpu", world_size=1)
    assert read_run_info(run_dir)["git_commit"] == f"{commit}+unknown"


def test_what_a_rank_adds_while_the_run_goes_on_is_kept_when_it_ends(tmp_path):
    info = RunInfo(tmp_path, device="cuda", world_size=8)
    add_run_info(tmp_path, device="NVIDIA H200", parameters=8_030_261_248)
    info.finish("finished", step=3)
    done = read_run_info(tmp_path)
    assert (done["device"], done["parameters"], done["world_size"]) == ("NVIDIA H200", 8_030_261_248, 8)
    assert done["attempts"][0]["status"] == "finished"


def test_an_unreadable_run_json_reads_as_nothing(tmp_path):
    assert read_run_info(tmp_path) == {}
    (tmp_path / "run.json").write_text('{"name": "x", ')
    assert read_run_info(tmp_path) == {}
    (tmp_path / "run.json").write_text(json.dumps([1]))
    assert read_run_info(tmp_path) == {}


def test_of_an_attempt_that_could_not_say_how_it_ended_the_supervisor_s_journal_does(tmp_path):
    before = {"attempt": 0, "time": time.time() - 100, "to_step": 3, "end": "another run"}
    RunInfo(tmp_path, device="cpu", world_size=2)
    lost = {"attempt": 0, "time": time.time() + 1, "to_step": 7, "end": "rank 1 was killed"}
    refused = {"attempt": 1, "time": time.time() + 2, "to_step": 5, "end": "rank 0 refused"}  # it took no effect
    (tmp_path / "attempts.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (before, lost, refused)) + '{"e'
    )
    RunInfo(tmp_path, device="cpu", world_size=2, resume_step=5)
    attempt, _ = read_run_info(tmp_path)["attempts"]
    assert (attempt["status"], attempt["to_step"], attempt["error"]) == ("killed", 7, "rank 1 was killed")
    assert datetime.fromisoformat(attempt["ended"]).timestamp() == pytest.approx(lost["time"], abs=1e-3)
