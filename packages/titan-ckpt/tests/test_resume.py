import random
from pathlib import Path

import pytest
import torch
from ckpt_loop import Data, build, full_state, train
from titan_ckpt import Checkpointer, LocalShard, TrainState
from titan_ckpt.load.reader import StepReader
from titan_testing import run_ranks
from torch import nn


def assert_bitwise(got, want):
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different, different


def test_twenty_steps_resume_and_twenty_more_equal_forty_straight_bitwise(tmp_path):
    straight = build()
    losses = train(straight, 40)

    first = build()
    assert train(first, 20) == losses[:20]
    Checkpointer(tmp_path).save(20, first)

    second = build(seed=7)
    random.seed(99)
    assert Checkpointer(tmp_path).restore(second) == 20
    assert second.extra == {"tokens": 20 * 24}
    assert train(second, 20) == losses[20:]
    assert_bitwise(full_state(second), full_state(straight))


def test_restore_returns_zero_and_touches_nothing_where_there_is_no_step(tmp_path):
    state = build()
    before = full_state(state)
    assert Checkpointer(tmp_path / "new").restore(state) == 0
    assert_bitwise(full_state(state), before)


def test_restore_clears_optimizer_state_that_was_not_there_when_saved(tmp_path):
    ck = Checkpointer(tmp_path)
    ck.save(0, build())
    state = build()
    train(state, 2)
    ck.restore(state)
    assert all(not values for values in state.optim.state.values())


def test_some_tensors_of_the_optimizers_state_are_restored_alone(tmp_path):
    state = build()
    train(state, 3)
    Checkpointer(tmp_path).save(3, state)
    other = build(seed=5)
    other.optim = torch.optim.SGD(other.model.parameters())
    only = TrainState(
        model=other.model, optim=other.optim, own_settings=True, optim_keys=("exp_avg",), rng=False, extra=other.extra
    )
    Checkpointer(tmp_path).restore(only)
    saved = [state.optim.state[p]["exp_avg"] for p in state.model.parameters()]
    found = [other.optim.state[p] for p in other.model.parameters()]
    assert all(values.keys() == {"exp_avg"} for values in found)
    assert all(torch.equal(values["exp_avg"], value) for values, value in zip(found, saved, strict=True))


def test_restoring_one_tensor_of_the_optimizers_state_leaves_the_others_and_the_settings(tmp_path):
    state = build()
    train(state, 3)
    Checkpointer(tmp_path).save(3, state)
    other = build(seed=5)
    train(other, 2)
    other.optim.param_groups[0]["lr"] = 0.125
    param = next(other.model.parameters())
    kept = other.optim.state[param]["exp_avg_sq"].clone()
    only = TrainState(model=other.model, optim=other.optim, optim_keys=("exp_avg",), rng=False, extra=other.extra)
    Checkpointer(tmp_path).restore(only)
    saved = state.optim.state[next(state.model.parameters())]["exp_avg"]
    assert torch.equal(other.optim.state[param]["exp_avg"], saved)
    assert torch.equal(other.optim.state[param]["exp_avg_sq"], kept)
    assert other.optim.param_groups[0]["lr"] == 0.125
    assert train(other, 1)  # with all the state that AdamW looks for


def test_restore_keeps_the_optimizers_parameter_order_apart_from_the_saved_one(tmp_path):
    state = build()
    train(state, 3)
    Checkpointer(tmp_path).save(3, state)
    other = build(seed=5)
    params = list(other.model.parameters())
    other.optim = torch.optim.AdamW([{"params": params[3:], "lr": 1.0}, {"params": params[:3]}], lr=2.0)
    Checkpointer(tmp_path).restore(TrainState(model=other.model, optim=other.optim, rng=False), strict=False)
    assert_bitwise(full_state(other), full_state(state))
    assert all(group["lr"] == state.optim.param_groups[0]["lr"] for group in other.optim.param_groups)


def test_restore_refuses_a_group_that_joins_parameters_saved_with_other_settings(tmp_path):
    state = build()
    params = list(state.model.parameters())
    state.optim = torch.optim.AdamW([{"params": params[:2], "lr": 1.0}, {"params": params[2:], "lr": 2.0}])
    state.sched = None
    Checkpointer(tmp_path).save(1, state)
    other = build()
    other.sched = None
    with pytest.raises(ValueError, match="had different settings when saved"):
        Checkpointer(tmp_path).restore(other)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optim", ["sgd", "adagrad", "adamw-amsgrad", "lbfgs", "adafactor"])
