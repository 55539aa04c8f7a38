"""A run's exported folder is read by transformers without code of ours, and the gate refuses one that computes otherwise."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported_runs import trained
from safetensors.torch import load_file, save_file
from titan_train.cli import main
from titan_train.export import job as export_module
from titan_train.export.hf_folder import generation_config, hf_config
from titan_train.export.hf_model import HfModel
from titan_train.export.run import export_run
from titan_train.generation import LoadedRun, Sampling, load_run
from titan_train.models.llama import LLAMA_FAMILY
from titan_train.models.registry import families
from titan_train.serve.folder import load_served
from titan_train.tokenizers import ChatTemplate
from titan_train.tokenizers.chat_template import BUILT_IN

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

MODELS = {
    "llama3_debug": {"rope_factor": 8.0, "rope_original_seq_len": 16, "tied_embeddings": True},
    "gpt_debug": {},
    "qwen3_debug": {"rope_theta": 5000.0},
    "qwen3_moe_debug": {},
    "deepseek_debug": {"rope_factor": 4.0, "rope_original_seq_len": 16},
}
CLASSES = {
    "llama3_debug": "LlamaForCausalLM", "gpt_debug": "GPT2LMHeadModel", "qwen3_debug": "Qwen3ForCausalLM",
    "qwen3_moe_debug": "Qwen3MoeForCausalLM", "deepseek_debug": "DeepseekV3ForCausalLM",
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_what_the_run_computes(name: str, folder: Path, tmp_path: Path) -> None:
    run_dir = trained(folder, name, **MODELS[name])
    checks = export_run(run_dir, tmp_path / "model", dtype="fp32", max_shard_bytes=100_000)["hf"]
    assert [check.name for check in checks] == [
        "largest difference of a logit", "same most likely token", "48 greedy tokens", "token ids"
    ]  # fmt: skip
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "README.md",
    } <= files
    assert len([file for file in files if file.endswith(".safetensors")]) > 1
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == [CLASSES[name]]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    tied = config["tie_word_embeddings"]
    assert ("lm_head.weight" in index["weight_map"]) == (not tied)

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == CLASSES[name]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = load_run(run_dir, device="cpu").model
    tokens = torch.randint(259, (2, 50))
    with torch.no_grad():
        want, got = ours(tokens), model(tokens).logits
    # the sums are ordered differently: a few float32 roundings of the largest logit, as the gate's bound says
    assert (want - got).abs().max() <= 1e-5 * want.abs().max()
    assert want.std() > 0.1
    if name == "gpt_debug":
        sampling = Sampling(temperature=0.9, top_p=0.9)
        texts = [
            x.complete("def f(", max_new_tokens=12, sampling=sampling)
            for x in (load_run(run_dir), load_served(tmp_path / "model"))
        ]
        assert texts[0] == texts[1]
        loaded = HfModel(tmp_path / "model")
        for ask in (
            lambda: loaded.logits(torch.zeros(1, 513, dtype=torch.int64)),
            lambda: loaded.greedy([1] * 500, 14),
        ):
            with pytest.raises(ValueError, match="513 positions are needed, but the model has learned 512"):
                ask()


def test_the_token_that_ends_an_answer_is_exported(loaded_run: Callable[..., LoadedRun]) -> None:
    run = loaded_run("gpt_debug")
    bos, eos, pad = run.tokenizer.bos_id, run.tokenizer.eos_id, run.tokenizer.pad_id
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    for source in (BUILT_IN["plain"], BUILT_IN["chatml"]):
        found = generation_config(dataclasses.replace(run, template=ChatTemplate.of(run.tokenizer, source)))
        assert found == {"_from_model_config": True, **ids}
    template = ChatTemplate.of(run.tokenizer, BUILT_IN["chatml"].replace("<|im_end|>", "<pad>"))
    found = generation_config(dataclasses.replace(run, template=template))
    assert found == {**ids, "eos_token_id": [eos, pad]}


@pytest.mark.parametrize("name", sorted(name for name, family in families().items() if family.hf))
def test_arguments_survive_config_json(name: str) -> None:
    family = families()[name]
    hf = family.load_hf()
    for args in family.configs.values():
        config = json.loads(json.dumps(hf.config_of(args))) | {"max_position_embeddings": 4096}
        assert hf.settings_of(hf.args_from(config)) == hf.settings_of(args)


def test_a_folder_that_computes_something_else_is_not_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = trained(folder, "llama3_debug", **MODELS["llama3_debug"])
    hf = LLAMA_FAMILY.load_hf()

    def without_scaling(args: object) -> dict[str, object]:
        return hf.config_of(args) | {
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        }

    wrong = dataclasses.replace(hf, config_of=without_scaling)
    monkeypatch.setattr(export_module, "family_of", lambda model: LLAMA_FAMILY)
    monkeypatch.setattr("titan_train.models.llama.hf.LLAMA_HF", wrong)
    with pytest.raises(ValueError, match="does not compute what the run's model computes"):
        export_run(run_dir, tmp_path / "model", dtype="fp32")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_table_and_refuses_an_existing_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = trained(folder, "gpt_debug")
    assert main(["export", str(run_dir), "--to", "hf", "--out", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert "| token ids | 17 of 17 texts equal | all | passed |" in out
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert "17 of 17 texts equal" in (tmp_path / "model" / "README.md").read_text()
    assert main(["export", str(run_dir), "--out", str(tmp_path / "model")]) == 2
    assert "exists. Export to a new folder" in capsys.readouterr().err


@pytest.mark.timeout(900)
def test_adapters_are_merged_before_their_weights_are_rounded(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=256,
    )  # fmt: skip
    base = tmp_path / "base"
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    model = {"init": f"hf:{base}", "lora_rank": 4}
    run_dir = trained(folder, f"hf:{base}", run="lora", model=model)
    checks = export_run(run_dir, tmp_path / "model", to=["hf", "dcp"], dtype="bf16")
    for target in ("hf", "dcp"):
        assert [check.passed for check in checks[target]] == [True] * 4
        assert checks[target][2].measured == "3 of 3 prompts equal"
    adapter = tmp_path / "model" / "hf" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model" / "hf").state_dict()
    adapted = load_run(run_dir, device="cpu").model
    name = "model.layers.0.self_attn.q_proj"
    layer = adapted.get_submodule(name)
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    want = layer.base_layer.weight + delta
    # one rounding to bfloat16, half a unit in its 8 bits, of a sum that float32 orders another way
    assert ((merged[f"{name}.weight"].float() - want).abs() <= 2**-8 * want.abs()).all()
    assert delta.abs().max() > 0


def published(folder: Path, kind: str) -> Path:
    return hf_folders.make(folder, kind, vocab_size=264)


@pytest.mark.parametrize(
    "kind", ["qwen3_5_moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5", "llama4"))]
)
def test_the_decoder_of_a_model_that_also_sees_is_trained_and_exported_alone(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    base = hf_folders.make_seeing(tmp_path / "base", kind, vocab_size=264)
    run_dir = trained(folder, f"hf:{base}", run=kind, steps=0, model={"seq_len": 32, "init": f"hf:{base}"})
    own_tokenizer = kind == "qwen3_5_moe"  # which transformers gives it whatever the files say
    checks = export_run(run_dir, tmp_path / "model", dtype="fp32", gate=not own_tokenizer)["hf"]
    assert all(check.passed for check in checks)
    theirs, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (base, tmp_path / "model")
    )
    assert ours.config.model_type == f"{kind}_text"
    assert ours.config.architectures == [type(theirs).__name__]
    want, got = theirs.state_dict(), ours.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("kind", ["glm4_moe", "ernie4_5_moe"])  # a buffer there, a parameter here
def test_routing_biases_of_a_published_folder_stay_float32(kind: str, folder: Path, tmp_path: Path) -> None:
    base = published(tmp_path / "base", kind)
    tensors = load_file(base / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    torch.manual_seed(0)
    tensors |= {
        name: 8 + 0.001 * torch.randn_like(tensors[name]) for name in biases
    }  # as trained ones: large and close
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    run_dir = trained(folder, f"hf:{base}", run=kind, steps=0, model={"init": f"hf:{base}"})
    checks = export_run(run_dir, tmp_path / "model", dtype="bf16")["hf"]
    assert all(check.passed for check in checks)
    got = load_file(tmp_path / "model" / "model.safetensors")
    assert biases
    assert all(got[name].dtype == torch.float32 and torch.equal(got[name], tensors[name]) for name in biases)
    assert got["lm_head.weight"].dtype == torch.bfloat16


def test_a_base_that_also_brings_code_of_its_own_is_exported_without(folder: Path, tmp_path: Path) -> None:
    base = published(tmp_path / "base", "llama")
    written = json.loads((base / "config.json").read_text())
    written["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (base / "config.json").write_text(json.dumps(written))
    (base / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    run_dir = trained(folder, f"hf:{base}", run="code", steps=0, model={"init": f"hf:{base}"})
    checks = export_run(run_dir, tmp_path / "model", dtype="fp32")["hf"]
    assert all(check.passed for check in checks)
    assert "auto_map" not in json.loads((tmp_path / "model" / "config.json").read_text())
    assert type(HfModel(base).module).__module__.startswith("transformers.")  # of an architecture that transformers has
    assert not (tmp_path / "marker").exists()


def test_ids_of_an_export_are_those_of_tokenizer_json_whatever_class_it_was_published_with(
    folder: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "\u2581a",
        "\u2581\u2581",
    ]
    merges = [("\u2581", "\u2581"), ("\u2581", "a")]
    vocab = {name: number for number, name in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(pieces[:3])
    made.save(str(tmp_path / "tokenizer.json"))
    given = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    kind = {"kind": "hf", "path": str(tmp_path)}
    run_dir = trained(folder, "llama3_debug", run="llama2", steps=0, tokenizer=kind)
    assert all(check.passed for check in export_run(run_dir, tmp_path / "model", dtype="fp32")["hf"])


def test_every_token_that_ends_a_text_of_the_folder_ends_one_of_the_run_and_its_export(
    folder: Path, tmp_path: Path
) -> None:
    base = published(tmp_path / "base", "llama")
    (base / "generation_config.json").write_text('{"eos_token_id": [7, 257]}')
    run_dir = trained(folder, f"hf:{base}", run="ends", steps=0, model={"init": f"hf:{base}"})
    assert load_run(run_dir, device="cpu").stop_ids == (7, 257)
    export_run(run_dir, tmp_path / "model", dtype="fp32")
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == [257, 7]
    assert {7, 257} == {*load_served(tmp_path / "model").stop_ids}


def test_the_most_likely_tokens_of_a_folder_are_those_of_its_logits(tmp_path: Path) -> None:
    base = published(tmp_path / "base", "llama")
    asked = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "eos_token_id": 5}
    (base / "generation_config.json").write_text(json.dumps(asked))
    model, row = HfModel(base), [3, 4, 5]
    for _ in range(24):
        row.append(int(model.logits(torch.tensor([row]))[0, -1].argmax()))
    assert len({*row}) < len(row)
    assert model.greedy(row[:3], 24) == row[3:]


def test_a_model_keeps_the_positions_of_the_folder_that_it_started_from(
    loaded_run: Callable[..., LoadedRun], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 40960}')
    run = loaded_run("llama3_debug")
    for init, positions in ((f"hf:{tmp_path}", 40960), ("hf:gone", run.config.model.seq_len)):
        model = dataclasses.replace(run.config.model, init=init)
        started = dataclasses.replace(run, config=dataclasses.replace(run.config, model=model))
        assert hf_config(started, LLAMA_FAMILY, "bf16")["max_position_embeddings"] == positions


def test_a_model_that_sees_has_its_positions_where_transformers_reads_them(
    loaded_run: Callable[..., LoadedRun], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 40960}}')
    run = loaded_run("qwen3_vl_debug")
    for init, positions in ((f"hf:{tmp_path}", 40960), ("", run.config.model.seq_len)):
        model = dataclasses.replace(run.config.model, init=init)
        started = dataclasses.replace(run, config=dataclasses.replace(run.config, model=model))
        config = hf_config(started, families()["qwen3_vl"], "bf16")
        assert "max_position_embeddings" not in config
        assert transformers.Qwen3VLConfig.from_dict(config).text_config.max_position_embeddings == positions
