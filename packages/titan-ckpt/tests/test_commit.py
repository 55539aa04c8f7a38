import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from titan_ckpt import Checkpointer, CheckpointError, Manifest, Process, TrainState
from titan_ckpt.background import rendezvous
from titan_ckpt.save import write
from titan_ckpt.save.job import SaveLayout, WriteJob
from titan_ckpt.steps import claim, commit, leftovers, listing
from titan_ckpt.steps.claim import LOCK_NAME, release_root, take_root
from titan_ckpt.storage import files
from torch import nn


def make_state(fill: float = 1.0) -> TrainState:
    model = nn.Linear(16, 16)
    nn.init.constant_(model.weight, fill)
    return TrainState(model=model, rng=False)


def dead_process() -> Process:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return replace(Process.of(os.getpid()), pid=int(done.stdout), started="1")


def names(root) -> list[str]:
    """What lies in a folder of steps, but for the trainer's claim."""
    return sorted(path.name for path in root.iterdir() if path.name != LOCK_NAME)


def value(root) -> tuple[int, float]:
    state = make_state(0.0)
    step = Checkpointer(root).restore(state)
    weight = state.model.weight.detach()
    assert bool((weight == weight[0, 0]).all()), "a mix of two steps"
    return step, float(weight[0, 0])


def test_keep_last_one_keeps_exactly_the_newest(tmp_path):
    ck = Checkpointer(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        ck.save(step, make_state(step))
        assert ck.steps() == [step]
    assert value(tmp_path) == (3, 3.0)


def test_an_unfinished_save_is_neither_counted_nor_kept_nor_committed_later(tmp_path):
    ck = Checkpointer(tmp_path, keep_last=1)
    ck.save(1, make_state(1))
    folder, _ = commit.begin_save(tmp_path, 2, dead_process())
    (folder / "model-r00007.safetensors").write_bytes(b"of another world size")
    assert ck.latest() == 1
    ck.save(2, make_state(2))
    assert not (tmp_path / "step-00000002" / "model-r00007.safetensors").exists()
    assert folder.exists(), "this run has swept before its first save; the next one will"
    Checkpointer(tmp_path, keep_last=1).save(3, make_state(3))
    assert names(tmp_path) == ["step-00000003"]


def test_the_unfinished_save_of_a_living_process_is_left_alone(tmp_path):
    folder, _ = commit.begin_save(tmp_path, 2, Process.of(os.getpid()))
    assert leftovers.sweep(tmp_path) == []
    assert folder.exists()


@pytest.mark.parametrize("apart", [{"boot": "another"}, {"namespace": 1}, {"host": "elsewhere"}], ids=str)
def test_a_process_of_another_host_boot_or_namespace_is_never_called_dead(tmp_path, apart):
    stranger = replace(dead_process(), **apart)
    assert not stranger.local
    assert stranger.alive
    folder, _ = commit.begin_save(tmp_path, 2, stranger)
    assert claim.owner_of(folder) == stranger
    assert leftovers.sweep(tmp_path) == []
    os.utime(folder, (time.time() - 90_000,) * 2)
    assert leftovers.sweep(tmp_path) == [folder], "a day without a word from there"


def test_only_folders_with_names_of_ours_are_swept(tmp_path):
    Checkpointer(tmp_path).save(1, make_state(1))
    theirs = [
        ".tmp-mine",
        ".tmp-cache",
        ".trash-1000",
        ".tmp-00000002",
        ".trash-step-00000001",
        ".tmp-1-0123456789abcdef",
    ]
    for name in theirs:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    file = ".tmp-00000003-0123456789abcdef"
    (tmp_path / file).write_text("not a folder")
    ours = [".tmp-00000002-0123456789abcdef", ".trash-step-00000001.r1-01234567"]
    ours += [".trash-tmp-00000002-0123456789abcdef-01234567"]
    for name in ours:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    assert sorted(path.name for path in leftovers.sweep(tmp_path)) == sorted(ours)
    assert names(tmp_path) == sorted([*theirs, file, "step-00000001"])


def test_a_process_is_told_from_a_later_one_with_its_number_and_from_one_elsewhere():
    mine, dead = Process.of(os.getpid()), dead_process()
    assert Process.decode(json.loads(json.dumps(asdict(mine))) | {"other": 1}) == mine
    assert (mine.local, mine.alive, dead.local, dead.alive) == (True, True, True, False)
    assert not replace(mine, started="1").alive
    for elsewhere in ({"host": "far"}, {"boot": "another"}, {"namespace": 1}):
        found = replace(dead, **elsewhere)
        assert (found.local, found.alive) == (False, True)  # nothing proves that it ended
    for damaged in ({}, {"host": "a", "pid": "x", "started": None, "boot": None, "namespace": None}):
        with pytest.raises((KeyError, ValueError)):
            Process.decode(damaged)


def test_what_a_killed_deletion_of_a_leftover_left_is_swept(tmp_path):
    folder, _ = commit.begin_save(tmp_path, 2, dead_process())
    left = commit.retire(folder)
    assert left.exists()
    assert not folder.exists()
    assert commit.retire(folder) is None
    assert commit.retire(left) == left
    assert leftovers.sweep(tmp_path) == [left]
    assert names(tmp_path) == []


def test_a_save_that_cannot_be_begun_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        commit.begin_save(tmp_path, 1, Process.of(os.getpid()))
    assert names(tmp_path) == []


def test_a_leftover_that_cannot_be_deleted_stops_neither_the_sweep_nor_the_start(tmp_path, monkeypatch):
    kept, _ = commit.begin_save(tmp_path, 1, dead_process())
    gone, _ = commit.begin_save(tmp_path, 2, dead_process())
    real = commit.retire

    def retire(path):
        if path == kept:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return real(path)

    monkeypatch.setattr(commit, "retire", retire)
    assert leftovers.sweep(tmp_path) == [gone]
    assert names(tmp_path) == [kept.name]


def test_a_negative_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"step=-1 is negative\. Count steps from 0"):
        commit.begin_save(tmp_path, -1, Process.of(os.getpid()))
    assert names(tmp_path) == []


