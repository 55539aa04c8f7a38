"""Parameters that are not trained at the start of a run, then are: bit by bit unchanged until then."""

import pytest
import torch
from titan_ckpt import Checkpointer, TrainState
from titan_train.config import OptimizerConfig, ScheduleConfig
from titan_train.optim.build import build_optimizer
from titan_train.optim.schedule import build_scheduler, drop_frozen_gradients
from torch import nn


class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.projector = nn.Linear(3, 3)
        self.layers = nn.Linear(3, 3)


def made(frozen, **settings):
    torch.manual_seed(0)
    model = Seeing()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, frozen_steps=frozen, **settings))
    return model, optimizer, build_scheduler(optimizer, ScheduleConfig(name="constant", warmup_steps=0), 10)


def train(model, optimizer, scheduler, steps):
    states = []
    for _ in range(steps):
        model.layers(model.projector(torch.ones(2, 3))).square().sum().backward()
        drop_frozen_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        states.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return states


def test_the_projector_is_trained_first_and_then_all():
    model, optimizer, scheduler = made({r"^(?!projector\.)": 2})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first, second, third = train(model, optimizer, scheduler, 3)
    for name in before:
        held = name.startswith("layers")
        assert torch.equal(first[name], before[name]) == held
        assert torch.equal(second[name], before[name]) == held
        assert not torch.equal(third[name], second[name])


def test_a_resume_knows_how_long_parameters_stay_frozen():
    whole = train(*made({"layers": 2}), 4)
    model, optimizer, scheduler = made({"layers": 2})
    train(model, optimizer, scheduler, 1)
    again, restored, schedule = made({"layers": 2})
    again.load_state_dict(model.state_dict())
    restored.load_state_dict(optimizer.state_dict())
    schedule.load_state_dict(scheduler.state_dict())
    rest = train(again, restored, schedule, 3)
    for found, expected in zip(rest, whole[1:], strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_cautious_weight_decay_may_be_switched_on_while_parameters_are_frozen(tmp_path):
    def state(model, optimizer, scheduler):
        return TrainState(model=model, optim=optimizer, sched=scheduler, own_settings=True, rng=False)

    before, again = made({"layers": 2}), made({"layers": 2}, cautious=True)
    train(*before, 1)
    with Checkpointer(tmp_path) as saved:
        saved.save(1, state(*before))
        saved.restore(state(*again), 1)
    second, third = train(*again, 2)
    assert not torch.equal(third["layers.weight"], second["layers.weight"])
    assert again[1].state[again[0].layers.weight]["step"] == 1


def test_without_frozen_steps_the_groups_are_as_they_were():
    _, optimizer, _ = made({})
    assert not {"frozen", "frozen_steps"} & optimizer.param_groups[0].keys()


def test_a_pattern_for_nothing_is_refused():
    with pytest.raises(ValueError, match=r"optimizer\.frozen_steps has the pattern 'projektor'"):
        made({"projektor": 3})
    with pytest.raises(ValueError, match=r"optimizer\.frozen_steps\.layers=-1"):
        made({"layers": -1})


def test_the_count_of_steps_begins_when_a_parameter_is_trained():
    """AdamW divides young means by 1 - beta^steps: a count that ran on while frozen would make its first updates too small."""
    model, optimizer, scheduler = made({"layers": 3})
    train(model, optimizer, scheduler, 3)
    assert not optimizer.state[model.layers.weight]
    before = model.layers.weight.detach().clone()
    fresh = torch.nn.Parameter(before.clone())
    train(model, optimizer, scheduler, 1)
    assert optimizer.state[model.layers.weight]["step"] == 1
    assert optimizer.state[model.projector.weight]["step"] == 4
    fresh.grad = torch.ones_like(fresh)  # the first update of AdamW is the gradient's sign, whatever its size
    torch.optim.AdamW([fresh], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close((model.layers.weight - before).abs(), (fresh - before).abs(), rtol=0.3, atol=0)
