"""FLOPs per token follow the stated convention."""

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, count_parameters, flops_per_token
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def test_llama3_8b_matches_the_closed_form() -> None:
    model = build_model(ModelConfig(name="llama3_8b"), vocab_size=None)
    matrices = 8_030_261_248 - 128_256 * 4096
    assert flops_per_token(model, 8192) == 6 * matrices + 12 * 32 * 4096 * 8192
    assert flops_per_token(model, 8192, causal=True) == 6 * matrices + 6 * 32 * 4096 * 8192


def test_a_tied_matrix_counts_once_for_the_head_and_positions_do_not_count() -> None:
    model = build_model(ModelConfig(name="gpt3_175b"), vocab_size=None)
    assert flops_per_token(model, 2048) == 6 * (174_604_259_328 - 2048 * 12288) + 12 * 96 * 12288 * 2048


@pytest.mark.parametrize("name", ["llama3_debug", "gpt_debug"])
def test_convention_agrees_with_counted_multiplications(name: str) -> None:
    model = build_model(ModelConfig(name=name), vocab_size=300)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 64, dtype=torch.int64, device="meta")).sum().backward()
    # vectors (norms, biases) are in N but multiply no matrix; torch counts 5 products in the backward of attention,
    # as it computes the scores again: 2 + 5 of them instead of the convention's 2 + 4
    q = 2 * 64
    want = 64 * (flops_per_token(model, 64) - 6 * vectors)
    assert counter.get_total_flops() in (want, want + 64 * 2 * q * 64)


def test_an_own_module_gets_six_flops_a_parameter() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    assert flops_per_token(model, 128) == 6 * (8 * 50 + 50)
    assert count_parameters(model) == 2 * 8 * 50 + 50
