"""Parameter groups by pattern: what decays, what is scaled, and what is refused."""

import json
import re

import pytest
import torch
from pydantic import TypeAdapter
from titan_train.config.model import ModelConfig
from titan_train.config.optimizer import OptimizerConfig
from titan_train.models import build_model
from titan_train.optim import plan_groups
from torch import nn


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build_model(ModelConfig(), vocab_size=300)


def decays(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    return {fqn: group.weight_decay for group in plan_groups(model, config) for fqn in group.fqns}


def scales(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    return {fqn: group.lr_scale for group in plan_groups(model, config) for fqn in group.fqns}


@pytest.mark.parametrize("name", ["llama3_debug", "gpt_debug"])
def test_norms_and_biases_do_not_decay_by_default_and_embeddings_do(name: str) -> None:
    found = decays(build_model(ModelConfig(name=name), vocab_size=300), OptimizerConfig(weight_decay=0.1))
    for fqn, decay in found.items():
        assert decay == (0.0 if "norm" in fqn or fqn.endswith("bias") else 0.1), fqn
    assert found["tok_embeddings.weight"] == 0.1


def test_a_matrix_of_a_norm_layer_does_not_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((3, 4)))
    assert decays(model, OptimizerConfig()) == {"0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}


def test_every_trainable_parameter_is_in_one_group(llama: nn.Module) -> None:
    groups = plan_groups(llama, OptimizerConfig(lr_scales={"wq": 0.5, "attention": 2.0}, weight_decays={r"\.0\.": 0.0}))
    fqns = [fqn for group in groups for fqn in group.fqns]
    assert sorted(fqns) == sorted(fqn for fqn, _ in llama.named_parameters())
    assert sum(len(group.parameters) for group in groups) == len(fqns)


def test_the_first_pattern_found_counts(llama: nn.Module) -> None:
    found = scales(llama, OptimizerConfig(lr_scales={r"attention\.wq": 0.5, "attention": 2.0}))
    assert found["layers.0.attention.wq.weight"] == 0.5
    assert found["layers.0.attention.wk.weight"] == 2.0
    assert found["layers.0.attention_norm.weight"] == 2.0
    assert found["lm_head.weight"] == 1.0


def test_a_decay_pattern_reaches_what_the_default_leaves_out(llama: nn.Module) -> None:
    found = decays(llama, OptimizerConfig(weight_decays={"norm": 0.01, "tok_embeddings": 0.0}))
    assert found["norm.weight"] == found["layers.1.ffn_norm.weight"] == 0.01
    assert found["tok_embeddings.weight"] == 0.0
    assert found["lm_head.weight"] == 0.1


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert list(decays(model, OptimizerConfig())) == ["1.weight", "1.bias"]


def test_wrappers_do_not_change_the_names() -> None:
    model = build_model(ModelConfig(), vocab_size=300, device="cpu")
    names = [fqn for fqn, _ in model.named_parameters()]
    compiled = torch.compile(model, backend="eager")
    groups = plan_groups(compiled, OptimizerConfig(lr_scales={"^tok_embeddings": 0.5}))  # type: ignore[arg-type]
    assert sorted(fqn for group in groups for fqn in group.fqns) == sorted(names)


@pytest.mark.parametrize("table", ["lr_scales", "weight_decays"])
def test_a_pattern_that_matches_nothing_is_refused_with_near_names(llama: nn.Module, table: str) -> None:
    config = OptimizerConfig(**{table: {"tok_embedding_weight": 0.5}})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"optimizer.{table}.*'tok_embedding_weight'.*tok_embeddings.weight"):
        plan_groups(llama, config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lr": 0.0}, "optimizer.lr=0.0"),
        ({"lr": float("nan")}, "optimizer.lr=nan"),
        ({"beta1": 1.0}, r"optimizer.beta1=1.0 must be at least 0 and below 1; the default is 0.9"),
        ({"beta2": -0.1}, "the default is 0.95"),
        ({"eps": 0.0}, "optimizer.eps=0.0"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1"),
        ({"lr_scales": {"norm(": 1.0}}, r"not a regular expression.*" + re.escape(repr(re.escape("norm(")))),
        ({"weight_decays": {"norm": -1.0}}, "optimizer.weight_decays.norm=-1.0"),
    ],
)
def test_config_names_key_and_value(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**values)  # type: ignore[arg-type]


def test_config_reads_from_strict_json_in_order() -> None:
    text = json.dumps({"name": "sgd", "lr": 1, "lr_scales": {"b": 2, "a": 0.5}})
    config = TypeAdapter(OptimizerConfig).validate_json(text, strict=True)
    assert list(config.lr_scales.items()) == [("b", 2.0), ("a", 0.5)]


def test_rates_of_state_spaces_and_biases_of_stacked_experts_do_not_decay() -> None:
    model = nn.Module()
    shapes = {"A_log": (8, 4), "D": (8, 2), "dt_bias": (2, 4), "gate_up_proj_bias": (4, 16), "experts_bias": (4, 8)}
    for name, shape in (shapes | {"gate_up_proj": (4, 8, 16), "Debias": (3, 3)}).items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    found = decays(model, OptimizerConfig(weight_decay=0.1))
    assert found == dict.fromkeys(shapes, 0.0) | {"gate_up_proj": 0.1, "Debias": 0.1}
