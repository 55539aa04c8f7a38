"""Whole runs on this machine, each struck by a fault; the losses after it are those of a run that nothing happened to."""

import subprocess
import sys
import time

import pytest
from titan_train.launch.place import here as local
from titan_train.launch.supervise import attempt

pytestmark = pytest.mark.timeout(900)  # runs that may share their cores with twenty others


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ("sigterm rank=1 step=7", "a rank received SIGTERM from outside; step 7 is saved"),
        ("raise rank=0 step=7", "rank 0 of 2 failed: InjectedFault"),
        ("disk-full step=7", "File too large"),
        ("kill rank=0 step=2; kill rank=1 step=6; kill rank=0 step=11", "restart 3 of 5"),
    ],
)
def test_a_run_survives_and_ends_with_the_same_losses(job, undisturbed, faults, told):
    name = faults.replace(" ", "_").replace(";", "").replace("=", "")
    code, text = job.supervise(name, "--launch.faults", faults)
    assert code == 0, text
    assert told in text
    assert job.losses(name) == undisturbed
    struck = sorted((job.folder / "runs" / name / "faults").glob("*.json"))
    assert len(struck) == faults.count(";") + 1
    last = job.attempts(name)[-1]
    assert last["end"] == "finished"
    assert last["recovered_s"] > 0


def test_a_hang_is_found_and_the_missing_rank_is_named(job, undisturbed, monkeypatch):
    monkeypatch.setattr(attempt, "_DUMP_S", 60.0)  # a busy machine
    called_early = ("--launch.hang-factor", "2", "--launch.hang-least-s", "4")
    code, told = job.supervise("hang", "--launch.faults", "hang rank=1 step=7", *called_early)
    assert code == 0, told
    assert "no rank finished step 7" in told
    assert "rank 1 did not enter gloo:all_reduce" in told
    assert "where rank 0 is waiting; rank 1 is at inject.py" in told
    assert job.losses("hang") == undisturbed
    dumps = job.folder / "runs" / "hang" / "hangs" / "attempt-0"
    assert sorted(file.name for file in dumps.iterdir()) == [
        "rank-0.json", "rank-0.newest.json", "rank-0.stacks.txt", "rank-1.json", "rank-1.newest.json", "rank-1.stacks.txt",
    ]  # fmt: skip


def test_a_slow_rank_is_reported_and_changes_nothing(job, undisturbed, monkeypatch):
    monkeypatch.setattr(attempt, "_LOOK_S", 0.0)  # a fast machine makes the twelve steps within a second
    code, told = job.supervise("slow", "--launch.hang-least-s", "3000", "--launch.faults", "slow rank=1 factor=12")
    assert code == 0, told
    assert "slow     rank 1 (place 1 of this machine)" in told
    assert "slow     rank 0" not in told
    assert job.losses("slow") == undisturbed


def test_a_loss_that_is_not_a_number_is_skipped_once(job):
    code, told = job.supervise("nan", "--launch.faults", "nan step=7")
    assert code == 0, told
    assert [event["step"] for event in job.records("nan", "event") if event["event"] == "nonfinite"] == [7]


def test_a_run_that_resumes_no_other_run_restarts_from_its_own_checkpoint(job, undisturbed):
    words = ["--checkpoint.resume", "never"]
    code, told = job.supervise("never", *words, "--launch.faults", "kill rank=1 step=6")
    assert code == 0, told
    assert job.losses("never") == undisturbed
    assert [attempt["from_step"] for attempt in job.attempts("never")] == [0, 4]


