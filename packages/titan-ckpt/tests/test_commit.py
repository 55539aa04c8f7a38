import errno
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from titan_ckpt import Checkpointer, CheckpointError, Retention, TrainState, _commit, _write
from torch import nn


def make_state(fill: float = 1.0) -> TrainState:
    model = nn.Linear(16, 16)
    nn.init.constant_(model.weight, fill)
    return TrainState(model=model, rng=False)


def dead_process() -> _commit.Process:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return replace(_commit.Process.of(os.getpid()), pid=int(done.stdout), started="1")


def names(root) -> list[str]:
    """What lies in a folder of steps, but for the trainer's claim."""
    return sorted(path.name for path in root.iterdir() if path.name != _commit.LOCK_NAME)


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


def test_retention_keeps_last_every_and_best():
    steps = {step: {"loss": abs(step - 7) + 0.5} for step in range(1, 13)}
    assert Retention(last=2).surplus(steps) == list(range(1, 11))
    assert [s for s in steps if s not in Retention(last=1, every=5).surplus(steps)] == [5, 10, 12]
    assert [s for s in steps if s not in Retention(last=1, best="loss").surplus(steps)] == [7, 12]
    assert [s for s in steps if s not in Retention(last=1, best="loss", best_is="max").surplus(steps)] == [1, 12]
    assert Retention().surplus(steps) == []
    assert Retention(last=1, best="loss").surplus({1: {"loss": float("nan")}, 2: {}}) == [1]
    with pytest.raises(ValueError, match="keep_last=0 would keep nothing"):
        Retention(last=0)


def test_an_unfinished_save_is_neither_counted_nor_kept_nor_committed_later(tmp_path):
    ck = Checkpointer(tmp_path, keep_last=1)
    ck.save(1, make_state(1))
    folder, _ = _commit.begin_save(tmp_path, 2, dead_process())
    (folder / "model-r00007.safetensors").write_bytes(b"of another world size")
    assert ck.latest() == 1
    ck.save(2, make_state(2))
    assert not (tmp_path / "step-00000002" / "model-r00007.safetensors").exists()
    Checkpointer(tmp_path)
    assert names(tmp_path) == ["step-00000002"]


def test_the_unfinished_save_of_a_living_process_is_left_alone(tmp_path):
    folder, _ = _commit.begin_save(tmp_path, 2, _commit.Process.of(os.getpid()))
    assert _commit.sweep(tmp_path) == []
    assert folder.exists()


def test_saving_a_step_again_replaces_it_without_a_moment_without_it(tmp_path, monkeypatch):
    ck = Checkpointer(tmp_path)
    ck.save(1, make_state(1))
    with monkeypatch.context() as patch:
        patch.setattr(_commit, "purge", lambda *_: [])  # as if killed right after the commit
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
    real = _write._write_all

    def failing(fd, data):
        calls[0] += 1
        if calls[0] > at:
            raise OSError(number, os.strerror(number))
        real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(_write, "_write_all", failing)
        with pytest.raises(
            CheckpointError, match=f"rank 0 cannot write below .*errno {number}.*Earlier steps are intact"
        ):
            ck.save(2, make_state(2))
    assert ck.steps() == [1]
    assert names(tmp_path) == ["step-00000001"]
    assert value(tmp_path) == (1, 1.0)
    ck.save(2, make_state(2))
    assert value(tmp_path) == (2, 2.0)


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
