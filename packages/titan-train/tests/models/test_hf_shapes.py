"""The shape that ``config.json`` describes has the parameters of transformers' module, for every family with a plan."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.models.build import SkipRandomFill
from titan_train.models.hf.plans import HF_PLANS
from titan_train.models.hf.shape import shape_of_published

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders

LEFT_OUT = {
    "deepseek_v32": "indexer", "glm_moe_dsa": "indexer", "deepseek_v4": "compressors, indexer, mixers of streams",
    "granitemoehybrid": "inside of Mamba-2", "nemotron_h": "inside of Mamba-2", "kimi_linear": "its delta rule",
    "gemma3n_text": "embeddings of layers, AltUp, LAuReL", "gemma4_text": "unlike heads", "laguna": "unlike heads",
    "mimo_v2_flash": "unlike heads",
}  # fmt: skip
"""What the docstring of `titan_train.models.hf.shape` names."""
VECTORS = {
    "afmoe": -12, "beam": -16, "ernie4_5_moe": -12,  # a bias of each expert
    "gpt_oss": -32, "granite_swa": -16, "granitemoe_swa": -16, "flint": -16,  # sinks; gpt_oss: and the router's biases
    "olmo2": -128, "olmo3": -128, "olmoe": -128, "flex_olmo": -128, "minimax_m2": -128, "olmo_hybrid": -64,  # norms of all heads
    "qwen2": 128, "qwen2_moe": 128, "seed_oss": 128, "glm": 128, "glm4": 128,  # no bias of the output
    "olmo": 288, "nanochat": 288, "llama4_text": 64,  # norms without weights
    "cohere2": 128,  # one norm in a layer
    "phi": 32, "persimmon": -128, "axk1": -96, "stablelm": -288, "arcee": -320, "apertus": -8,
}  # fmt: skip
"""Elements of norms, biases and sinks that are counted too many."""


def counted(kind: str, **changes: Any) -> tuple[int, int, int]:
    """Parameters of the shape; of the module; those of them in vectors."""
    from transformers import CONFIG_MAPPING

    fields = hf_folders.FOLDERS[kind]
    base = {key: value for key, value in hf_folders._BASE.items() if "kv_lora_rank" not in fields or key != "head_dim"}
    if kind == "gpt_neox":
        del base["num_key_value_heads"]  # no field of it
    config = CONFIG_MAPPING[kind](**base | fields | changes)
    with torch.device("meta"), SkipRandomFill():
        module = hf_folders.auto_class(kind).from_config(config)
    sizes = [(p.numel(), p.ndim) for p in module.parameters()]
    described = config.to_dict() | {"moe_layers": None} | changes  # llama 4's files have the step alone
    shape = shape_of_published(kind, described).parameters()
    return shape, sum(size for size, _ in sizes), sum(size for size, dims in sizes if dims < 2)


@pytest.mark.parametrize("kind", sorted(HF_PLANS))
def test_parameters_are_those_of_the_module(kind: str) -> None:
    shape, module, vectors = counted(kind)
    if kind in LEFT_OUT:
        assert shape != module
        return
    assert shape - module == VECTORS.get(kind, 0)
    assert abs(shape - module) <= max(vectors, 288)  # 288: norms that olmo and nanochat do not have


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama4_text", {"interleave_moe_layer_step": 1}),
        ("llama4_text", {"moe_layers": [0, 1, 3]}),
        ("llama4_text", {"moe_layers": []}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 0}),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2, 2]}),
        ("gemma3n_text", {"intermediate_size": [64] * 4}),
    ],
    ids=str,
)
def test_layers_with_experts_and_lists_are_read(kind: str, changes: dict[str, Any]) -> None:
    before, after = counted(kind), counted(kind, **changes)
    error = (after[0] - before[0]) - (after[1] - before[1])
    assert abs(error) <= 4 * 4  # Ernie's bias of each expert in each layer


def test_experts_of_a_token_may_be_a_list_of_layers(tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / "hunyuan", "hunyuan_v1_moe", moe_topk=[2] * 4)
    model: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    assert model.model.layers[0].mlp.experts.experts_per_token == 2


def test_layers_that_are_one_part_each_are_blocks_of_their_own() -> None:
    fields = {
        "model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 128, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32,
    }  # fmt: skip
    spelled = [
        {"hybrid_override_pattern": "MEM*-", "num_hidden_layers": 5},
        {"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"]},
    ]
    first, second = (shape_of_published("x", fields | names) for names in spelled)
    assert first == second
    assert [
        (b.count, b.ssm is not None, b.attention is not None, b.ffn is not None) for b in first.blocks
    ] == [(2, True, False, False), (1, False, False, True), (1, False, True, False), (1, False, False, True)]  # fmt: skip
