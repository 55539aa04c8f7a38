"""A step that is damaged where only one rank reads it: every rank learns it and takes the same older one."""

import json

import pytest
import torch
from ckpt_loop import flip_last_byte
from titan_ckpt import Checkpointer, CheckpointError, Damage, DamageError, TrainState
from titan_ckpt.format import manifest
from titan_ckpt.load import reader
from titan_ckpt.load import restore as restoring
from titan_ckpt.load.reader import StepReader
from titan_ckpt.steps import commit
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VICTIM = 1


class Position:
    """Another one on every rank, so that each has a state file of its own."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self):
        return {"at": self.at + torch.distributed.get_rank()}

    def load_state_dict(self, state):
        self.at = state["at"] - torch.distributed.get_rank()


def state_at(step: int) -> TrainState:
    """Weights, moments and positions that all say ``step``, each rank with its own rows of them."""
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optim = torch.optim.SGD(model.parameters(), momentum=0.9)
    for param in model.parameters():
        param.grad = torch.full_like(param, float(step))
    optim.step()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float(step))
    data = Position()
    data.at = step
    return TrainState(model=model, optim=optim, data=data, extra={"at": step})


def told(state: TrainState) -> list[float]:
    """Every value of this rank's state, each once."""
    values = [param.to_local() for param in state.model.parameters()]
    values += [buffer["momentum_buffer"].to_local() for buffer in state.optim.state.values()]
    return [
        *torch.cat([value.detach().flatten() for value in values]).unique().tolist(),
        state.data.at,
        state.extra["at"],
    ]


def save_steps(root: str, steps: int) -> None:
    ck = Checkpointer(root)
    for step in range(1, steps + 1):
        ck.save(step, state_at(step))


def restore(root: str, fallback: bool, failing: str = "") -> tuple[int, list[float], list[str], str]:
    """What one rank gets: the step, its values, why others were passed over, and the error's kind and text."""
    state, step, error = state_at(-1), -1, ""
    ck = Checkpointer(root)
    rank = torch.distributed.get_rank()
    if failing == "check" and rank == VICTIM:
        StepReader.check = _refuse
    if failing == "apply" and rank == VICTIM:
        state.data.load_state_dict = _refuse
    try:
        step = ck.restore(state, fallback=fallback)
    except CheckpointError as err:
        error = f"{type(err).__name__}: {err}"
    except OSError:
        error = "OSError"
    return step, told(state), [f"{number}: {why}" for number, why in ck.passed_over], error


