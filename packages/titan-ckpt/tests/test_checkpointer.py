"""What a Checkpointer refuses, and what it tells the machinery below it."""

import subprocess
import sys

import pytest
from titan_ckpt import Checkpointer, DamageError, TrainState
from titan_ckpt._claim import LOCK_NAME, take_root
from titan_ckpt._process import Process
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
    file = next((tmp_path / "step-00000003").glob("model-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamageError):
        ck.restore(state_of())
    assert ck.restore(state_of(), fallback=True) == 2
    ck.save(4, state_of(4.0))
    assert ck.steps() == [2, 3, 4], "2 is the other one to keep; 3 is left for someone to look at"
    ck.save(3, state_of(3.0))
    ck.save(5, state_of(5.0))
    assert ck.steps() == [3, 5], "saved again, it counts again"


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
