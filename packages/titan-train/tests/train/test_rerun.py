"""A suspect step is computed again: what the verdict is for each fault, and that it changes nothing else."""

import dataclasses
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_run import Injecting, tiny_run, write_text
from titan_testing import run_ranks
from titan_train.data.loader.source import TensorBatch
from titan_train.inputs import prepare_inputs
from titan_train.tasks.diffusion.batches import FlowTarget
from titan_train.train import Trainer
from titan_train.train.observer import StepResult
from titan_train.train.observers import NonFiniteLimit
from titan_train.train.rerun import Rerun, RerunVerdict, Suspicion, judge, judge_elsewhere, neighbours_batches
from titan_train.train.step_random import RandomState

SUSPICIOUS = {
    "train": {"steps": 20, "global_batch": 8, "rerun_above": 1.15},
    "optimizer": {"lr": 3e-3},
    "metrics": {"progress": "off", "split_every": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerun")
    write_text(folder)
    prepare_inputs(tiny_run(folder), quiet=True)
    return folder


def train(folder, name, plan, sections):
    import torch.distributed as dist

    config = tiny_run(folder, name, **(SUSPICIOUS | sections))
    with Trainer(config, monitor=Injecting(plan, dist.get_rank(), folder / "runs" / name)) as trainer:
        trainer.fit()
        return trainer.losses


def verdicts(folder, name):
    lines = map(json.loads, (Path(folder) / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["verdict"], line["ranks"]) for line in lines if line.get("event") == "rerun"]


@pytest.mark.parametrize(
    ("plan", "verdict"),
    [
        ("bit-flip rank=1 step=9", "transient hardware"),
        ("stuck-bit rank=1 step=9", "persistent hardware"),
        ("bad-data rank=1 step=18", "data or numerics"),
    ],
)
def test_a_fault_is_told_apart_and_its_rank_named(folder, plan, verdict):
    name = plan.split()[0]
    losses = run_ranks(train, 2, folder, name, plan, {})[0]
    assert verdicts(folder, name) == [(int(plan.rpartition("=")[2]), verdict, [1])]
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0]


def lent(_):
    import torch.distributed as dist

    mine = torch.full((2,), float(dist.get_rank()))
    batch = TensorBatch((mine,), {"time": mine}, FlowTarget(mine, mine + 2), 4)
    ((got,), _) = neighbours_batches([batch], RandomState(mine.device), dist.group.WORLD, mine.device)
    assert isinstance(got.target, FlowTarget)
    return [tensor.tolist() for tensor in got.tensors()]


def test_the_neighbour_gets_a_batch_whose_target_has_parts(folder):
    ranks = run_ranks(lent, 2, folder)
    assert ranks == [[[there] * 2] * 3 + [[there + 2] * 2] for there in (1.0, 0.0)]


def sent_and_received(_):
    import torch.distributed as dist

    rank, device = dist.get_rank(), torch.device("cpu")
    sent, received, send, receive, gather = [], [], dist.isend, dist.recv, dist.all_gather
    dist.isend = lambda tensor, *args: sent.append(tensor.nbytes) or send(tensor, *args)
    dist.recv = lambda tensor, *args: received.append(tensor.nbytes) or receive(tensor, *args)
    dist.all_gather = lambda into, *args, **options: (
        received.extend(t.nbytes for t in into) or gather(into, *args, **options)
    )
    batch = TensorBatch((torch.full((1000 * (rank + 1),), float(rank)),), {}, torch.zeros(1), 4)
    ((got,), _) = neighbours_batches([batch], RandomState(device), dist.group.WORLD, device)
    return got.tensors()[0].unique().tolist(), len(got.tensors()[0]), sum(sent), sum(received)


def test_a_rank_receives_the_batches_of_its_neighbour_and_of_no_other(folder):
    ranks = run_ranks(sent_and_received, 4, folder)
    for rank, (values, count, _, received) in enumerate(ranks):
        before = (rank - 1) % 4
        assert (values, count) == ([float(before)], 1000 * (before + 1))
        assert received == ranks[before][2] > 4 * count


@dataclasses.dataclass(frozen=True)
class Packed:
    tokens: torch.Tensor
    boundaries: np.ndarray | None


def boundaries_of_the_neighbour(_):
    import torch.distributed as dist

    rank, device = dist.get_rank(), torch.device("cpu")
    mine = Packed(torch.tensor([rank]), np.array([0, 3], np.int32) if rank == 0 else None)
    ((got,), _) = neighbours_batches([mine], RandomState(device), dist.group.WORLD, device)
    found = got.boundaries
    return got.tokens.tolist(), None if found is None else (found.dtype.name, found.tolist())


def test_the_neighbour_gets_numpys_arrays_as_they_were(folder):
    """Context parallelism cuts packed rows by boundaries on the host, which one of the two ranks may lack."""
    ranks = run_ranks(boundaries_of_the_neighbour, 2, folder)
    assert ranks == [([1], None), ([0], ("int32", [0, 3]))]


def test_a_step_that_was_wrong_once_is_made_as_if_nothing_had_happened(folder):
    without = run_ranks(
        train, 2, folder, "without", "", {"train": {"steps": 20, "global_batch": 8, "rerun_above": 0.0}}
    )[0]
    flipped = run_ranks(train, 2, folder, "flipped", "bit-flip rank=1 step=9", {})[0]
    assert flipped == without  # bitwise: the second execution's gradients are those of the first, had it been right
    assert verdicts(folder, "without") == []


def test_every_execution_draws_the_same_numbers_from_all_generators():
    def draw():
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    rerun = Rerun(2.0, torch.device("cpu"), None)
    drawn = []
    rerun.remember()
    first = draw()
    rerun([], (math.nan, 1.0, math.nan), lambda _: drawn.append(draw()) or (math.nan, 1.0, math.nan))
    assert drawn == [first]


def on_a_neighbour(_):
    import torch.distributed as dist

    state = RandomState(torch.device("cpu"))
    expected = random.random(), float(np.random.rand())
    _, draws = neighbours_batches([], state, dist.group.WORLD, state.device)
    draws.restore()
    return expected == (random.random(), float(np.random.rand()))


def test_a_neighbour_draws_as_the_step_began(folder):
    assert run_ranks(on_a_neighbour, 2, folder) == [True, True]


def test_one_rank_alone_says_that_it_cannot_tell(folder):
    run_ranks(train, 1, folder, "alone", "bad-data rank=0 step=9", {})
    assert verdicts(folder, "alone") == [(9, "reproduced", [0])]


@pytest.mark.slow
def test_ranks_that_hold_one_replica_together_are_named_together(folder):
    # two data-parallel replicas of two tensor-parallel ranks: the bit is in one of them, the loss is both's
    run_ranks(train, 4, folder, "tp", "stuck-bit rank=3 step=9", {"parallel": {"tp": 2}})
    ((_, verdict, ranks),) = verdicts(folder, "tp")
    assert verdict == "persistent hardware"
    assert ranks == [2, 3]


def test_steps_left_out_for_a_faulty_rank_are_not_called_not_finite():
    events = []
    limit = NonFiniteLimit(2)
    limit.run = SimpleNamespace(event=lambda kind, **_: events.append(kind), message=lambda _: None)
    verdict = RerunVerdict("persistent hardware", (1,), "loss 90 after 3", (90.0, 90.0, 3.0))
    info = SimpleNamespace(step=9, result=StepResult(90.0, 1.0, 8, True, (), {}, verdict))
    limit.on_step(info)
    with pytest.raises(RuntimeError, match=r"2 steps in a row .* step 9: .*persistent hardware fault on rank 1"):
        limit.on_step(info)
    assert events == ["rerun", "rerun"]


def test_losses_are_suspect_when_they_jump_or_are_not_finite():
    suspicion = Suspicion(2.0)
    assert [suspicion.of(loss, 1.0) for loss in (9.0, 5.0, 4.0, 3.0)] == [""] * 4
    assert "not finite" in suspicion.of(math.nan, 1.0)
    assert "not finite" in suspicion.of(3.0, math.inf)
    assert suspicion.of(10.0, 1.0) == ""  # twice the mean of 5.25 is more
    assert suspicion.of(20.0, 1.0) == "loss 20 after 6.2"


def test_a_wrong_loss_that_was_found_does_not_hide_the_next_and_a_new_level_of_the_data_counts():
    rerun = Rerun(2.0, torch.device("cpu"), None)

    def verdict_of(loss, again):
        rerun.remember()
        found = rerun([], (loss, 1.0, loss), lambda _: (again, 1.0, again))
        return found and found.verdict

    assert [verdict_of(3.0, 3.0) for _ in range(4)] == [None] * 4
    assert verdict_of(1000.0, 3.0) == "transient hardware"
    assert (
        verdict_of(30.0, 3.0) == "transient hardware"
    )  # ten times the usual, and less than the mean with the wrong one
    assert [verdict_of(9.0, 9.0) for _ in range(4)] == ["reproduced"] * 2 + [None] * 2  # twice the mean: 6, 7.7, then 9


def test_verdicts_of_three_ranks_name_the_one_that_computes_wrongly():
    fine, norms = [1.0, 2.0, 3.0], (1.0, 1.0)
    assert judge(fine, [1.0, 2.0, 3.0 * (1 + 1e-6)], norms, "", (6.0, 6.0)) is None
    assert judge(fine, [1.0, 2.5, 3.0], norms, "", (6.0, 6.5)).ranks == (1,)
    # rank 2 computes its own data and that of rank 1 too high
    verdict = judge_elsewhere([1.0, 2.0, 9.0], [3.0, 1.0, 8.0], [2, 0, 1], norms, "", (6.0,))
    assert (verdict.verdict, verdict.ranks) == ("persistent hardware", (2,))
    verdict = judge_elsewhere([1.0, math.nan, 3.0], [3.0, 1.0, math.nan], [2, 0, 1], norms, "", (6.0,))
    assert (verdict.verdict, verdict.ranks) == ("data or numerics", (1,))