def test_every_kind_of_optimizer_state_comes_back_bitwise(tmp_path, optim, device):
    def make(params):
        return {
            "sgd": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            "adagrad": lambda: torch.optim.Adagrad(params, lr=0.1),
            "adamw-amsgrad": lambda: torch.optim.AdamW(params, lr=torch.tensor(0.1), amsgrad=True),
            "lbfgs": lambda: torch.optim.LBFGS(params, lr=0.1, history_size=3),
            "adafactor": lambda: torch.optim.Adafactor(params),
        }[optim]()

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 6, device=device)) - 1).square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    def fresh():
        torch.manual_seed(0)
        model = nn.Linear(6, 4, device=device)
        return model, make(model.parameters())

    model, optimizer = fresh()
    for _ in range(3):
        step(model, optimizer)
    Checkpointer(tmp_path).save(3, TrainState(model=model, optim=optimizer))
    want = [step(model, optimizer) for _ in range(3)]
    model, optimizer = fresh()
    assert Checkpointer(tmp_path).restore(TrainState(model=model, optim=optimizer)) == 3
    assert [step(model, optimizer) for _ in range(3)] == want


class Reshardable(Data):
    def reshard(self, states):
        self.position = max(state["position"] for state in states)


def data_ranks(root: str, action: str, same: bool, kind: str) -> int:
    rank = torch.distributed.get_rank()
    data = (Reshardable if kind == "reshard" else Data)(0 if same else rank)
    state = TrainState(data=data)
    ck = Checkpointer(root)
    if action == "save":
        ck.save(5, state)
    else:
        data.position = -1
        ck.restore(state)
    return data.position


@pytest.mark.parametrize("same", [True, False], ids=["global-counters", "per-rank"])
def test_data_position_follows_the_same_number_of_ranks(tmp_path, same):
    run_ranks(data_ranks, 2, str(tmp_path), "save", same, "plain")
    assert run_ranks(data_ranks, 2, str(tmp_path), "load", same, "plain") == ([0, 0] if same else [0, 100])


def test_data_position_of_global_counters_goes_to_any_number_of_ranks(tmp_path):
    run_ranks(data_ranks, 2, str(tmp_path), "save", True, "plain")
    assert run_ranks(data_ranks, 8, str(tmp_path), "load", True, "plain") == [0] * 8


class Table(Data):
    """A state that is too large for the JSON; a not-a-number equals itself."""

    def state_dict(self):
        return {"position": self.position, "seen": torch.tensor([self.rank % 2, float("nan")]).repeat(1000)}


def table_ranks(root: str, action: str, same: bool) -> int:
    data = Table(0)
    data.rank = 0 if same else torch.distributed.get_rank()
    data.position = 7 if action == "save" else -1
    getattr(Checkpointer(root), action)(*([5] if action == "save" else []), TrainState(data=data))
    return data.position


def test_equal_data_positions_that_hold_large_tensors_go_to_any_number_of_ranks(tmp_path):
    run_ranks(table_ranks, 2, str(tmp_path / "same"), "save", True)
    assert run_ranks(table_ranks, 3, str(tmp_path / "same"), "restore", True) == [7] * 3
    run_ranks(table_ranks, 2, str(tmp_path / "other"), "save", False)
    with pytest.raises(AssertionError, match="different data positions"):
        run_ranks(table_ranks, 3, str(tmp_path / "other"), "restore", False)


def test_data_position_per_rank_is_handed_to_reshard(tmp_path):
    run_ranks(data_ranks, 2, str(tmp_path), "save", False, "plain")
    assert run_ranks(data_ranks, 8, str(tmp_path), "load", False, "reshard") == [100] * 8


def test_data_position_per_rank_without_reshard_is_refused_on_another_number_of_ranks(tmp_path):
    run_ranks(data_ranks, 2, str(tmp_path), "save", False, "plain")
    with pytest.raises(AssertionError, match=r"cannot be given to 3\. Give Data a reshard"):
        run_ranks(data_ranks, 3, str(tmp_path), "load", False, "plain")


def test_state_lists_what_strict_restore_misses(tmp_path):
    ck = Checkpointer(tmp_path)
    ck.save(1, TrainState(model=nn.Linear(2, 2), rng=False))
    state = TrainState(model=nn.Linear(2, 2), data=Data(), rng=False)
    with pytest.raises(ValueError, match="was saved without data"):
        ck.restore(state)
    assert ck.restore(state, strict=False) == 1
    with pytest.raises(ValueError, match="random generators"):
        ck.restore(TrainState(model=nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"extra values \['tokens'\]"):
        ck.restore(TrainState(model=nn.Linear(2, 2), rng=False, extra={"tokens": 1}))


def test_anything_but_data_is_a_type_error_with_its_path_at_save_time(tmp_path):
    ck = Checkpointer(tmp_path)
    with pytest.raises(TypeError, match=r"extra\.a\[1\]\.b is a pathlib\.\w*Path"):
        ck.save(1, TrainState(extra={"a": [1, {"b": Path()}]}))
    assert ck.steps() == []
    assert not list(tmp_path.iterdir())


class Ends(torch.nn.Module):
    """An embedding and a head, which two pipeline stages on one rank hold apart."""

    def __init__(self, tied):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_both_copies_of_a_tied_weight_get_its_optimizer_state(tmp_path):
    saved, apart = Ends(tied=True), Ends(tied=False)
    optim = torch.optim.AdamW(saved.parameters(), lr=0.1)
    saved.head(saved.embed(torch.arange(8))).square().sum().backward()
    optim.step()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, TrainState(model=saved, optim=optim, rng=False))
        into = torch.optim.AdamW(apart.parameters(), lr=0.1)
        checkpointer.restore(TrainState(model=apart, optim=into, rng=False))
    for parameter in apart.parameters():
        assert torch.equal(parameter, saved.embed.weight)
        for name, value in optim.state[saved.embed.weight].items():
            assert torch.equal(into.state[parameter][name], value), name


