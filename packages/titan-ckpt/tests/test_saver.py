"""What can go wrong around a saver process: full disks, lost machines, forked children, a killed trainer, a clock."""

import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from titan_ckpt import Checkpointer, CheckpointError, TrainState
from titan_ckpt.background import client, rendezvous, server
from titan_ckpt.background.rendezvous import NotCommitted, Patience, SignOfLife, await_outcome, await_report, give_up
from titan_ckpt.save.job import SaveLayout, WriteJob
from titan_ckpt.steps import commit, leftovers
from titan_ckpt.steps.claim import Process, name_owner
from titan_testing import run_ranks
from torch import nn

ELSEWHERE = dataclasses.replace(Process.of(os.getpid()), host="elsewhere")


def state_of(value: float = 1.0, size: int = 16) -> TrainState:
    model = nn.Linear(size, size)
    nn.init.constant_(model.weight, value)
    return TrainState(model=model, rng=False)


def job_of(root: Path, rank: int, lead=None) -> WriteJob:
    folder, save_id = commit.begin_save(root, 2, Process.of(os.getpid()))
    return WriteJob(folder, 2, save_id, rank, 2, SaveLayout(()), (), lead)


def patience(*, trainer_gone: bool) -> Patience:
    return Patience(60.0, lambda: trainer_gone)


def wait_for(condition, seconds=20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def run_script(code: str, *args: str, timeout: float = 60.0) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *args], timeout=timeout, check=False, capture_output=True, text=True
    )


# --- full disks ---------------------------------------------------------------------------------------------------


def test_a_failed_rank_says_why_in_the_space_it_reserved_before_it_wrote(tmp_path, monkeypatch):
    job = job_of(tmp_path, rank=1)
    with SignOfLife(job):
        note = next(job.folder.glob(".life-*"))
        before = note.stat()
        monkeypatch.setattr(Path, "write_bytes", _no_space)  # a new file cannot be made any more
        assert give_up(job, "rank 1 cannot write: No space left on device")
    assert (note.stat().st_ino, note.stat().st_size) == (before.st_ino, before.st_size)
    with pytest.raises(NotCommitted, match=r"rank 1 failed: .*No space left"):
        await_report(job, 1, ELSEWHERE, patience(trainer_gone=False))


def test_a_saver_whose_disk_takes_not_even_a_note_answers_and_ends(tmp_path, monkeypatch):
    job = job_of(tmp_path, rank=1)
    monkeypatch.setattr(rendezvous, "_write_note", _no_space)
    savers = [dataclasses.asdict(Process.of(os.getpid()))] * 2
    answer, left = server._carry_out(job, memoryview(b""), {"savers": savers, "timeout_s": 60.0}, lambda: False)
    assert "No space left" in answer["error"]
    assert answer["ends"]
    assert left == []


def _no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def save_on_a_full_disk(root: str) -> tuple[list[str], list[int]]:
    ck, errors = Checkpointer(root, async_=True), []
    ck.save(1, state_of(size=64))
    ck.wait()
    for step in (2, 3):
        ck.save(step, state_of(size=1400))
        try:
            ck.wait(30)
        except CheckpointError as err:
            errors.append(str(err))
    ck.save(4, state_of(size=64))
    ck.close()
    return errors, ck.steps()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_fails_the_step_at_once_on_every_rank_and_the_next_small_one_works(tmp_path, ranks):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3000k", "t", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        for errors, steps in run_ranks(save_on_a_full_disk, ranks, f"{tmp_path}/root", timeout_s=50):
            assert len(errors) == 2
            assert steps == [1, 4]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# --- what vanishes --------------------------------------------------------------------------------------------------


def test_a_step_whose_folder_something_else_deletes_fails_at_once(tmp_path):
    job = job_of(tmp_path, rank=0)
    commit.discard(job.folder)
    with pytest.raises(NotCommitted, match="something else deleted it"):
        await_report(job, 1, ELSEWHERE, patience(trainer_gone=False))
    with pytest.raises(NotCommitted, match="was not committed"):
        await_outcome(job, ELSEWHERE, patience(trainer_gone=False))
    assert give_up(dataclasses.replace(job, rank=1), "too late, but nobody waits")


