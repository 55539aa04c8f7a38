"""`model.name = "hf:DIR"`: transformers' own logits from the same files; what the folder must be; what is never done."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import titan_fsdp as fsdp
import torch
from titan_ckpt import import_hf
from titan_train.config.model import ModelConfig
from titan_train.generation import generate
from titan_train.models import build_model, flops_per_token, init_for
from titan_train.models.hf.configuration import balance_ignored
from titan_train.models.hf.plans import HF_PLANS
from titan_train.models.hf.shape import shape_of_published
from titan_train.models.traits import traits_of

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders

ALONE = (
    "bloom", "opt", "xglm", "biogpt", "lfm2", "mamba2", "jamba", "bamba", "falcon_h1", "minimax", "recurrent_gemma",
    "deepseek_v4",
)  # fmt: skip
"""Whose documents of one row see each other as they are built here: `test_hf_probe` is about them."""
SLOW = (
    "olmo_hybrid",
    "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v32", "olmo3", "nemotron_h", "minimax_m2",
    "ministral", "ministral3", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe",
    *hf_folders.LIKE_LLAMA, *hf_folders.LIKE_LLAMA_ROUTED,
)  # fmt: skip


def marked(kinds: list[str]) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in kinds]


PLANNED = marked([kind for kind in hf_folders.FOLDERS if kind in HF_PLANS])
READ = marked(list(hf_folders.FOLDERS))


def built(folder: Path, **args: Any) -> Any:
    return build_model(ModelConfig(name=f"hf:{folder}", args=args, seq_len=32), vocab_size=96)


def materialized(folder: Path, **args: Any) -> Any:
    model = built(folder, **args)
    fsdp.materialize(model, "cpu", init_for(model), seed=3)
    return model.eval()


@pytest.mark.parametrize("kind", READ)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / kind, kind)
    model = materialized(folder)
    import_hf(folder, model, names=model.own_family.load_hf().key_map)
    reference = hf_folders.auto_class(kind).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = reference(ids, use_cache=False).logits
        assert want.std() > 0.2
        # float32: experts are added in another order, and scores are scaled before the product
        torch.testing.assert_close(model(ids), want, atol=1e-5, rtol=0)
        if kind in ALONE:
            return
        positions = torch.cat([torch.arange(10), torch.arange(22)]).expand(2, -1)
        apart = torch.cat([reference(part, use_cache=False).logits for part in (ids[:, :10], ids[:, 10:])], dim=1)
        cu_seqlens = torch.tensor([[0, 10, 32]] * 2, dtype=torch.int32)
        got = model(ids, positions=positions, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(got, apart, atol=1e-5, rtol=0)
        assert (apart - want).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "phi3"])
def test_initial_weights_are_spread_as_transformers_draws_them(kind: str, tmp_path: Path) -> None:
    model = materialized(hf_folders.make(tmp_path / kind, kind))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
        elif parameter.ndim > 1 and parameter.numel() > 300:
            assert 0.017 < float(parameter.detach().std()) < 0.023, name  # initializer_range 0.02


@pytest.mark.parametrize("kind", PLANNED)
def test_the_table_covers_every_parameter_and_flops_see_attention(kind: str, tmp_path: Path) -> None:
    from titan_train.parallel.tensor.checks import check_tensor_parallel
    from titan_train.parallel.tensor.styles import table_for

    model = built(hf_folders.make(tmp_path / kind, kind))
    check_tensor_parallel(model, 2, table=table_for(model), seq_len_local=32, sequence_parallel=True)
    assert flops_per_token(model, 64) > flops_per_token(model, 8)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "exaone4"])
def test_a_layer_with_a_window_counts_the_tokens_that_it_sees(kind: str, tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / kind, kind)
    model, shape = built(folder), shape_of_published(kind, json.loads((Path(folder) / "config.json").read_text()))
    short, long = (flops_per_token(model, n) - shape.flops_per_token(n, causal=False) for n in (4, 64))
    assert short == long


def test_fields_of_config_json_are_changed_by_arguments(tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / "llama", "llama")
    model = built(folder, num_hidden_layers=2, **{"rope_parameters.factor": 4.0})
    assert len(model.model.layers) == 2
    assert model.config.rope_parameters["factor"] == 4.0
    assert model.args.published["num_hidden_layers"] == 2
    with pytest.raises(ValueError, match=r"num_layers=2.*no such field. Did you mean 'num_hidden_layers'"):
        built(folder, num_layers=2)
    with pytest.raises(ValueError, match=r"hidden_size='x' must be of type int, not str; the folder has 32"):
        built(folder, hidden_size="x")


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
OLDER: dict[str, dict[str, Any]] = {
    "transformers 4": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "transformers 4, plain": {"rope_theta": 5e5, "rope_scaling": None},
    "export": {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "export, plain": {
        "rope_theta": 5e5,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
}


def described(folder: Path, content: dict[str, Any], **args: Any) -> Any:
    """The model of a folder with this ``config.json``."""
    tiny = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny | content))
    return built(folder, **args)


@pytest.mark.parametrize(
    "key", ["rope_parameters.rope_theta", "rope_theta", "rope_parameters.factor", "rope_scaling.factor"]
)
@pytest.mark.parametrize("spelling", OLDER)
def test_rotary_settings_are_changed_whatever_the_spelling_of_the_folder(
    spelling: str, key: str, tmp_path: Path
) -> None:
    factor = key.endswith("factor")
    if factor and "plain" in spelling:
        return
    content = {"model_type": "llama", "max_position_embeddings": 131072} | OLDER[spelling]
    if key.startswith("rope_scaling") and "rope_scaling" not in content:
        return
    model = described(tmp_path, content, **{key: 16.0 if factor else 4e6})
    rope = model.config.rope_parameters
    want = {"rope_theta": 5e5, "factor": 16.0} if factor else {"rope_theta": 4e6}
    assert {name: rope[name] for name in want} == want
    assert rope["rope_type"] == ("default" if "plain" in spelling else "llama3")
    exported = model.own_family.load_hf().config_of(model.args)
    assert type(model.config).from_dict(exported).rope_parameters == rope


def test_both_counts_of_experts_of_an_exported_folder_are_changed(tmp_path: Path) -> None:
    content = {"model_type": "qwen3_moe", "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    for key in ("num_experts", "num_local_experts"):
        model = described(tmp_path, content | {"moe_intermediate_size": 16}, **{key: 4})
        assert model.config.num_experts == 4
        exported = model.own_family.load_hf().config_of(model.args)
        assert type(model.config).from_dict(exported).num_experts == 4


def test_only_layers_that_the_model_lacks_are_ignored(tmp_path: Path) -> None:
    """transformers ignores layers 46 and 92 of every GLM-4.5: those after the last one of Air and of the large one."""
    content = {"model_type": "glm4_moe", "n_routed_experts": 2, "moe_intermediate_size": 8, "num_key_value_heads": 2}
    for layers, ignored in ((46, {46, 92}), (48, {92})):
        with torch.device("meta"):
            names = described(tmp_path, content, num_hidden_layers=layers).own_family.load_hf().key_map
        assert {n for n in range(100) if names.ignores(f"model.layers.{n}.input_layernorm.weight")} == ignored


def test_an_argument_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    content = {"model_type": "mimo_v2_flash", "sliding_window_size": 6, "n_routed_experts": 4, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=r"model.args.sliding_window=5 changes nothing.*still 7"):
        described(tmp_path, content, sliding_window=5)
    gemma = {"model_type": "gemma3_text", "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}  # fmt: skip
    with pytest.raises(ValueError, match=r"model.args.rope_theta=4000000.0"):
        described(tmp_path, gemma, rope_theta=4e6)
    same = described(tmp_path, {"model_type": "llama", "rope_scaling": None, "rope_theta": 5e5}, attention_dropout=0.0)
    assert same.config.attention_dropout == 0.0


def test_a_balance_loss_of_experts_is_refused_in_arguments_and_said_to_be_ignored_in_a_file(tmp_path: Path) -> None:
    content = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for args in ({"router_aux_loss_coef": 0.01}, {"output_router_logits": True}):
        with pytest.raises(ValueError, match=r"model\.args\..*without a loss.*balance_loss"):
            described(tmp_path, content, **args)
    described(tmp_path, content | {"router_aux_loss_coef": 0.01}, output_router_logits=False)
    assert balance_ignored(f"hf:{tmp_path}") == []  # nor does transformers compute it
    described(tmp_path, content | {"output_router_logits": True})
    (said,) = balance_ignored(f"hf:{tmp_path}")
    assert said.startswith("output_router_logits=true in config.json")


@pytest.mark.parametrize(
    ("kind", "fields", "most"),
    [
        ("gpt2", {"n_positions": 40}, 40), ("gptj", {"rotary_dim": 4}, 40), ("opt", {"word_embed_proj_dim": 32}, 40),
        ("roberta", {"is_decoder": True, "pad_token_id": 1}, 38), ("xglm", {}, None), ("llama", {}, None),
    ],
)  # fmt: skip
def test_generation_does_not_exceed_the_positions_that_a_model_looks_up(
    kind: str, fields: dict[str, Any], most: int | None, tmp_path: Path
) -> None:
    content = {
        "model_type": kind,
        "max_position_embeddings": 40,
        "d_model": 32,
        "attention_heads": 2,
        "num_layers": 1,
        "ffn_dim": 32,
    }
    model = described(tmp_path, content | fields)
    fsdp.materialize(model, "cpu", init_for(model), seed=1)
    assert traits_of(model).max_seq_len == most
    if most is not None:
        with pytest.raises(ValueError, match=rf"need {most + 1} positions, but the model has learned {most}.*add is 2"):
            generate(model, [[5] * (most - 2)], max_new_tokens=3)
    assert len(generate(model, [[5] * ((most or 45) - 2)], max_new_tokens=2)[0]) == 2


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])  # with a plan, without one
def test_rows_beyond_the_short_factors_of_longrope_are_refused(kind: str, tmp_path: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    content = {"model_type": kind, "max_position_embeddings": 128, "rope_scaling": scaling, "num_key_value_heads": 2}
    content |= {"original_max_position_embeddings": 32, "pad_token_id": 0}
    if kind == "phimoe":
        scaling |= {"short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": 32}
        content |= {"num_local_experts": 4}
    described(tmp_path, content)
    shorter = {"original_max_position_embeddings": 16}
    content |= shorter | {"rope_scaling": scaling | (shorter if kind == "phimoe" else {})}
    with pytest.raises(ValueError, match=r"model.seq_len=32 is longer than the 16 positions.*longrope.*at most 16"):
        described(tmp_path, content)


def test_a_folder_that_is_no_decoder_of_transformers_is_refused(tmp_path: Path) -> None:
    def refused(content: Any, words: str) -> None:
        (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ValueError, match=words):
            built(tmp_path)

    with pytest.raises(ValueError, match=r"config.json does not exist"):
        built(tmp_path / "nowhere")
    refused("{", "not valid JSON")
    refused({"model_type": "t5"}, "a t5 is an encoder and a decoder")
    refused({"model_type": "vit"}, "cannot build a decoder of this vit")
    own = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('executed')")
    refused(own, "code of a folder is never executed")
    refused({"model_type": "llama", "vocab_size": 90}, "vocabulary of 90, less than the tokenizer's 96")
    refused({"model_type": "llama", "max_position_embeddings": 16}, "longer than the 16 positions")
    refused({"model_type": "llama", "attention_dropout": 0.1}, r"Set model.args.attention_dropout=0.0")
    refused({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "has bidirectional attention")
    refused({"model_type": "llama", "layer_types": ["full_attention"]}, "LlamaConfig does not take config.json")
    refused({"model_type": "llama", "hidden_size": "64"}, "LlamaConfig does not take config.json")
    refused({"model_type": "llama", "is_causal": False}, "has bidirectional attention")
    tiny = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    refused({"model_type": "bert"} | tiny, r"has is_decoder=False.*Set model.args.is_decoder=true")


def test_the_models_that_also_see_whose_decoder_is_of_text_alone_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers
    from titan_train.models.hf.folder import TEXT_ALONE, read_published
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = {kind: transformers.CONFIG_MAPPING[kind] for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    texts = {kind: (config, config.sub_configs["text_config"]) for kind, config in kinds.items()
             if "text_config" in (config.sub_configs or {})}  # fmt: skip
    decoders = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    found = [kind for kind, (config, text) in texts.items() if decoders[config].config_class is text]
    assert sorted(found) == list(TEXT_ALONE)
    whole = {
        "model_type": "llama4",
        "tie_word_embeddings": True,
        "eos_token_id": [1, 2],
        "text_config": {"eos_token_id": 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    alone = {"model_type": "llama4_text", "tie_word_embeddings": True, "eos_token_id": 3}
    assert read_published(f"hf:{tmp_path}") == alone


def test_arguments_of_a_model_that_also_sees_may_have_their_names_in_the_whole_file(tmp_path: Path) -> None:
    content = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 32, "vocab_size": 96, "layer_types": ["full_attention"] * 2, "architectures": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": content}))
    args = {
        "text_config.intermediate_size": 48,
        "text_config.rope_parameters.rope_theta": 5e4,
        "text_config.head_dim": 16,
    }
    model = built(tmp_path, **args)
    assert (model.config.intermediate_size, model.config.rope_parameters["rope_theta"]) == (48, 5e4)
    assert model.published["architectures"] == ["Qwen3_5ForCausalLM"]


def test_an_encoder_becomes_a_decoder_by_its_field(tmp_path: Path) -> None:
    tiny = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"} | tiny))
    model = materialized(tmp_path, is_decoder=True)
    ids = torch.arange(16)[None] + 1
    with torch.no_grad():
        changed = model(ids) - model(torch.cat([ids[:, :8], ids[:, 8:] + 40], dim=1))
    assert not changed[:, :8].any()
    assert changed[:, 8:].any()


def test_an_older_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folders.make(tmp_path / "llama", "llama")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    with pytest.raises(ValueError, match=r"needs transformers 5 or newer, and 4.57.1 is installed"):
        built(folder)


def test_a_described_model_keeps_the_share_of_channels_that_it_rotates(tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / "gpt_neox", "gpt_neox")
    published = json.loads((folder / "config.json").read_text())
    assert published["rope_parameters"]["partial_rotary_factor"] == 0.5  # the class's own default is 0.25
    model = built(folder)
    described = model.own_family.load_hf().config_of(model.args)
    assert type(model.config).from_dict(described).rope_parameters == model.config.rope_parameters
    assert described["rotary_pct"] == 0.5  # where transformers 4 reads it
