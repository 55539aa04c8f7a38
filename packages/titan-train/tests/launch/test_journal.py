"""The supervisor's own files on a disk that is full: `/dev/full` answers every write with a real ENOSPC."""

import errno
import io
import json

from titan_train.config import Config
from titan_train.launch.supervise import supervisor as module
from titan_train.launch.supervise.journal import Journal
from titan_train.launch.supervise.supervisor import Supervisor


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
