"""Modules for tokens further ahead come in by the names of DeepSeek-V3 and Qwen3-Next, and leave as they came."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from titan_ckpt import Checkpointer, TrainState, export_hf, import_hf
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.models.common.mtp import mtp_of
from titan_train.models.deepseek.hf import DEEPSEEK_HF
from titan_train.models.qwen3_next.hf import config_of
from titan_train.models.registry import family_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_hidden_layers": 3,
    "num_key_value_heads": 8, "n_routed_experts": 8, "first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 640, "q_lora_rank": 32, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def publish(folder):
    """A folder as DeepSeek-V3 is published: layer 3 predicts a second token, with embedding and head once more."""
    torch.manual_seed(0)
    transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SMALL)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    there = "model.layers.3"
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace("layers.2", "layers.3", 1)] = torch.randn_like(tensors[name])
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{there}.{name}.weight"] = torch.rand(64)
    tensors[f"{there}.eh_proj.weight"] = torch.randn(64, 128)
    tensors[f"{there}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{there}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def deepseek(depth):
    return build_model(ModelConfig(name="deepseek_debug", args={"mtp_depth": depth}), vocab_size=97, device="cpu")


def test_the_published_module_comes_in_and_leaves_bit_for_bit(tmp_path):
    published = publish(tmp_path / "in")
    model = deepseek(1)
    names = family_of(model).load_hf().names(model.args)
    import_hf(tmp_path / "in", model, names=names)
    module = mtp_of(model)["0"]
    assert torch.equal(module.proj.weight, published["model.layers.3.eh_proj.weight"])
    assert torch.equal(module.norm.weight, published["model.layers.3.shared_head.norm.weight"])
    assert torch.equal(module.block.moe.experts.w1[5], published["model.layers.3.mlp.experts.5.gate_proj.weight"])
    with Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(0, TrainState(model=model, rng=False))
    step = tmp_path / "steps" / "step-00000000"
    export_hf(step, tmp_path / "out", names=names, config=DEEPSEEK_HF.config_of(model.args))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], published[name]) for name in published)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    # a model without the module passes it over; transformers reads the export
    without = deepseek(0)
    import_hf(tmp_path / "out", without, names=family_of(without).load_hf().names(without.args))
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(without(tokens), model(tokens))
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5


def qwen3_next(depth):
    args = {"mtp_depth": depth, "num_shared_experts": 2}
    return build_model(ModelConfig(name="qwen3_next_moe_debug", args=args), vocab_size=97, device="cpu")


def publish_qwen3_next(folder):
    """A folder as Qwen3-Next is published: the module's block is one with attention, under names of its own."""
    torch.manual_seed(1)
    settings = config_of(qwen3_next(0).args)
    transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**settings)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        tensors[name.replace("model.layers.3", "mtp.layers.0", 1)] = torch.randn_like(tensors[name])
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.rand(64)
    tensors["mtp.fc.weight"] = torch.randn(64, 128)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_the_module_of_qwen3_next_comes_in_and_leaves_bit_for_bit(tmp_path):
    published = publish_qwen3_next(tmp_path / "in")
    model = qwen3_next(1)
    hf = family_of(model).load_hf()
    import_hf(tmp_path / "in", model, names=hf.names(model.args))
    module = mtp_of(model)["0"]
    assert torch.equal(module.proj.weight, published["mtp.fc.weight"])
    assert torch.equal(module.embedding_norm.weight, published["mtp.pre_fc_norm_embedding.weight"])
    assert torch.equal(module.block.attention.wq.weight, published["mtp.layers.0.self_attn.q_proj.weight"])
    with Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(0, TrainState(model=model, rng=False))
    step = tmp_path / "steps" / "step-00000000"
    export_hf(step, tmp_path / "out", names=hf.names(model.args), config=hf.config_of(model.args))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], published[name]) for name in published)
    # a model without the module passes it over; transformers reads the export
    without = qwen3_next(0)
    import_hf(tmp_path / "out", without, names=hf.names(without.args))
    theirs = transformers.Qwen3NextForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(without(tokens), model(tokens))
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5
    # the published folder names one module, so more of them have no names there
    deeper = qwen3_next(2)
    with pytest.raises(ValueError, match=r"mtp_depth=2: a folder of qwen3_next holds one module"):
        hf.names(deeper.args)
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM does not compute mtp_depth=2"):
        hf.config_of(deeper.args)


def test_a_folder_whose_shared_matrices_differ_is_refused(tmp_path):
    tensors = publish(tmp_path)
    tensors["model.layers.3.shared_head.head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = deepseek(1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"shared_head.head.weight and lm_head.weight are one weight in this model"):
        import_hf(tmp_path, model, names=family_of(model).load_hf().names(model.args))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