def test_four_ranks_go_on_as_three_and_grow_back_without_losing_a_document(job, monkeypatch):
    metrics = job.folder / "runs" / "elastic" / "metrics.jsonl"

    class Clock:
        """An hour passes when step 8 is done: the lost place is then free again."""

        @staticmethod
        def time():
            return time.time()

        @staticmethod
        def monotonic():
            done = metrics.exists() and '"kind":"step","step":8,' in metrics.read_text()
            return time.monotonic() + 3600 * done

    monkeypatch.setattr(attempt, "_GROW_S", 0.1)
    monkeypatch.setattr(local, "time", Clock)
    four = ("--launch.nproc", "4", "--train.steps", "24")
    # and the run is slow from then on: it does not end before it has grown
    faults = "lose rank=3 step=6 seconds=60; slow rank=0 step=9 factor=8"
    code, told = job.supervise(
        "elastic", *four, "--launch.elastic", "--launch.hang-least-s", "3000", "--launch.faults", faults
    )
    assert code == 0, told
    assert [attempt["world_size"] for attempt in job.attempts("elastic")] == [4, 3, 4], told
    assert job.attempts("elastic")[1]["to_step"] > job.attempts("elastic")[1]["from_step"]
    assert [record["samples_consumed"] for record in job.records("elastic")] == [12 * step for step in range(1, 25)]

    code, told = job.supervise("fixed", *four)
    assert code == 0, told
    elastic, fixed = job.losses("elastic"), job.losses("fixed")
    # float32 sums in another order, carried through the optimizer; losses are about 5
    assert max(abs(elastic[step] - fixed[step]) for step in fixed) < 1e-4


def test_a_recovery_is_noted_though_nobody_looked_before_the_run_ended(job, undisturbed, monkeypatch):
    monkeypatch.setattr(attempt, "_LOOK_S", 1e6)  # a fast machine: the last steps are made between two looks
    monkeypatch.setattr(attempt, "_SOON_S", 1e6)
    code, told = job.supervise("unseen", "--launch.faults", "kill rank=0 step=11")
    assert code == 0, told
    assert job.attempts("unseen")[-1]["recovered_s"] > 0
    assert "resumed  step 12 is done" in told


def test_restarts_that_are_used_up_end_the_run_with_the_cause(job):
    code, told = job.supervise(
        "given-up", "--launch.max-restarts", "1", "--launch.faults", "kill rank=0 step=6; kill rank=1 step=10"
    )
    assert code == 1
    assert "error: rank 1 of 2 was ended by SIGKILL" in told
    assert "The last finished checkpoint is step 8: run the same command to continue from it." in told
    assert "Not restarted: launch.max_restarts=1 restarts within 3600 s are used up." in told


def test_without_an_intact_checkpoint_the_run_ends_rather_than_begin_again(job):
    code, told = job.supervise("damaged", "--launch.faults", "corrupt-checkpoint step=6; kill rank=1 step=6")
    assert code == 1
    assert "step-00000004" in told
    assert "does not match its digest" in told


def test_a_damaged_checkpoint_is_passed_over_and_the_record_has_the_step_that_the_ranks_resumed_at(job, undisturbed):
    faults = "corrupt-checkpoint step=10; kill rank=1 step=10"  # the newest, step 8, is damaged: they resume at 4
    code, told = job.supervise("passed-over", "--launch.faults", faults)
    assert code == 0, told
    assert "rank 1 of 2 was ended by SIGKILL" in told
    assert job.losses("passed-over") == undisturbed
    assert [attempt["from_step"] for attempt in job.attempts("passed-over")] == [0, 4]
    assert "nanobind" not in told


def test_a_worker_that_fails_at_import_is_reported_once_and_not_started_again(job):
    code, told = job.supervise("broken", "--model.name", "no_such_package.model:build")
    assert code == 1
    assert told.count("error:") == 1
    assert "no_such_package" in told
    assert len(job.attempts("broken")) == 1


def test_local_ranks_listen_on_nothing_beyond_loopback(job, listening_beyond_loopback):
    control = "import socket, time; s = socket.create_server(('127.0.0.2', 0)); print(flush=True); time.sleep(900)"
    words = [sys.executable, "-c", control]
    with listening_beyond_loopback() as seen, subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        done = job.run("local-ports", "--train.steps", "4")
        other.kill()
    assert done.returncode == 0, done.stderr
    assert seen == {"0200007F"}  # a second loopback address, to show that it would be seen
