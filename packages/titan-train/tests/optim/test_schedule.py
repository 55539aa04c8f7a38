"""Schedules against their closed forms, and exactness after a resume."""

import itertools
import math

import pytest
import torch
from titan_train.config.optimizer import ScheduleConfig
from titan_train.optim import build_scheduler, lr_factor
from torch import nn


def optimizer(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def rates(config: ScheduleConfig, total: int, steps: int | None = None) -> list[float]:
    scheduler = build_scheduler(optimizer(1.0), config, total)
    found = []
    for _ in range(total if steps is None else steps):
        found += scheduler.get_last_lr()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("shape", "falling"),
    [
        ("linear", lambda t: 1 - t),
        ("sqrt", lambda t: 1 - math.sqrt(t)),
        ("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2),
    ],
)
def test_wsd_follows_its_closed_form(shape: str, falling: object) -> None:
    config = ScheduleConfig(warmup_steps=4, decay_steps=5, decay_shape=shape, min_lr_factor=0.1)  # type: ignore[arg-type]
    want = [0.25, 0.5, 0.75, 1.0] + [1.0] * 11 + [0.1 + 0.9 * falling(k / 5) for k in range(5)]  # type: ignore[operator]
    assert rates(config, 20) == pytest.approx(want, abs=1e-15)


def test_cosine_follows_its_closed_form() -> None:
    config = ScheduleConfig(name="cosine", warmup_steps=2, min_lr_factor=0.2)
    want = [0.5, 1.0] + [0.2 + 0.8 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]
    assert rates(config, 10) == pytest.approx(want, abs=1e-15)


def test_constant_stays_and_later_steps_keep_the_end_of_the_decay() -> None:
    assert rates(ScheduleConfig(name="constant", warmup_steps=2), 5) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(ScheduleConfig(warmup_steps=0, decay_steps=2, min_lr_factor=0.3), 4, steps=7)[4:] == [0.3, 0.3, 0.3]


def test_automatic_lengths_are_fractions_of_the_run() -> None:
    found = rates(ScheduleConfig(), 100)
    assert found[:2] == [0.5, 1.0]
    assert found[80] == 1.0
    assert found[81] < 1.0
    assert rates(ScheduleConfig(), 1) == [1.0]  # a run of one step still learns


def test_groups_keep_their_ratio() -> None:
    held = optimizer(1.0, 0.25)
    scheduler = build_scheduler(held, ScheduleConfig(warmup_steps=10), 100)
    for _ in range(100):
        first, second = scheduler.get_last_lr()
        assert second == first * 0.25
        scheduler.step()


@pytest.mark.parametrize("cut", [0, 1, 7, 19])
def test_resume_continues_bitwise(cut: int) -> None:
    config = ScheduleConfig(name="cosine", warmup_steps=3, min_lr_factor=0.05)
    straight = rates(config, 20)
    first = build_scheduler(optimizer(1.0), config, 20)
    for _ in range(cut):
        first.step()
    held = optimizer(1.0)
    resumed = build_scheduler(held, config, 20)
    held.param_groups[0]["lr"] = 123.0  # what loading an optimizer's state does
    resumed.load_state_dict(first.state_dict())
    found = []
    for _ in range(cut, 20):
        found += [group["lr"] for group in held.param_groups]
        resumed.step()
    assert found == straight[cut:]


def test_a_longer_run_continues_at_the_peak() -> None:
    config = ScheduleConfig(warmup_steps=0, decay_steps=5)
    longer = build_scheduler(optimizer(1.0), config, 40)
    longer.load_state_dict({"step": 18})
    assert longer.get_last_lr() == [1.0]


def test_lr_factor_is_continuous_where_its_parts_meet() -> None:
    factors = [
        lr_factor(k, total_steps=1000, warmup_steps=100, decay_steps=200, decay_shape="linear") for k in range(1001)
    ]
    assert max(abs(a - b) for a, b in itertools.pairwise(factors)) <= 0.01 + 1e-12
    assert factors[1000] == 0.0


@pytest.mark.parametrize(
    ("config", "total", "words"),
    [
        ({"warmup_steps": 30}, 20, r"schedule.warmup_steps=30 .*train.steps=20.* nearest valid choice is 20"),
        ({"warmup_steps": 5, "decay_steps": 16}, 20, r"schedule.decay_steps=16 .*decay_steps=15"),
        ({}, 0, "train.steps=0"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(config: dict[str, int], total: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_scheduler(optimizer(1.0), ScheduleConfig(**config), total)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"warmup_steps": -2}, "schedule.warmup_steps=-2 must be -1 or at least 0; -1 takes 2 %"),
        ({"decay_steps": -2}, "schedule.decay_steps=-2 must be -1 or at least 0; -1 takes 20 %"),
        ({"min_lr_factor": 1.5}, r"schedule.min_lr_factor=1.5 .*nearest valid choice is 1"),
    ],
)
def test_config_names_key_value_and_nearest_choice(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScheduleConfig(**values)  # type: ignore[arg-type]
