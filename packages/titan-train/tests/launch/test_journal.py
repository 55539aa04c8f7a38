"""The supervisor without ranks. Its own files on a disk that is full: `/dev/full` answers every write with a real ENOSPC."""

import errno
import io
import json
from types import SimpleNamespace

import pytest
from titan_train.config import Config, LaunchConfig, TrainConfig
from titan_train.launch.job import Attempt, RankExit
from titan_train.launch.place.here import _Places
from titan_train.launch.supervise import supervisor as module
from titan_train.launch.supervise.journal import Journal
from titan_train.launch.supervise.supervisor import Before, Supervisor


def test_lines_that_a_full_disk_refuses_are_kept_and_written_when_there_is_room(tmp_path):
    file, out = tmp_path / "attempts.jsonl", io.StringIO()
    file.symlink_to("/dev/full")
    journal = Journal(file, out)
    journal.record({"attempt": 0})
    journal.record({"attempt": 1})
    assert out.getvalue() == "note     attempts.jsonl cannot be written (No space left on device); the run goes on\n"
    file.unlink()
    journal.record({"attempt": 2})
    assert [json.loads(line)["attempt"] for line in file.read_text().splitlines()] == [0, 1, 2]


class GoneTerminal(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_terminal_that_is_gone_does_not_end_the_run(tmp_path):
    closed = io.StringIO()
    closed.close()
    for out in (GoneTerminal(), closed):
        Journal(tmp_path / "a", out).say("restart")


class NoRanks:
    device = "cpu"

    def close(self, exit_code=1):
        self.code = exit_code

    def start(self, attempt):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_the_supervisor_waits_for_room_says_so_once_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    out, refusals = io.StringIO(), [OSError(errno.ENOSPC, "No space left on device", "runs/a/staged")] * 2

    def prepare(_attempt):
        if refusals:
            raise refusals.pop()

    supervisor = Supervisor(NoRanks(), Config(), tmp_path, ranks=2, on_attempt=prepare, out=out)
    monkeypatch.setattr(supervisor._budget, "_most", 0)
    assert supervisor.run() == 1
    told = out.getvalue()
    assert told.count("waiting  runs/a/staged: No space left on device. Make room") == 1
    assert "error: the ranks could not be started" in told
    (line,) = (tmp_path / "attempts.jsonl").read_text().splitlines()
    assert "could not be started" in json.loads(line)["end"]


def test_an_error_that_waiting_does_not_cure_ends_the_attempt_at_once(tmp_path):
    def prepare(_attempt):
        raise PermissionError(errno.EACCES, "Permission denied", "runs/a")

    out = io.StringIO()
    supervisor = Supervisor(NoRanks(), Config(), tmp_path, ranks=2, on_attempt=prepare, out=out)
    supervisor._budget._most = 0
    assert supervisor.run() == 1
    assert "Permission denied" in out.getvalue()


def test_a_rank_that_cannot_be_killed_ends_the_run_with_the_cause_and_its_name(tmp_path):
    def end():
        raise RuntimeError("SIGKILL has not ended rank 1 (process 812)")

    class Stuck(NoRanks):
        def start(self, attempt):
            exits = lambda _: [RankExit(0, -9)]  # noqa: E731
            return SimpleNamespace(exits=exits, beats=dict, node_of=lambda _: "here", order=lambda _: None, end=end)

    out = io.StringIO()
    assert Supervisor(Stuck(), Config(), tmp_path, ranks=2, out=out).run() == 1
    assert "error: rank 0 of 2 was ended by SIGKILL" in out.getvalue()
    assert out.getvalue().endswith("Not restarted: SIGKILL has not ended rank 1 (process 812).\n")
    assert len((tmp_path / "attempts.jsonl").read_text().splitlines()) == 1


class Few(NoRanks):
    """Ranks that are there, one count after the other; then as the last."""

    def __init__(self, *counts):
        self.counts, self.sizes = list(counts), []

    def capacity(self):
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]

    def start(self, attempt):
        self.sizes.append(attempt.world_size)
        return super().start(attempt)


def elastic(launcher, tmp_path, monkeypatch, wait_s, before=None):
    monkeypatch.setattr(module, "_RANKS_S", wait_s)
    config = Config(launch=LaunchConfig(elastic=True, max_restarts=2), train=TrainConfig(global_batch=4))
    out = io.StringIO()
    supervisor = Supervisor(launcher, config, tmp_path, ranks=2, out=out, before=before)
    monkeypatch.setattr(supervisor, "_sleep", lambda _: None)
    return supervisor, out


