"""kill -9 at random moments of saves on four ranks: a rank, a saver process, or every trainer but no saver."""

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from titan_ckpt import Checkpointer, CheckpointError, TrainState
from titan_ckpt.steps import claim, leftovers
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 4
SAVES = 12


def state_at(step: float) -> TrainState:
    """Sharded where there are ranks, so that a mix of two steps would show."""
    model = nn.Linear(256, 256)
    if torch.distributed.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
    return TrainState(model=model, rng=False, extra={"step": int(step)})


def committed(root: Path) -> int:
    """The newest step, which must be whole and of one save: on this one process, every value is its number."""
    state = state_at(-1.0)
    step = Checkpointer(root).restore(state, verify="all")
    for param in state.model.parameters():
        assert step == 0 or bool((param == step).all()), f"step {step} is not what was saved"
    assert state.extra["step"] == (step or -1)
    leftovers.sweep(root)  # as the first save does
    left = [path.name for path in root.iterdir() if not path.name.startswith("step-")]
    # A trainer may die between making a folder and naming its owner there; for a minute that may be anyone's.
    assert not [name for name in left if (root / name / claim.OWNER_NAME).exists()], left
    return step


def save_until_killed(root: str, victim: str, delay_s: float) -> None:
    rank = torch.distributed.get_rank()
    accepted = os.open(f"{root}.accepted-{rank}", os.O_WRONLY | os.O_CREAT)
    try:
        ck = Checkpointer(root, keep_last=2, async_=victim != "rank")
        first = (ck.latest() or 0) + 1
        for step in range(first, first + SAVES):
            ck.save(step, state_at(float(step)))
            os.pwrite(accepted, b"%08d" % step, 0)
            if step == first:
                ck.wait()
            if step == first and (rank == 1 or victim == "trainers"):
                # a saver that dies between two saves is replaced, and nothing is lost: then all saves succeed
                pid = ck._saver.process.pid if victim == "saver" else os.getpid()
                threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)).start()
        ck.wait()
    except CheckpointError:
        if victim != "saver":
            raise
    finally:
        os.kill(os.getpid(), signal.SIGKILL)  # as a launcher does to the others; savers live on


def kill_rounds(tmp_path: Path, victim: str, rounds: int) -> None:
    draw = random.Random(victim)
    root = tmp_path / "root"
    highest = 0
    for _ in range(rounds):
        run_ranks(
            save_until_killed, RANKS, str(root), victim, 0.02 + draw.random() * 0.4, allow_death=True, timeout_s=150
        )
        step = committed(root)
        assert step >= highest
        if victim == "trainers":  # what every rank was told is accepted must be there
            told = [int(Path(f"{root}.accepted-{rank}").read_bytes() or b"0") for rank in range(RANKS)]
            assert step >= min(told), (step, told)
        highest = step
    assert highest > 0


VICTIMS = ["rank", "saver", "trainers"]


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_at_a_random_moment_leaves_the_last_committed_step(tmp_path, victim):
    kill_rounds(tmp_path, victim, 1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("victim", VICTIMS)
def test_two_hundred_kills_at_random_moments_leave_the_last_committed_step(tmp_path, victim):
    kill_rounds(tmp_path, victim, 200)
