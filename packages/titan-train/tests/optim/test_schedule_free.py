"""Schedule-free AdamW: the paper's three sequences, and what it does not go with."""

import pytest
import torch
from titan_train.config import parse_config
from titan_train.config.optimizer import OptimizerConfig
from titan_train.optim import build_optimizer
from titan_train.optim.average import Z, averaged_weight, averages_in_place
from torch import nn


def test_weights_follow_the_paper():
    """Algorithm 1 of arXiv:2405.15682 in float64, with x, y and z each kept, and weight decay at y."""
    beta1, beta2, eps, decay = 0.9, 0.99, 1e-8, 0.1
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    found = build_optimizer(
        model, OptimizerConfig(name="schedule_free", lr=1e-2, beta2=beta2, beta1=beta1, weight_decay=decay, eps=eps)
    )
    x = z = weight.detach().clone()
    square, whole = torch.zeros_like(x), 0.0
    for step in range(1, 9):
        rate = 1e-2 * min(1.0, step / 4)
        found.param_groups[0]["lr"] = rate
        y = (1 - beta1) * z + beta1 * x
        torch.testing.assert_close(weight.detach(), y, rtol=0, atol=1e-14)
        gradient = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        weight.grad = gradient.clone()
        found.step()
        square = beta2 * square + (1 - beta2) * gradient**2
        z = z - rate * (gradient / ((square / (1 - beta2**step)).sqrt() + eps) + decay * y)
        whole += rate**2
        x = (1 - rate**2 / whole) * x + rate**2 / whole * z
        torch.testing.assert_close(
            averaged_weight(weight.detach(), found.state[weight][Z], beta1), x, rtol=0, atol=1e-14
        )


def test_another_share_at_a_resume_keeps_the_average():
    weight = nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    found = build_optimizer(model, OptimizerConfig(name="schedule_free", lr=1e-2, beta1=0.9, weight_decay=0.0))
    for step in range(5):
        weight.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        found.step()
    x = averaged_weight(weight.detach(), found.state[weight][Z], 0.9)
    found.param_groups[0]["betas"] = 0.5, 0.95  # as a resume sets it, by the configuration
    with averages_in_place([model], found):
        torch.testing.assert_close(weight.detach(), x, rtol=0, atol=1e-14)
    found.step()
    z = found.state[weight][Z]
    expected = x.lerp(z, 1 / 6)  # the sixth of equal rates
    torch.testing.assert_close(averaged_weight(weight.detach(), z, 0.5), expected, rtol=0, atol=1e-14)
    with averages_in_place([model], found):
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({}, "schedule.name='wsd' with optimizer.name='schedule_free'"),
        ({"average": {"ema_decay": 0.9}, "schedule": {"name": "constant"}}, "average.ema_decay=0.9 with"),
        ({"qk_clip": {"threshold": 100.0}, "schedule": {"name": "constant"}}, "qk_clip.threshold=100.0 with"),
        ({"optimizer": {"cautious": True}}, "optimizer.cautious=True with optimizer.name='schedule_free'"),
        ({"optimizer": {"beta1": 0.0}}, "optimizer.beta1=0.0 with optimizer.name='schedule_free'"),
    ],
)
def test_what_schedule_free_does_not_go_with_is_refused(sections, words):
    with pytest.raises(ValueError, match=words):
        parse_config(sections | {"optimizer": {"name": "schedule_free"} | sections.get("optimizer", {})})