def test_a_committed_step_is_not_called_failed_for_what_comes_after(tmp_path, monkeypatch):
    ck = Checkpointer(tmp_path, keep_last=1)
    ck.save(1, make_state(1))
    real = Manifest.read

    def failing(path):
        if (tmp_path / "step-00000002").exists() and path.name == "step-00000001":
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "read", failing)
        assert ck.save(2, make_state(2)).path == tmp_path / "step-00000002"
    assert names(tmp_path) == ["step-00000001", "step-00000002"], "nothing is deleted where an answer failed"
    ck.save(3, make_state(3))
    assert names(tmp_path) == ["step-00000003"]


def test_a_folder_claimed_by_a_living_trainer_is_refused_to_another(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        first, second = Process.of(other.pid), Process.of(os.getpid())
        take_root(tmp_path, first)
        take_root(tmp_path, first)
        with pytest.raises(
            ValueError, match=rf"is being saved to by process {other.pid} on .*, so process {os.getpid()}"
        ):
            take_root(tmp_path, second)
        release_root(tmp_path, second)
        assert (tmp_path / LOCK_NAME).exists(), "only its owner gives up a claim"
        assert leftovers.sweep(tmp_path) == []
        assert (tmp_path / LOCK_NAME).exists()
        other.communicate(b"\n")
    take_root(tmp_path, second)  # the first is dead
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    release_root(tmp_path, second)
    release_root(tmp_path, second)
    assert list(tmp_path.iterdir()) == []


def test_a_claim_of_another_machine_is_taken_over_with_a_warning(tmp_path, caplog):
    take_root(tmp_path, Process("elsewhere", 7, "1"))
    mine = Process.of(os.getpid())
    take_root(tmp_path, mine)
    assert "is claimed by process 7 on elsewhere" in caplog.text
    caplog.clear()
    take_root(tmp_path, mine)
    assert caplog.text == ""


@pytest.mark.parametrize("links", [True, False])
def test_of_two_trainers_that_claim_a_folder_at_once_one_is_refused(tmp_path, monkeypatch, links):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        rival, real = Process.of(other.pid), Path.write_bytes

        def write(path, data):  # the other one comes between the look and the write
            monkeypatch.setattr(Path, "write_bytes", real)
            take_root(tmp_path, rival)
            return path.write_bytes(data)

        monkeypatch.setattr(Path, "write_bytes", write)
        if not links:
            monkeypatch.setattr(os, "link", _no_links)
        with pytest.raises(ValueError, match=f"saved to by process {other.pid}"):
            take_root(tmp_path, Process.of(os.getpid()))
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
        other.communicate(b"\n")


def _no_links(*_):
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_claim_of_the_dead_and_one_that_is_none_are_dropped(tmp_path):
    take_root(tmp_path, dead_process())
    assert leftovers.sweep(tmp_path) == []
    assert names(tmp_path) == [path.name for path in tmp_path.iterdir()]
    (tmp_path / LOCK_NAME).write_text('["no claim"]')
    take_root(tmp_path, Process.of(os.getpid()))
    assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text()


def test_saving_a_step_again_replaces_it_without_a_moment_without_it(tmp_path, monkeypatch):
    ck = Checkpointer(tmp_path)
    ck.save(1, make_state(1))
    with monkeypatch.context() as patch:
        patch.setattr(commit, "purge", lambda *_: [])  # as if killed right after the commit
        ck.save(1, make_state(2))
    assert value(tmp_path) == (1, 2.0)
    ck.save(1, make_state(3))
    assert value(tmp_path) == (1, 3.0)
    assert len(names(tmp_path)) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=["no-space", "io-error", "read-only"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_disk_error_at_any_write_is_raised_and_leaves_the_previous_step(tmp_path, monkeypatch, number, at):
    ck = Checkpointer(tmp_path, keep_last=1)
    ck.save(1, make_state(1))
    calls = [0]
    real = files.write_all

    def failing(fd, data):
        calls[0] += 1
        if calls[0] > at:
            raise OSError(number, os.strerror(number))
        real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(write, "write_all", failing)
        patch.setattr(files, "write_all", failing)
        with pytest.raises(
            CheckpointError, match=f"rank 0 cannot write below .*errno {number}.*Earlier steps are intact"
        ):
            ck.save(2, make_state(2))
    assert ck.steps() == [1]
    assert names(tmp_path) == ["step-00000001"]
    assert value(tmp_path) == (1, 1.0)
    ck.save(2, make_state(2))
    assert value(tmp_path) == (2, 2.0)


@pytest.mark.parametrize("failing", ["root", "step-00000002", ".owner.json"])
def test_a_disk_that_does_not_answer_is_no_missing_step_also_where_pathlib_says_so(tmp_path, monkeypatch, failing):
    root, real = tmp_path / "root", os.stat
    for step in (1, 2):
        Checkpointer(root).save(step, make_state(step))
    folder, save_id = commit.begin_save(root, 3, Process.of(os.getpid()))
    job = WriteJob(folder, 3, save_id, 0, 1, SaveLayout(()), (), None)

    def stat(path, *args, **options):
        if not isinstance(path, int) and Path(path).name == failing:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "is_dir", os.path.isdir)  # from Python 3.14 on
    monkeypatch.setattr(Path, "exists", os.path.exists)
    monkeypatch.setattr(os, "stat", stat)
    if failing == ".owner.json":
        with pytest.raises(OSError, match="Input/output error"):
            rendezvous.in_place(job)
        return
    with pytest.raises(CheckpointError, match="Input/output error"):
        Checkpointer(root).restore(make_state(0))
    with pytest.raises(OSError, match="Input/output error"):
        listing.is_gone(root / failing if failing != "root" else root)


def test_every_file_reaches_the_disk_before_the_rename_that_commits_it(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, type(tmp_path).rename

    def fsync(fd):
        events.append(("fsync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        real_fsync(fd)

    def rename(self, target):
        events.append(("rename", str(self)))
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(type(tmp_path), "rename", rename)
    Checkpointer(tmp_path).save(1, make_state())
    commit = max(i for i, (kind, name) in enumerate(events) if kind == "rename" and "/.tmp-" in name)
    synced = {name.rpartition("/")[2] for kind, name in events[:commit] if kind == "fsync"}
    assert {"model-r00000.safetensors", "state.json", "INDEX.json.zst", "MANIFEST.json.part", "state"} <= synced
    folders = [
        name for kind, name in events[:commit] if kind == "fsync" and name.rpartition("/")[2].startswith(".tmp-")
    ]
    assert folders, "the step's folder itself"
    assert events[commit + 1] == ("fsync", str(tmp_path))


def kill_rounds(root, rounds: int) -> None:
    draw = random.Random(0)
    highest = 0
    for _ in range(rounds):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(root)], stdout=subprocess.PIPE, text=True)
        child.stdout.readline()  # the first step is committed
        time.sleep(draw.random() * 0.2)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        step, weight = value(root)
        assert weight == step
        assert step >= highest + 1
        highest = step


KILLED = """
import sys, torch
from torch import nn
from titan_ckpt import Checkpointer, TrainState
root = sys.argv[1]
ck = Checkpointer(root, keep_last=2)
step = ck.latest() or 0
while True:
    step += 1
    model = nn.Linear(16, 16)
    nn.init.constant_(model.weight, float(step))
    ck.save(step, TrainState(model=model, rng=False))
    print(step, flush=True)
"""


def test_a_process_killed_while_saving_leaves_the_last_committed_step(tmp_path):
    kill_rounds(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_process_killed_two_hundred_times_while_saving_leaves_the_last_committed_step(tmp_path):
    kill_rounds(tmp_path, 200)
