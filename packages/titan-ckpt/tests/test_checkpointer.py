"""What a Checkpointer refuses, and what it tells the machinery below it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch.distributed as dist
from ckpt_loop import flip_last_byte
from titan_ckpt import Checkpointer, DamageError, TrainState
from titan_ckpt.steps.claim import LOCK_NAME, Process, release_root, take_root
from titan_testing import run_ranks
from torch import nn


def state_of(value: float = 1.0) -> TrainState:
    model = nn.Linear(16, 16)
    nn.init.constant_(model.weight, value)
    return TrainState(model=model, rng=False)


def test_a_store_in_this_processs_memory_is_refused_where_other_processes_write_too():
    pytest.importorskip("fsspec")
    with pytest.raises(ValueError, match=r"can be reached by this process only.*async_=False"):
        Checkpointer("memory://titan-checkpointer", async_=True)
    Checkpointer("memory://titan-checkpointer").save(1, state_of())


def test_a_step_that_a_restore_found_damaged_does_not_count_among_those_to_keep(tmp_path):
    ck = Checkpointer(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        ck.save(step, state_of(step))
    flip_last_byte(next((tmp_path / "step-00000003").glob("model-*.safetensors")))
    with pytest.raises(DamageError):
        ck.restore(state_of())
    assert ck.restore(state_of(), fallback=True) == 2
    ck.save(4, state_of(4.0))
    assert ck.steps() == [2, 3, 4], "2 is the other one to keep; 3 is left for someone to look at"
    ck.save(3, state_of(3.0))
    ck.save(5, state_of(5.0))
    assert ck.steps() == [3, 5], "saved again, it counts again"


def test_a_step_found_damaged_counts_for_nothing_after_another_restore_either(tmp_path):
    ck = Checkpointer(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        ck.save(step, state_of(step))
    flip_last_byte(next((tmp_path / "step-00000003").glob("model-*.safetensors")))
    assert ck.restore(state_of(), fallback=True) == 2
    assert ck.restore(state_of(), 2) == 2
    ck.save(4, state_of(4.0))
    assert ck.steps() == [2, 3, 4]


def restore_own(root):
    state = state_of(0.0)
    with pytest.raises(ValueError, match="asks for step") as error:
        Checkpointer(root).restore(state, dist.get_rank() + 1)
    return str(error.value), float(state.model.weight[0, 0])


def test_ranks_that_ask_for_different_steps_are_refused_on_all_and_restore_none(tmp_path):
    ck = Checkpointer(tmp_path)
    for step in (1, 2):
        ck.save(step, state_of(step))
    for error, weight in run_ranks(restore_own, 2, str(tmp_path)):
        assert error.startswith("rank 0 asks for step 1, and rank 1 for step 2")
        assert weight == 0.0


def test_a_folder_that_another_running_process_saves_to_is_refused_and_left_as_it_is(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        rival = Process.of(other.pid)
        take_root(tmp_path, rival)
        ck = Checkpointer(tmp_path)
        assert ck.restore(state_of()) == 0
        with pytest.raises(ValueError, match=f"is being saved to by process {other.pid}"):
            ck.save(1, state_of())
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    finally:
        other.kill()
        other.wait()
    ck.save(1, state_of())
    ck.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"], "the claim goes with the Checkpointer"


FORKING = """
import os, sys, torch
from titan_ckpt import Checkpointer, TrainState
ck = Checkpointer(sys.argv[1])
ck.save(1, TrainState(model=torch.nn.Linear(4, 4), rng=False))
if child := os.fork():
    os.waitpid(child, 0)
    print(sorted(os.listdir(sys.argv[1])))
"""


def test_a_forked_child_that_ends_does_not_give_up_its_parents_claim(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"{[LOCK_NAME, 'step-00000001']}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"], "the parent does when it ends"


def save_step(root: str) -> str:
    """The error, if any."""
    try:
        Checkpointer(root, keep_last=1).save(9, state_of())
    except ValueError as err:
        return str(err)
    return ""


def refused_in_another_process(root) -> bool:
    (error,) = run_ranks(save_step, 1, str(root), init=False)
    assert not error or "is being saved to by process" in error
    return bool(error)


@pytest.mark.parametrize("spelling", ["same", "relative", "link", "dots"])
def test_the_claim_stays_until_the_last_checkpointer_of_a_process_closes(tmp_path, monkeypatch, spelling):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    other = {"same": root, "relative": "root", "link": tmp_path / "link", "dots": root / ".." / "root"}[spelling]
    first, second = Checkpointer(root, keep_last=1), Checkpointer(other, keep_last=1)
    first.save(1, state_of())
    second.save(2, state_of())
    first.close()
    first.close()
    assert refused_in_another_process(root)
    second.save(3, state_of())
    assert second.steps() == [3]
    second.close()
    assert [path.name for path in root.iterdir()] == ["step-00000003"]
    assert not refused_in_another_process(root)


def test_a_dropped_checkpointer_gives_up_its_share_of_the_claim_only(tmp_path):
    kept = Checkpointer(tmp_path)
    kept.save(1, state_of())
    for step in (2, 3):
        Checkpointer(tmp_path).save(step, state_of())
    assert (tmp_path / LOCK_NAME).exists()
    kept.close()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_claim_of_an_older_version_counts_as_one(tmp_path):
    mine = Process.of(os.getpid())
    (tmp_path / LOCK_NAME).write_text(json.dumps(asdict(mine)))
    take_root(tmp_path, mine)
    release_root(tmp_path, mine)
    assert (tmp_path / LOCK_NAME).exists()
    release_root(tmp_path, mine)
    assert not (tmp_path / LOCK_NAME).exists()


FORKED_SAVE = """
import os, sys, torch
from titan_ckpt import Checkpointer, TrainState
state = TrainState(model=torch.nn.Linear(4, 4), rng=False)
ck = Checkpointer(sys.argv[1], keep_last=1)
ck.save(1, state)
if child := os.fork():
    os.waitpid(child, 0)
    print(ck.steps())
else:
    for saver in (ck, Checkpointer(sys.argv[1])):
        try:
            saver.save(2, state)
        except ValueError as err:
            print(err, flush=True)
    print(ck.restore(state), flush=True)
"""


def test_a_forked_child_cannot_save_beside_its_parent(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED_SAVE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    inherited, made, restored, steps = ran.stdout.splitlines()
    assert "is a fork of it: both would save there" in inherited
    assert "is being saved to by process" in made
    assert (restored, steps) == ("1", "[1]")