def _refuse(*_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("ranks", [2, 4])
def test_damage_that_only_one_rank_reads_makes_every_rank_take_the_same_older_step(tmp_path, ranks):
    run_ranks(save_steps, ranks, str(tmp_path), 4)
    flip_last_byte(tmp_path / "step-00000004" / f"model-r{VICTIM:05d}.safetensors")
    flip_last_byte(tmp_path / "step-00000003" / "state" / f"rank-r{VICTIM:05d}.json")
    (tmp_path / "step-00000002" / "optim" / f"optim-r{ranks - 1:05d}.safetensors").unlink()
    everyone = run_ranks(restore, ranks, str(tmp_path), True)
    for step, values, passed_over, error in everyone:
        assert (step, error) == (1, "")
        assert values == [1.0, 1, 1], "no rank may hold anything of another step"
        assert passed_over == everyone[0][2]
    fourth, third, second = everyone[0][2]
    assert fourth.startswith("4: ")
    assert f"model-r{VICTIM:05d}.safetensors block 0" in fourth
    assert f"(seen by rank {VICTIM})" in fourth, "the damaged block is one that no other rank reads"
    assert third.startswith("3: ")
    assert f"rank-r{VICTIM:05d}.json" in third
    assert f"(seen by rank {VICTIM})" in third
    assert second.startswith("2: ")
    assert "is missing" in second


def test_without_fallback_every_rank_raises_the_damage_and_keeps_its_state(tmp_path):
    run_ranks(save_steps, 2, str(tmp_path), 1)
    flip_last_byte(tmp_path / "step-00000001" / "optim" / f"optim-r{VICTIM:05d}.safetensors")
    for fallback in (False, True):  # there is no older one
        for step, values, passed_over, error in run_ranks(restore, 2, str(tmp_path), fallback):
            assert (step, values, passed_over) == (-1, [-1.0, -1, -1], [])
            assert error.startswith("NoIntactStepError" if fallback else "DamageError")
            assert f"optim-r{VICTIM:05d}" in error


def looks(root: str, seen_short: str) -> tuple[list[str], list[str], list[int], str, list[float]]:
    """Files of which this rank looks at the size in a restore, those it maps, whose positions it reads; the error; its values.

    Rank `VICTIM` sees the file ``seen_short`` cut.
    """
    sizes, states, readers, real = [], [], [], manifest.check_size
    mine = torch.distributed.get_rank() == VICTIM

    def check_size(folder, name, size):
        sizes.append(name)
        return Damage(name, "is cut") if mine and name == seen_short else real(folder, name, size)

    manifest.check_size = reader.check_size = check_size
    init, rank_state = StepReader.__init__, StepReader.rank_state
    StepReader.__init__ = lambda self, *args, **options: init(self, *args, **options) or readers.append(self)
    StepReader.rank_state = lambda self, rank: states.append(rank) or rank_state(self, rank)
    state, error = state_at(-1), ""
    state.rng = False
    state.data.reshard = lambda positions: state.data.load_state_dict(positions[torch.distributed.get_rank()])
    try:
        Checkpointer(root).restore(state, verify="none")
    except DamageError as err:
        error = str(err)
    mapped = [found.index.files[file].name for found in readers for file in found._maps]
    return sizes, mapped, states, error, told(state)


def test_one_rank_checks_all_sizes_and_the_others_those_of_what_they_read(tmp_path):
    run_ranks(save_steps, 4, str(tmp_path), 1)
    (first, *_), *others = run_ranks(looks, 4, str(tmp_path), "")
    assert len(set(first)) >= 12, "weights, moments and state of each rank"
    for rank, (sizes, mapped, states, error, values) in enumerate(others, 1):
        assert sorted(sizes) == sorted(mapped)
        assert 0 < len(sizes) < 6
        assert (states, error, values) == ([rank], "", [1.0, 1, 1])


def test_on_other_ranks_one_rank_reads_all_positions(tmp_path):
    run_ranks(save_steps, 4, str(tmp_path), 1)
    everyone = run_ranks(looks, 3, str(tmp_path), "")
    assert [states for _, _, states, _, _ in everyone] == [[0, 1, 2, 3], [], []]
    assert all((error, values) == ("", [1.0, 1, 1]) for _, _, _, error, values in everyone)


@pytest.mark.parametrize("seen_by", ["all", "one"])
def test_a_file_that_is_cut_stops_every_rank_before_anything_is_loaded(tmp_path, seen_by):
    run_ranks(save_steps, 2, str(tmp_path), 1)
    name = f"optim/optim-r{VICTIM:05d}.safetensors"
    if seen_by == "all":
        file = tmp_path / "step-00000001" / name
        file.write_bytes(file.read_bytes()[:-8])
    for *_, error, values in run_ranks(looks, 2, str(tmp_path), name if seen_by == "one" else ""):
        assert f"(seen by rank {VICTIM if seen_by == 'one' else 0})" in error
        assert name in error
        assert values == [-1.0, -1, -1]


def test_a_rank_that_cannot_read_stops_every_rank_and_no_step_is_called_damaged(tmp_path):
    run_ranks(save_steps, 2, str(tmp_path), 2)
    everyone = run_ranks(restore, 2, str(tmp_path), True, "check")
    for step, values, passed_over, error in everyone:
        assert (step, values, passed_over) == (-1, [-1.0, -1, -1], [])
        assert error.startswith("CheckpointError")
        assert "Input/output error" in error
    assert "rank 1 failed" in everyone[0][3]


def test_a_rank_that_fails_while_its_state_is_filled_stops_every_rank(tmp_path):
    run_ranks(save_steps, 2, str(tmp_path), 1)
    everyone = run_ranks(restore, 2, str(tmp_path), True, "apply")
    assert [result[0] for result in everyone] == [-1, -1]
    assert "half done: rank 1 failed" in everyone[0][3]
    assert "Input/output error" in everyone[0][3]


def test_what_ranks_tell_each_other_of_damage_is_json(tmp_path):
    """The counterpart of `Ranks.agree`: a report survives the way there and back."""
    from titan_ckpt import Damage
    from titan_ckpt.comm import _decode_damage, _encode_error

    damage = Damage("model-r00001.safetensors", "does not match its digest", ("a", "b"), 3, 12 << 20)
    sent = json.loads(json.dumps(_encode_error(DamageError("step-00000001", [damage]))))
    assert [_decode_damage(place) for place in sent["damages"]] == [damage]


def restore_a_step_that_goes(root: str) -> int:
    """Restore while the run that saves here deletes the newest step, after rank 1 has planned what to read."""
    if torch.distributed.get_rank() == 1:
        real = restoring.touched_blocks

        def touched(reader, copies):
            restoring.touched_blocks = real
            commit.discard(reader.path)
            return real(reader, copies)

        restoring.touched_blocks = touched
    return Checkpointer(root).restore(state_at(0))


def test_a_step_that_is_deleted_while_ranks_share_out_its_blocks_gives_way_to_another_on_every_rank(tmp_path):
    run_ranks(save_steps, 2, str(tmp_path), 2)
    assert run_ranks(restore_a_step_that_goes, 2, str(tmp_path), timeout_s=25) == [1, 1]


def restore_with_an_error_of_ones_own(root: str) -> str:
    state, error = state_at(-1), ""
    if torch.distributed.get_rank() == 0:
        state.data.load_state_dict = lambda _: {}["gone"]
    try:
        Checkpointer(root).restore(state)
    except Exception as err:
        error = type(err).__name__
    torch.distributed.barrier()  # all ranks are through
    return error


def test_an_error_of_any_kind_on_one_rank_ends_the_restore_of_all(tmp_path):
    run_ranks(save_steps, 2, str(tmp_path), 1)
    everyone = run_ranks(restore_with_an_error_of_ones_own, 2, str(tmp_path), timeout_s=25)
    assert everyone == ["KeyError", "CheckpointError"]