def test_another_working_folder_later_does_not_move_the_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run", async_=True) as ck:
        ck.save(1, state_of()).wait(30)
        (tmp_path / "below").mkdir()
        monkeypatch.chdir(tmp_path / "below")
        ck.save(2, state_of()).wait(30)
        assert ck.steps() == [1, 2]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000001", "step-00000002"]


def test_a_saver_of_a_lost_machine_is_waited_for_until_it_is_silent_and_this_trainer_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SILENCE_S", 0.3)
    monkeypatch.setattr(rendezvous, "_BEAT_S", 0.05)
    job = job_of(tmp_path, rank=1)
    began = time.monotonic()
    with pytest.raises(NotCommitted, match="not on disk in time"):
        await_report(job, 1, ELSEWHERE, patience(trainer_gone=True))
    assert 0.3 <= time.monotonic() - began < 10
    with pytest.raises(NotCommitted, match="not committed in time"):
        await_outcome(job, ELSEWHERE, patience(trainer_gone=True))
    living, orphaned = patience(trainer_gone=False), patience(trainer_gone=True)
    with SignOfLife(job):
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            note = rendezvous._read_note(job, 1)
            assert not orphaned.ended(ELSEWHERE, note), "it says that it lives"
            assert not living.ended(ELSEWHERE, {})
            assert not living.ended(Process.of(os.getpid()), {})
            time.sleep(0.01)


LOST = """
import dataclasses, os, signal, sys, time, torch
from titan_ckpt import Checkpointer, TrainState
from titan_ckpt.background.client import BackgroundSaver
real = BackgroundSaver.submit
def submit(self, job, result, savers):
    other = dataclasses.replace(savers[0], host="lost-machine")
    return real(self, dataclasses.replace(job, world_size=2), result, [*savers, other])
ck = Checkpointer(sys.argv[1], async_=True)
ck.save(1, TrainState(model=torch.nn.Linear(8, 8), rng=False)).wait(30)
BackgroundSaver.submit = submit
ck.save(2, TrainState(model=torch.nn.Linear(8, 8), rng=False))
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_restart_after_a_lost_machine_waits_twenty_seconds_and_goes_on_from_the_step_before(tmp_path):
    assert run_script(LOST, str(tmp_path)).returncode == -signal.SIGKILL
    began = time.monotonic()
    ck = Checkpointer(tmp_path)
    assert ck.restore(state_of(size=8)) == 1
    assert time.monotonic() - began < 40
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]


def test_a_saver_that_still_writes_is_waited_for_as_long_as_is_asked(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        Checkpointer(tmp_path).save(step, state_of())
    written, unfinished = tmp_path / "step-00000002", tmp_path / f".tmp-00000002-{'0' * 16}"
    written.rename(unfinished)
    saver = subprocess.Popen(["sleep", "60"])
    name_owner(unfinished, Process.of(saver.pid))
    monkeypatch.setattr(leftovers, "_inherited", lambda pid: pid == saver.pid)
    try:
        assert Checkpointer(tmp_path, inherited_wait_s=0.2).restore(state_of()) == 1
        assert "still writes after 0.2 s" in caplog.text
        commits = threading.Timer(1.0, unfinished.rename, [written])
        commits.start()
        assert Checkpointer(tmp_path, inherited_wait_s=30.0).restore(state_of()) == 2
        commits.join()
    finally:
        saver.kill()
        saver.wait()


WRITER = """
import sys, torch
from titan_ckpt import Checkpointer, TrainState
model = torch.nn.Linear(300, 300)
ck = Checkpointer(sys.argv[1], keep_last=1)
for step in range(1, 100_000):
    torch.nn.init.constant_(model.weight, float(step))
    ck.save(step, TrainState(model=model, rng=False))
