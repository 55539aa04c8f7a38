"""Norms of gradients by layer, beside the sum over every element."""

import math

import pytest
import torch
from titan_train.parallel.gradients import Gradients
from torch import nn


@pytest.fixture
def model():
    """Two numbered layers of two parameters each, and two parameters outside, with gradients."""
    torch.manual_seed(0)
    made = nn.Module()
    made.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 7)])
    made.embedding, made.head = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(6))
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter)
    return made


def norms_by_layer(gradients):
    return gradients.norms_by_layer(gradients.local(), torch.device("cpu"))


def expected(model):
    """Of both layers, then of all else."""
    groups = [*(list(layer.parameters()) for layer in model.layers), [model.embedding, model.head]]
    return [math.sqrt(sum(float(p.grad.double().square().sum()) for p in g if p.grad is not None)) for g in groups]


def test_each_layer_and_all_else_have_the_norm_of_their_elements(model):
    norms = norms_by_layer(Gradients([model]))
    assert norms.tolist() == pytest.approx(expected(model), rel=1e-6)


def test_a_parameter_without_a_gradient_is_left_out_and_counts_again_later(model):
    gradients = Gradients([model])
    norms_by_layer(gradients)
    kept, model.layers[1].weight.grad = model.layers[1].weight.grad, None
    assert norms_by_layer(gradients).tolist() == pytest.approx(expected(model), rel=1e-6)
    model.layers[1].weight.grad = kept
    assert norms_by_layer(gradients).tolist() == pytest.approx(expected(model), rel=1e-6)


def test_what_is_not_finite_stays_in_its_layer(model):
    model.layers[0].bias.grad[1] = math.nan
    broken, *others = norms_by_layer(Gradients([model])).tolist()
    assert math.isnan(broken)
    assert others == pytest.approx(expected(model)[1:], rel=1e-6)


def test_half_precision_gradients_are_summed_in_float32(model):
    halves = model.to(torch.bfloat16)
    norms = norms_by_layer(Gradients([halves]))
    assert norms.dtype == torch.float32
    assert norms.tolist() == pytest.approx(expected(halves), rel=1e-5)
