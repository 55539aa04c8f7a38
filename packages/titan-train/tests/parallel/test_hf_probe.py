"""Families of transformers are tried before a run, on a tiny cut of the user's own folder: refused, or given what they need."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import composition
import hf_folders
import pytest
import torch
from safetensors.torch import load_file, save_file
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.launch.validate import validate
from titan_train.models import build_model
from titan_train.models.hf.probe import probe
from titan_train.train.warm_start import check_init, load_init

pytest.importorskip("transformers", reason="transformers is not installed")

MASKED = ("opt", "xglm", "biogpt")
LEAKING = ("lfm2", "mamba2", "jamba", "minimax", "recurrent_gemma", "bloom", "deepseek_v4")


def configured(tmp_path: Path, kind: str, sections: dict[str, Any] | None = None, **changes: Any) -> Any:
    source = hf_folders.make(tmp_path / kind, kind, vocab_size=264, **changes)
    model = {"model": {"name": f"hf:{source}", "seq_len": 32, "init": "", "args": {}}, "train": {"microbatch": 2}}
    return parse_config(composition.tree(tmp_path, "run", model | (sections or {})))


def packed_and_alone(model: Any) -> tuple[Any, Any]:
    """Logits of a row of two documents, and of the documents one by one."""
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    cu_seqlens = torch.tensor([[0, 9, 24]], dtype=torch.int32)
    with torch.no_grad():
        packed = model(ids, positions=positions, cu_seqlens=cu_seqlens)
        return packed, torch.cat([model(ids[:, :9]), model(ids[:, 9:])], dim=1)


@pytest.mark.parametrize("kind", MASKED)
def test_a_family_whose_masks_know_no_documents_is_given_masks(kind: str, tmp_path: Path) -> None:
    import titan_fsdp as fsdp
    from titan_train.models import build_model, init_for
    from titan_train.parallel.check import check_model
    from titan_train.parallel.layout.run import plan_run

    config = configured(tmp_path, kind)
    plan = plan_run(config, 1)
    model: Any = build_model(config.model, vocab_size=264)
    check_model(config, plan.layout, plan.batch, model)
    fsdp.materialize(model, "cpu", init_for(model), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    packed, alone = packed_and_alone(model.eval())
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-5)  # float32, added in another order


@pytest.mark.parametrize("depth", [2, 48])
def test_factors_of_each_channel_are_cut_as_heads_are(depth: int, tmp_path: Path) -> None:
    """Phi-3.5's shape: 48 factors for heads of 96 channels; as many layers as factors must not cut them as layers."""
    published = {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": depth, "vocab_size": 264,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072, "pad_token_id": 0,
        "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "sliding_window": 262144,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0 + i / 2 for i in range(48)], "short_factor": [1.0] * 48},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    model: Any = build_model(ModelConfig(name=f"hf:{tmp_path}", seq_len=32), vocab_size=264)
    probe(model, f"hf:{tmp_path}", packed=True, staged=True, drawn=True)


@pytest.mark.parametrize("kind", LEAKING)
def test_a_family_that_leaks_over_the_end_of_a_document_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    config = configured(tmp_path, kind)
    with pytest.raises(ValueError, match=rf"in this {kind}, documents .* Set data.document_mask=false"):
        validate(config, 1)


def test_a_folder_that_asks_for_more_than_its_plan_knows_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of llama4, whose plan is made to forget them: no field that the plan reads tells of them."""
    from titan_train.models.hf.plans import HF_PLANS

    forgetful = dataclasses.replace(HF_PLANS["llama4_text"], shorter_than=())
    monkeypatch.setattr("titan_train.models.hf.build.hf_plans", lambda: {"llama4_text": forgetful})
    config = configured(tmp_path, "llama4_text")
    with pytest.raises(ValueError, match=r"attention of this llama4_text is not what its plan says"):
        validate(config, 1)
    monkeypatch.undo()
    validate(config, 1)
    with pytest.raises(ValueError, match=r"model.seq_len=32 is not shorter than attention_chunk_size=32"):
        validate(configured(tmp_path / "short", "llama4_text", attention_chunk_size=32), 1)


@pytest.mark.parametrize(
    ("kind", "parallel", "words", "fields"),
    [
        ("deepseek_v32", {"cp": 2}, "chooses its keys among all of the row", {}),
        ("deepseek_v4", {"cp": 2}, "keys that are made of all tokens of the row before it", {}),
        ("gemma2", {"cp": 2}, "scores of its attention are capped", {}),
        ("llama4_text", {"ep": 2}, "nothing is sent", {}),
        ("gemma3n_text", {"pp": 2}, "hand on several streams", {}),
        ("gemma3n_text", {"tp": 2}, "looks up each token a second time.* Set parallel.sequence_parallel=false", {}),
        ("gemma4_text", {"pp": 2}, "the embedding of the first stage", {"hidden_size_per_layer_input": 8}),
        ("gemma4_text", {"pp": 2}, "keys and values of earlier ones", {"num_kv_shared_layers": 2}),
        ("gemma4_text", {"tp": 2}, "looks up each token a second time", {"hidden_size_per_layer_input": 8}),
    ],
)
def test_what_a_planned_family_lacks_is_said_with_the_reason(
    kind: str, parallel: dict[str, int], words: str, fields: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"the family '{kind}' of transformers has no \w+( \w+)? here: .*{words}"):
        validate(configured(tmp_path, kind, {"parallel": parallel}, **fields), 2)


def test_names_that_only_transformers_writes_are_read(tmp_path: Path) -> None:
    """It renames the feed-forward of a dense layer, too, when it writes a Kimi Linear; the published files do not."""
    kinds = ["dense", "sparse", "sparse", "sparse"]
    source = hf_folders.make(tmp_path / "written", "kimi_linear", vocab_size=264, mlp_layer_types=kinds)
    file = source / "model.safetensors"
    written = load_file(file)
    dense = "model.layers.0.{}.gate_proj.weight"
    assert dense.format("block_sparse_moe") in written
    assert dense.format("mlp") not in written
    config = ModelConfig(name=f"hf:{source}", init=f"hf:{source}", seq_len=32)
    model = build_model(config, vocab_size=264, device="cpu")
    check_init(config.init, model, config)
    published = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): value for name, value in written.items()}
    save_file(published, file, {"format": "pt"})
    check_init(config.init, model, config)
    load_init(config.init, [model], whole=model, config=config, shards={})
    assert torch.equal(model.get_parameter(dense.format("mlp")), written[dense.format("block_sparse_moe")])
    save_file(written, file, {"format": "pt"})
    with torch.no_grad():
        model.get_parameter(dense.format("mlp")).zero_()
    load_init(config.init, [model], whole=model, config=config, shards={})
    assert torch.equal(model.get_parameter(dense.format("mlp")), written[dense.format("block_sparse_moe")])


@pytest.mark.parametrize("kind", ["laguna", "mimo_v2_flash"])
def test_layers_with_unlike_heads_are_not_cut_along_the_sequence(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has layers of 4 query and 2 key-value heads, and others .* parallel.cp=1"):
        validate(configured(tmp_path, kind, {"parallel": {"cp": 2}}), 2)


def test_attention_of_a_family_of_its_own_does_not_share_key_value_heads(tmp_path: Path) -> None:
    parallel = {"tp": 4, "replicate_kv": True}
    with pytest.raises(ValueError, match=r"attention of the family 'gemma2' is left to transformers"):
        validate(configured(tmp_path, "gemma2", {"parallel": parallel}), 4)


@pytest.mark.parametrize("field", ["residual_dropout", "embedding_dropout"])
def test_dropout_of_a_planned_family_is_refused_by_any_name(field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"Set model.args.{field}=0.0"):
        validate(configured(tmp_path, "starcoder2", **{field: 0.1}), 1)


@pytest.mark.parametrize("changes", [(), ("residual_dropout",)])  # also where it is named, as it had to be
def test_weights_of_a_folder_with_dropout_start_a_run_without(changes: tuple[str, ...], tmp_path: Path) -> None:
    folder = f"hf:{hf_folders.make(tmp_path, 'starcoder2', vocab_size=264, residual_dropout=0.1)}"
    config = ModelConfig(name=folder, init=folder, init_changes=changes, args={"residual_dropout": 0.0}, seq_len=32)
    check_init(folder, build_model(config, vocab_size=264), config)


def test_jitter_that_chooses_experts_is_compared(tmp_path: Path) -> None:
    folder = f"hf:{hf_folders.make(tmp_path, 'phimoe', vocab_size=264, attention_dropout=0.1)}"
    args = {"router_jitter_noise": 0.2, "attention_dropout": 0.0}
    config = ModelConfig(name=folder, init=folder, args=args, seq_len=32)
    with pytest.raises(ValueError, match=r"model: router_jitter_noise=0.2 should be 0.01. The weights"):
        check_init(folder, build_model(config, vocab_size=264), config)


def test_norms_that_differ_by_head_are_not_cut(tmp_path: Path) -> None:
    """StableLM 2 12B: a rank would take the norms of the first heads for those of its own."""
    validate(configured(tmp_path, "stablelm", qk_layernorm=True), 1)
    with pytest.raises(ValueError, match=r"each of its heads has a norm of its own"):
        validate(configured(tmp_path, "stablelm", {"parallel": {"tp": 2}}, qk_layernorm=True), 2)


def test_whole_rows_are_no_packed_documents(tmp_path: Path) -> None:
    validate(configured(tmp_path, "lfm2", {"data": {"document_mask": False}}), 1)


def test_a_folder_whose_configuration_says_decoder_and_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    """cpmant: nothing in its fields says that its attention sees the whole prompt."""
    config = {"model_type": "cpmant", "vocab_size": 264, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8,
              "dim_ff": 48, "num_hidden_layers": 2, "prompt_length": 4, "prompt_types": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"model": {"name": f"hf:{tmp_path}", "seq_len": 32, "args": {}}}
    with pytest.raises(ValueError, match="the logits of a token depend on the tokens after it"):
        validate(parse_config(composition.tree(tmp_path, "run", model)), 1)


@pytest.mark.parametrize("kind", ["bart", "whisper"])
def test_an_encoder_with_a_decoder_is_no_decoder(kind: str, tmp_path: Path) -> None:
    from titan_train.models import build_model

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 96, "d_model": 32}))
    with pytest.raises(ValueError, match=f"a {kind} is an encoder and a decoder"):
        build_model(ModelConfig(name=f"hf:{tmp_path}", seq_len=32), vocab_size=96)


def test_a_family_whose_weights_cannot_be_drawn_is_refused_by_check(tmp_path: Path) -> None:
    config = {"model_type": "rwkv", "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"model": {"name": f"hf:{tmp_path}", "seq_len": 32, "args": {}}, "data": {"document_mask": False}}
    with pytest.raises(ValueError, match="initial weights of this rwkv cannot be drawn one by one"):
        validate(parse_config(composition.tree(tmp_path, "run", model)), 1)


def test_the_cut_keeps_a_layer_of_each_sort() -> None:
    from titan_train.models.hf.cut import cuts, layers_that_show_all
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=12, hidden_size=1024, head_dim=128, num_attention_heads=8)
    from titan_train.models.build import SkipRandomFill
    from titan_train.models.hf.build import assemble

    with torch.device("meta"), SkipRandomFill():
        model = assemble(config, {**config.to_dict(), "model_type": "gemma3_text"}, name="hf:x")
    layers = layers_that_show_all(model.repeated_layers())
    assert layers == 6  # the first with full attention is the sixth
    cut = next(cuts(config.to_dict(), depth=12, layers=layers))
    assert cut["num_hidden_layers"] == len(cut["layer_types"]) == 6
    assert set(cut["layer_types"]) == set(config.layer_types)
    assert (cut["hidden_size"], cut["head_dim"], cut["num_attention_heads"]) == (64, 8, 8)


def test_a_folder_whose_tensors_are_not_converted_here_is_not_called_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three convolutions in one, of a family whose plan is taken away."""
    monkeypatch.setattr("titan_train.models.hf.build.hf_plans", dict)
    config = configured(tmp_path, "olmo_hybrid", {"data": {"document_mask": False}})
    validate(config, 1)
    warm = dataclasses.replace(config, model=dataclasses.replace(config.model, init=config.model.name))
    with pytest.raises(
        ValueError, match=r"transformers converts the tensors of a olmo_hybrid .*Leave model.init empty"
    ):
        validate(warm, 1)