def test_too_few_ranks_after_a_loss_are_a_lost_attempt_and_no_mistake(tmp_path, monkeypatch):
    supervisor, out = elastic(Few(2, 0), tmp_path, monkeypatch, 0.0)
    assert supervisor.run() == 1
    assert "lost     0 of 2 ranks are left" in out.getvalue()
    assert "launch.max_restarts=2 restarts within" in out.getvalue()
    assert [json.loads(line)["attempt"] for line in (tmp_path / "attempts.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_enough_ranks_are_waited_for_after_a_loss_and_not_at_the_start(tmp_path, monkeypatch):
    launcher = Few(2, 0, 0, 1, 2)
    supervisor, out = elastic(launcher, tmp_path, monkeypatch, 600.0)
    assert supervisor.run() == 1
    assert launcher.sizes == [2, 1, 2]
    assert out.getvalue().count("waiting  0 of 2 ranks are left") == 1
    supervisor, _ = elastic(Few(0), tmp_path, monkeypatch, 600.0)
    with pytest.raises(ValueError, match="0 of 2 ranks are left"):
        supervisor.run()


@pytest.mark.parametrize("waits_for", ["ranks", "room"])
def test_a_stop_during_a_wait_is_no_failure(tmp_path, monkeypatch, waits_for):
    launcher = Few(2, 0) if waits_for == "ranks" else Few(2)
    supervisor, out = elastic(launcher, tmp_path, monkeypatch, 600.0)

    def prepare(_attempt):
        if waits_for == "room":
            raise OSError(errno.ENOSPC, "No space left on device", "runs/a/staged")

    def stop(_seconds):  # the person reads "or press Ctrl-C", and does
        supervisor._requests.stops += "or press Ctrl-C" in out.getvalue()

    monkeypatch.setattr(supervisor, "_on_attempt", prepare)
    monkeypatch.setattr(supervisor, "_sleep", stop)
    assert supervisor.run() == launcher.code == 0
    assert out.getvalue().count("or press Ctrl-C") == 1
    assert "error" not in out.getvalue()


class Refused(NoRanks):
    """Places no ranks the first time."""

    starts = 0

    def start(self, attempt):
        self.starts += 1
        if self.starts == 1:
            raise ValueError("the cluster cannot hold this job")
        return super().start(attempt)


def test_a_supervisor_that_is_started_again_waits_and_restarts_as_the_one_before_it(tmp_path, monkeypatch):
    launcher = Few(0, 2)
    supervisor, out = elastic(launcher, tmp_path, monkeypatch, 600.0, Before(again=True))
    assert supervisor.run() == 1
    assert launcher.sizes == [2, 2, 2]
    assert "waiting  0 of 2 ranks are left" in out.getvalue()
    launcher, out = Refused(), io.StringIO()
    monkeypatch.setattr(module, "saved_step", lambda *_: 3)
    config = Config(launch=LaunchConfig(max_restarts=1))
    supervisor = Supervisor(launcher, config, tmp_path, ranks=2, out=out, before=Before(again=True))
    monkeypatch.setattr(supervisor, "_sleep", lambda _: None)
    assert supervisor.run() == 1
    assert launcher.starts == 2
    assert "lost     the cluster cannot hold this job\nrestart  from step 3" in out.getvalue()


def test_the_last_places_of_a_machine_stay_in_use(tmp_path):
    places = _Places(2)
    attempt = Attempt(0, Config(launch=LaunchConfig(elastic=True)), tmp_path, 2)
    for place in (0, 0, 1, 1):
        places.lost(place, attempt, 0)
    assert places.usable() == [1]


def test_a_stop_while_the_run_grows_starts_nothing_more(tmp_path, monkeypatch):
    supervisor = Supervisor(NoRanks(), Config(), tmp_path, ranks=2, out=io.StringIO())
    started = []

    def grow(number):
        started.append(number)
        supervisor._requests.stops = 1
        return Attempt(number, Config(), tmp_path, 1), module.Outcome(growing=len(started) == 1)

    monkeypatch.setattr(supervisor, "_next", grow)
    assert (supervisor.run(), started) == (0, [0])