"""


def test_a_reader_beside_a_run_that_keeps_one_step_reads_a_whole_one_each_time(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    try:
        reader, state, last = Checkpointer(tmp_path), state_of(size=300), 0
        while not reader.latest():
            assert writer.poll() is None
            time.sleep(0.01)
        reads = first = 0
        while reads < 100 or last == first:
            step = reader.restore(state)
            assert state.model.weight.unique().tolist() == [step]
            assert step >= last
            first, last, reads = first or step, step, reads + 1
    finally:
        writer.kill()
        writer.wait()


# --- forked children ------------------------------------------------------------------------------------------------


def test_closing_does_not_wait_for_forked_children(tmp_path):
    ck = Checkpointer(tmp_path, async_=True)
    ck.save(1, state_of())
    child = subprocess.Popen(  # holds the trainer's end of the socket, as a forked data loader does
        ["sleep", "60"], pass_fds=[ck._saver._link.control.fileno()]
    )
    try:
        ck.save(2, state_of())
        began = time.monotonic()
        ck.close()
        assert time.monotonic() - began < 20
        assert not ck._saver.process.alive
    finally:
        child.kill()
        child.wait()
    assert ck.steps() == [1, 2]


FORKING = """
import os, signal, sys, torch
from titan_ckpt import Checkpointer, TrainState
ck = Checkpointer(sys.argv[1], async_=True)
ck.save(1, TrainState(model=torch.nn.Linear(8, 8), rng=False)).wait(30)
if os.fork() == 0:  # as a data loader's worker
    signal.alarm(30)
    os.close(1)
    signal.pause()
print(ck._saver.process.pid, flush=True)
ck.save(2, TrainState(model=torch.nn.Linear(8, 8), rng=False))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainers_saver_ends_after_its_job_though_forked_children_live(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert ran.returncode == -signal.SIGKILL
    saver = Process.of(int(ran.stdout))
    assert wait_for(lambda: not saver.alive)
    assert Checkpointer(tmp_path).steps() == [1, 2]


# --- how a saver starts and ends ------------------------------------------------------------------------------------


def test_a_saver_does_not_import_from_the_trainers_working_folder(tmp_path, monkeypatch):
    (tmp_path / "socket.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ImportError('mine')\n")
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run", async_=True) as ck:
        ck.save(1, state_of()).wait(30)
    assert not (tmp_path / "ran").exists()


def test_a_saver_that_dies_is_reported_with_its_last_words(tmp_path, monkeypatch):
    command = client.command
    monkeypatch.setattr(
        "titan_ckpt.background.client.command",
        lambda fd: [*command(fd)[:2], "-c", "import sys; sys.stdin.read(); sys.exit('no such luck')"],
    )
    ck = Checkpointer(tmp_path, async_=True)
    ck.save(1, state_of())
    with pytest.raises(CheckpointError, match=r"exit status 1.*no such luck"):
        ck.wait(30)
    monkeypatch.undo()
    ck.save(2, state_of())
    ck.close()
    assert ck.steps() == [2]


def fail_to_start(root: str) -> str:
    ck = Checkpointer(root, async_=True)
    real = subprocess.Popen
    if torch.distributed.get_rank() == 1:
        subprocess.Popen = _no_processes
    try:
        ck.save(1, state_of())
    except CheckpointError as err:
        subprocess.Popen = real
        ck.save(2, state_of())
        ck.close()
        return str(err)
    return ""


def _no_processes(*_, **__):
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_saver_that_cannot_be_started_on_one_rank_is_every_ranks_error(tmp_path):
    first, second = run_ranks(fail_to_start, 2, str(tmp_path), timeout_s=40)
    assert "rank 1 failed" in first
    assert "could not be started: [Errno 11] Resource temporarily unavailable" in second
    assert Checkpointer(tmp_path).steps() == [2]


def test_a_message_is_read_to_its_end_or_not_at_all():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server.send(ours, b"whole")
        assert server.receive(theirs, lambda: False) == (b"whole", None)
        ours.sendall((100).to_bytes(8, "little") + b"half")
        assert server.receive(theirs, lambda: True) is None, "the other process is gone, its end is held open"
        theirs.shutdown(socket.SHUT_RDWR)
        assert server.receive(theirs, lambda: False) is None
    assert server.receive(theirs, lambda: False) is None, "a closed end is no error"
