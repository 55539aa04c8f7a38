"""The planner reads the shape of a published model from its config.json."""

import json
from pathlib import Path

import pytest
from titan_train.cli import main
from titan_train.config import parse_config
from titan_train.models.hf.plans import HF_PLANS
from titan_train.models.hf.shape import shape_of_published
from titan_train.planner.shapes import find_shape, shape_of_config, uncut_axes

LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
PHI_4 = {
    "model_type": "phi3", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
    "intermediate_size": 17920, "vocab_size": 100352, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False, "n_group": 8,
    "topk_group": 4,
}  # fmt: skip
QWEN3_5_9B = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "vocab_size": 248320, "tie_word_embeddings": False,
}  # fmt: skip

DEEPSEEK_V4 = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "hc_mult": 4,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "sliding_window": 128, "index_topk": 512,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "vocab_size": 129280, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("published", "parameters"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (PHI_4, 14_659_507_200),  # as its model card's files count
        (DEEPSEEK_V3, find_shape("deepseek_v3").parameters()),
        (QWEN3_5_9B, 8_953_803_264),  # of transformers' module
        (DEEPSEEK_V4, find_shape("deepseek_v4_flash").parameters()),
    ],
    ids=["llama3_8b", "phi_4", "deepseek_v3", "qwen3.5_9b", "deepseek_v4_flash"],
)
def test_parameters_of_published_models_are_exact(published: dict[str, object], parameters: int) -> None:
    assert shape_of_published("hf:x", published).parameters() == parameters


def folder(tmp_path: Path, **fields: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return f"hf:{tmp_path}"


def test_plan_and_estimate_take_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = folder(tmp_path, **PHI_4)
    words = ["plan", name, "--rehearse", "0", "--global-batch", "64", "--out", str(tmp_path / "p")]
    assert main([*words, "--devices", "8"]) == 0
    assert f'name = "{name}"' in (tmp_path / "p.toml").read_text()
    capsys.readouterr()
    assert main(["check", str(tmp_path / "p.toml"), "--hardware", "h100", "--devices", "8"]) == 0
    assert "tokens/s/device" in capsys.readouterr().out


def test_a_family_without_a_plan_is_planned_for_data_parallelism_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = folder(tmp_path, **{**LLAMA3_8B, "model_type": "doge"})
    words = ["plan", name, "--rehearse", "0", "--global-batch", "64", "--out", str(tmp_path / "p")]
    assert main([*words, "--devices", "64"]) == 0
    text = (tmp_path / "p.toml").read_text()
    assert all(f"{axis} = 1\n" in text for axis in ("tp", "cp", "pp", "ep"))
    assert "doge" not in HF_PLANS


def test_a_plan_that_lacks_an_axis_is_planned_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert uncut_axes(folder(tmp_path, **{**LLAMA3_8B, "model_type": "gemma2"})) == ("cp",)
    per_layer = {**LLAMA3_8B, "model_type": "gemma4_text", "hidden_size_per_layer_input": 256}
    assert set(uncut_axes(folder(tmp_path, **per_layer))) == {"ep", "tp", "pp"}  # no tp without sequence parallelism
    assert uncut_axes("flux_dev") == ("tp",)
    assert uncut_axes("llama3_8b") == ()
    words = ["plan", "flux_dev", "--rehearse", "0", "--global-batch", "64", "--seq-len", "4608", "--devices", "64"]
    assert main([*words, "--fix", "tp=2"]) == 2
    assert "--fix tp=2: a plan cannot cut flux_dev over tp" in capsys.readouterr().err


def test_changed_fields_change_the_shape_and_a_missing_size_is_named(tmp_path: Path) -> None:
    name = folder(tmp_path, **LLAMA3_8B)
    config = parse_config({"model": {"name": name, "args": {"num_hidden_layers": 2}}})
    assert shape_of_config(config).num_layers == 2
    name = folder(tmp_path, model_type="qwen3_5", text_config=QWEN3_5_9B)
    config = parse_config({"model": {"name": name, "args": {"text_config.num_hidden_layers": 3}}})
    assert shape_of_config(config).num_layers == 3
    with pytest.raises(ValueError, match=r"config.json has hidden_size=None"):
        shape_of_published("hf:x", {"model_type": "llama"})


def test_norms_of_queries_and_keys_are_those_of_the_plan() -> None:
    normed = {
        kind
        for kind in HF_PLANS
        if any(
            b.attention and b.attention.qk_norm
            for b in shape_of_published(kind, {**LLAMA3_8B, "model_type": kind}).blocks
        )
    }
    assert normed == {
        "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma3_text", "gemma3n_text", "gemma4_text",
        "olmo2", "olmo3", "olmo_hybrid", "glm4_moe", "minimax_m2", "hunyuan_v1_dense", "hunyuan_v1_moe", "olmoe", "flex_olmo",
        "cohere", "exaone4", "apertus", "dots1", "mellum", "exaone_moe", "hy_v3", "kolibri1", "afmoe", "laguna", "flint", "beam",
        "deepseek_v4",
    }  # fmt: skip


def test_windows_and_routed_layers_make_groups_of_their_own() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    fields = {
        **LLAMA3_8B,
        "num_hidden_layers": 4,
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "layer_types": types,
    }
    shape = shape_of_published("hf:x", fields)
    assert sorted((b.count, b.attention.window) for b in shape.blocks if b.attention) == [(2, 0), (2, 6)]
    shape = shape_of_published("hf:x", DEEPSEEK_V4)
    assert sorted((b.count, b.attention.window, b.streams) for b in shape.blocks if b.attention) == [
        (2, 128, 4), (20, 160, 4), (21, 640, 4),
    ]  # fmt: skip
    moe = {**LLAMA3_8B, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    assert [b.count for b in shape_of_published("hf:x", moe).blocks] == [1, 31]