def trained(model):
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter) + number
    optim.step()
    return optim


def test_a_part_of_a_tied_weight_gets_its_part_of_the_optimizer_state_under_either_name(tmp_path):
    saved = Ends(tied=True)
    optim = trained(saved)
    Checkpointer(tmp_path).save(1, TrainState(model=saved, optim=optim, rng=False))
    part = Ends(tied=False)
    del part.embed
    part.head.weight = torch.nn.Parameter(torch.zeros(3, 4))  # rows 2 to 4 of the head, on the last pipeline stage
    into = torch.optim.AdamW(part.parameters(), lr=0.1)
    shards = {"head.weight": LocalShard((8, 4), (2, 0))}
    Checkpointer(tmp_path).restore(TrainState(model=part, optim=into, shards=shards, rng=False))
    assert torch.equal(part.head.weight, saved.embed.weight[2:5])
    moments = optim.state[saved.embed.weight]
    assert torch.equal(into.state[part.head.weight]["exp_avg"], moments["exp_avg"][2:5])


TIED = {"head.weight": "embed.weight"}


def test_copies_declared_as_tied_are_one_tensor_of_a_step_and_all_filled_from_it(tmp_path):
    together = Ends(tied=True)
    optim = trained(together)
    apart, only_head = Ends(tied=False), Ends(tied=False)
    apart.load_state_dict(together.state_dict())
    del only_head.embed
    moving = trained(apart)
    for parameter in apart.parameters():
        parameter.data.copy_(together.embed.weight)
        moving.state[parameter] = {key: value.clone() for key, value in optim.state[together.embed.weight].items()}
    path = Checkpointer(tmp_path).save(1, TrainState(model=apart, optim=moving, tied=TIED, rng=False)).path
    index = StepReader(Path(path)).index
    assert list(index.tensors["model"]) == ["embed.weight"]
    assert {key.split("/")[0] for key in index.tensors["optim"]} == {"embed.weight"}
    assert index.tied == TIED
    for model in (Ends(tied=True), Ends(tied=False), only_head):
        into = torch.optim.AdamW(model.parameters(), lr=0.1)
        Checkpointer(tmp_path).restore(TrainState(model=model, optim=into, tied=TIED, rng=False))
        for parameter in model.parameters():
            assert torch.equal(parameter, together.embed.weight)
            for name, value in optim.state[together.embed.weight].items():
                assert torch.equal(into.state[parameter][name], value), name


def test_own_settings_restore_into_other_groups_and_other_parameters(tmp_path, caplog):
    def made(groups, **settings):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
        optim = torch.optim.AdamW([{"params": [model[i].weight for i in g]} for g in groups], **settings)
        return model, optim

    model, optim = made([[0], [1]], lr=0.1, weight_decay=0.5)
    optim.param_groups[1]["weight_decay"] = 0.0
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    Checkpointer(tmp_path).save(1, TrainState(model=model, optim=optim))
    other, joined = made([[1, 2]], lr=0.2, weight_decay=0.25)
    with pytest.raises(ValueError, match="no optimizer state"):
        Checkpointer(tmp_path).restore(TrainState(model=other, optim=joined))
    Checkpointer(tmp_path).restore(TrainState(model=other, optim=joined, own_settings=True))
    assert (joined.param_groups[0]["lr"], joined.param_groups[0]["weight_decay"]) == (0.2, 0.25)
    assert torch.equal(joined.state[other[1].weight]["exp_avg"], optim.state[model[1].weight]["exp_avg"])
    assert not joined.state[other[2].weight]
    assert ["it is left out" in caplog.text, "they keep what they have" in caplog.text] == [True, True]


def test_own_settings_by_name_restore_the_others(tmp_path):
    model = torch.nn.Linear(3, 3)
    optim = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    for group, decay in zip(optim.param_groups, (0.5, 0.0), strict=True):
        group |= {"weight_decay": decay, "k": 7, "d": torch.tensor(3.0)}
    Checkpointer(tmp_path).save(1, TrainState(model=model, optim=optim))
    joined = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.25)
    Checkpointer(tmp_path).restore(TrainState(model=model, optim=joined, own_settings=("lr", "weight_decay")))
    (group,) = joined.param_groups
    assert [group[key] for key in ("lr", "weight_decay", "k", "d")] == [0.2, 0.25, 7, 3]
    optim.param_groups[0]["k"] = 8
    Checkpointer(tmp_path).save(2, TrainState(model=model, optim=optim))
    with pytest.raises(ValueError, match="different settings"):
        Checkpointer(tmp_path).restore(TrainState(model=model, optim=joined, own_settings=("lr", "weight_decay")))
