"""FLOPs per token follow the stated convention."""

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import (
    CausalAttention,
    MoE,
    MoEArgs,
    build_model,
    count_active_parameters,
    count_parameters,
    flops_per_token,
)
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


def test_only_the_experts_that_a_token_goes_to_count() -> None:
    model = build_model(ModelConfig(name="qwen3_30b_a3b"), vocab_size=None)
    matrices = count_active_parameters(model) - 151_936 * 2048
    assert flops_per_token(model, 4096) == 6 * matrices + 12 * 48 * 32 * 128 * 4096


def test_latent_attention_counts_keys_of_192_and_values_of_128_channels() -> None:
    model = build_model(ModelConfig(name="deepseek_v3"), vocab_size=None)
    matrices = count_active_parameters(model) - 129_280 * 7168
    assert flops_per_token(model, 4096) == 6 * matrices + 6 * 61 * 128 * (192 + 128) * 4096
    assert flops_per_token(model, 4096, causal=True) == 6 * matrices + 3 * 61 * 128 * (192 + 128) * 4096


@pytest.mark.parametrize("name", ["qwen3_debug", "qwen3_moe_debug", "deepseek_debug"])
def test_convention_agrees_with_counted_multiplications_of_rotary_models(name: str) -> None:
    # values as wide as keys: padded channels would be multiplied, but do not count
    config = ModelConfig(name=name, args={"v_head_dim": 32} if name == "deepseek_debug" else {})
    model = build_model(config, vocab_size=300)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    width = sum(m.num_heads * m.head_dim for m in model.modules() if isinstance(m, CausalAttention))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 64, dtype=torch.int64, device="meta")).sum().backward()
    want = 64 * (flops_per_token(model, 64) - 6 * vectors)
    # torch counts 5 products in the backward of attention, as it computes the scores again
    assert counter.get_total_flops() in (want, want + 64 * 2 * width * 64)


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


def test_what_a_block_states_takes_the_place_of_what_would_be_counted_inside() -> None:
    class Stating(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.proj = inner, nn.Linear(8, 8)

        def flops_per_token(self, seq_len: int) -> float:
            return 1000.0 * seq_len

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            args = MoEArgs(dim=8, num_experts=4, experts_per_token=1, expert_ffn_dim=16)
            self.attention, self.moe = CausalAttention(2, 2, 4), MoE(args)

    block = Stating(Stating(Attending()))
    model = nn.Sequential(nn.Embedding(50, 8), block, block, Stating(Attending()), nn.Linear(8, 50))
    assert flops_per_token(model, 128) == 6 * (8 * 50 + 50) + 2 * 1000 * 128
