"""Several trainers in one process, one after the other or together, as a sweep or a notebook makes them."""

import os

import composition
import pytest
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.train import Trainer

FSDP = {"train": {"steps": 2, "global_batch": 8}}
LAYOUTS = [
    FSDP,
    FSDP | {"parallel": {"tp": 2}},
    FSDP | {"parallel": {"mode": "ddp"}},
    FSDP,
    FSDP | {"parallel": {"pp": 2}, "train": {"steps": 2, "global_batch": 8, "microbatch": 2}},
]


def make(folder, name, sections):
    """A trainer; runs of several calls of `run_ranks` must not share a name, or one would resume the other's."""
    return Trainer(parse_config(composition.tree(folder, name, sections)))


def weights(trainer):
    """Whole weights, each gathered over its mesh; a destroyed group cannot do that."""
    found = {}
    for part in trainer.model.parts:
        for name, parameter in part.named_parameters():
            value = parameter.detach() * 1  # through DTensor's dispatch, whose caches outlive a trainer
            found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return found


def one_after_the_other(folder, name, layouts):
    results = []
    for number, sections in enumerate(layouts):
        with make(folder, f"{name}-{number}", sections) as trainer:
            trainer.fit()
            results.append((trainer.losses, weights(trainer)))
    return results


@pytest.fixture(scope="module")
def alone(folder):
    """Losses and weights of `FSDP` as the only trainer of its process, by the number of ranks."""
    return {n: run_ranks(one_after_the_other, n, folder, f"alone-{n}", [FSDP], init=n > 1) for n in (1, 2)}


def test_trainers_of_several_layouts_in_turn_give_what_each_gives_alone(folder, alone):
    for found, [(want_losses, want)] in zip(
        run_ranks(one_after_the_other, 2, folder, "turn", LAYOUTS), alone[2], strict=True
    ):
        assert len(found) == len(LAYOUTS)
        for losses, whole in (found[0], found[3]):  # the same layout in the same number of processes: bits
            assert losses == want_losses
            assert all(torch.equal(whole[name], want[name]) for name in want)
        for losses, _ in found:  # sums in another order, 2^-24 of a loss of 5.6 each; the second step divides by them
            assert losses == pytest.approx(want_losses, abs=2e-5)


def interleaved(folder):
    first, second = make(folder, "first", FSDP), make(folder, "second", FSDP)
    first.fit(until=1)
    second.fit(until=1)
    first.close()
    second.fit()
    found = weights(second)
    losses = second.losses
    second.close()
    return losses, found


def test_a_trainer_goes_on_when_another_one_beside_it_closes(folder, alone):
    for (losses, found), [(want_losses, want)] in zip(run_ranks(interleaved, 2, folder), alone[2], strict=True):
        assert losses == want_losses
        assert all(torch.equal(found[name], want[name]) for name in want)


class Stop(Exception):
    pass


def stop_after_one_step(folder, name):
    with make(folder, name, FSDP) as trainer:
        trainer.fit(until=1)
        raise Stop


def after_a_failure(folder, name, where):
    if where == "building":
        with pytest.raises(ValueError, match="no such argument"):
            make(folder, name, FSDP | {"model": {"args": {"no_such": 1}}})
    elif where == "resuming":
        with make(folder, f"{name}-saved", FSDP) as trainer:
            trainer.save()
        with pytest.raises(ValueError, match="resume='never'"):
            make(folder, f"{name}-saved", FSDP | {"checkpoint": {"resume": "never"}})
    else:
        with pytest.raises(Stop):
            stop_after_one_step(folder, name)
    with make(folder, name, FSDP) as trainer:  # of the same name: nothing was saved
        trainer.fit()
        return trainer.losses, weights(trainer)


@pytest.mark.parametrize("where", ["building", "resuming", "training"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_works_after_one_that_failed(folder, alone, where, ranks):
    found = run_ranks(after_a_failure, ranks, folder, f"failed-{where}-{ranks}", where, init=ranks > 1)
    assert [losses for losses, _ in found] == [losses for [(losses, _)] in alone[ranks]]


def leaves_nothing(folder):
    del os.environ["WORLD_SIZE"]  # as started by hand
    with pytest.raises(ValueError, match="no such argument"):
        make(folder, "refused", FSDP | {"parallel": {"mode": "fsdp"}, "model": {"args": {"no_such": 1}}})
    return dist.is_initialized()


def test_a_trainer_that_cannot_be_built_leaves_no_process_group_of_its_own(folder):
    assert run_ranks(leaves_nothing, 1, folder, init=False) == [False]
