"""What transformers writes and reads is the judge of the key maps. Skipped where transformers is not installed."""

import warnings

import pytest
import torch
from family_maps import DEEPSEEK, LLAMA, QWEN3
from titan_ckpt import Checkpointer, export_hf, import_hf
from titan_ckpt.interop.hf import import_hf_step
from titan_ckpt.load.reader import StepReader

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8))


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    )
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3():
    config = transformers.DeepseekV3Config(
        **SMALL, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "names"),
    [(llama, LLAMA), (qwen3, QWEN3), (qwen3_moe, QWEN3), (deepseek_v3, DEEPSEEK)],
    ids=["llama", "qwen3", "qwen3-moe", "deepseek-v3"],
)
def test_transformers_loads_an_export_and_gives_the_same_logits(tmp_path, monkeypatch, make, names):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    source = make().eval()
    source.save_pretrained(tmp_path / "source")
    step = import_hf_step(tmp_path / "source", tmp_path / "steps", names=names)
    ours = StepReader(step).index.tensors["model"]
    if names is not LLAMA and any("moe" in key for key in ours):
        assert len(ours["layers.1.moe.experts.w1"].shape) == 3, "stacked"
    export_hf(step, tmp_path / "out", names=names, config=source.config.to_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations
        loaded = type(source).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, source(ids).logits)


def test_a_model_filled_by_import_equals_what_transformers_wrote(tmp_path):
    source = llama()
    source.save_pretrained(tmp_path / "source")
    step = import_hf_step(tmp_path / "source", tmp_path / "steps", names=LLAMA)
    other = llama()
    import_hf(tmp_path / "source", other)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), source.parameters(), strict=True))
    assert Checkpointer(tmp_path / "steps").path(0) == step
