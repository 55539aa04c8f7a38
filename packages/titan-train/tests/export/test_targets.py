"""Every target holds what the run computes, loaded with the library of its users; the gate refuses what does not."""

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported_runs import trained
from safetensors.torch import load_file
from titan_ckpt import Checkpointer, TrainState, export_hf
from titan_train.cli import main
from titan_train.config import dump_config
from titan_train.config.model import ModelConfig
from titan_train.config.recipe import AverageConfig
from titan_train.export.aoti_folder import exported_step
from titan_train.export.gate import Exported
from titan_train.export.gguf.folder import _ARCHITECTURES, _filled, _kind, _sources, check_gguf, gguf_library
from titan_train.export.job import Job, _round_weights
from titan_train.export.load import load_exported
from titan_train.export.run import export_run
from titan_train.export.step_model import StepModel
from titan_train.generation import LoadedRun, Sampling, encode_prompt, generate, load_run, stream_text
from titan_train.models import build_model
from titan_train.models.registry import families
from titan_train.run_folder import read_config
from titan_train.serve.folder import load_served
from titan_train.tokenizers import ByteTokenizer
from titan_train.tokenizers.chat_template import BUILT_IN

DENSE = {
    "llama3_debug": {"rope_factor": 8.0, "rope_original_seq_len": 16},
    "gpt_debug": {},
    "qwen3_debug": {"rope_theta": 5000.0},
}
YARN = {"deepseek_debug": {"rope_factor": 4.0, "rope_original_seq_len": 16}}
V2 = {
    "scores": "softmax", "normalize_weights": False, "bias_rate": 0.0, "num_groups": 1, "top_groups": 1,
    "num_dense_layers": 0, "tied_embeddings": True,
}  # fmt: skip

ROWS = ["largest difference of a logit", "same most likely token", "48 greedy tokens", "token ids"]


@pytest.mark.parametrize("name", [*DENSE, "qwen3_moe_debug", "deepseek_debug"])
def test_gguf_computes_what_the_run_computes(name: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    run_dir = trained(folder, name, **(DENSE | YARN).get(name, {}))
    checks = export_run(run_dir, tmp_path / "model", to=["gguf"], dtype="fp32")["gguf"]
    assert [check.name for check in checks] == ROWS
    assert checks[2].measured == "3 of 3 prompts equal"
    if name == "gpt_debug":
        for _ in range(5):  # dropped at once
            loaded = load_exported(tmp_path / "model")
        for ask in (
            lambda: loaded.logits(torch.zeros(1, 513, dtype=torch.int64)),
            lambda: loaded.greedy([1] * 500, 14),
        ):
            with pytest.raises(ValueError, match="513 positions are needed, but the model has learned 512"):
                ask()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "dtype"), [(V2, "fp32"), (YARN["deepseek_debug"], "bf16"), (YARN["deepseek_debug"], "q8_0")]
)
def test_gguf_holds_deepseek_v2_and_narrow_weights(
    args: dict[str, object], dtype: str, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    run_dir = trained(folder, "deepseek_debug", **args)
    checks = export_run(run_dir, tmp_path / "model", to=["gguf"], dtype=dtype)["gguf"]  # type: ignore[arg-type]
    assert [check.name for check in checks] == ROWS


def test_gguf_of_a_published_folder_fills_in_what_its_file_leaves_out(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    for config in (llama, gpt2):
        base = tmp_path / config.model_type
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
        published = json.loads((base / "config.json").read_text())
        for name in ("head_dim", "num_key_value_heads", "rope_parameters", "n_inner"):  # as the first Llama and GPT-2
            published.pop(name, None)
        (base / "config.json").write_text(json.dumps(published))
        run_dir = trained(folder, f"hf:{base}", run=f"gguf-{base.name}", steps=2, model={"init": f"hf:{base}"})
        export_run(run_dir, tmp_path / f"{base.name}-gguf", to=["gguf"], dtype="fp32")


def test_gguf_leaves_out_modules_for_tokens_further_ahead(folder: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    run_dir = trained(folder, "llama3_debug", steps=0, mtp_depth=1)
    checks = export_run(run_dir, tmp_path / "model", to=["gguf"], dtype="fp32")["gguf"]
    assert all(check.passed for check in checks)
    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "model" / "model.gguf").tensors]
    assert max(int(name.split(".")[1]) for name in names if name.startswith("blk.")) == 1


def test_gguf_orders_biases_of_queries_and_keys_as_their_rows(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders

    base = hf_folders.make(tmp_path / "base", "llama", vocab_size=264, attention_bias=True)
    run_dir = trained(folder, f"hf:{base}", run="biases", steps=0, model={"init": f"hf:{base}"})
    checks = export_run(run_dir, tmp_path / "model", to=["gguf"], dtype="fp32")["gguf"]
    assert checks[2].measured == "3 of 3 prompts equal"


@pytest.mark.parametrize(
    "config", [{"model_type": "llama", "hidden_act": "gelu"}, {"model_type": "gpt2", "activation_function": "relu"}]
)
def test_gguf_refuses_an_activation_that_llama_cpp_does_not_compute(config: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"llama\.cpp computes (llama with silu|gpt2 with gelu_new), and this model has"
    ):
        check_gguf(config)
    check_gguf({"model_type": config["model_type"]})


def test_a_tokenizer_that_llama_cpp_lacks_is_refused_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    export_run(trained(folder, "gpt_debug"), tmp_path / "hf", gate=False)
    tokenizer = {"kind": "hf", "path": str(tmp_path / "hf")}
    run_dir = trained(folder, "gpt_debug", steps=2, tokenizer=tokenizer)
    monkeypatch.setattr(
        "titan_train.export.run.compute_reference", lambda *_, **__: pytest.fail("the model was loaded")
    )
    with pytest.raises(ValueError, match="tokenizers of kind hf are not written as GGUF"):
        export_run(run_dir, tmp_path / "model", to=["gguf"])


def test_experts_that_transformers_lacks_are_exported_where_no_class_of_it_is_needed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = trained(folder, "qwen3_moe_debug", num_shared_experts=1)
    checks = export_run(run_dir, tmp_path / "dcp", to=["dcp"], dtype="fp32")["dcp"]
    assert all(check.passed for check in checks)
    monkeypatch.setattr(
        "titan_train.export.run.compute_reference", lambda *_, **__: pytest.fail("the model was loaded")
    )
    with pytest.raises(ValueError, match="does not compute num_shared_experts=1"):
        export_run(run_dir, tmp_path / "hf", to=["hf"])


def test_gguf_of_a_chat_run_holds_its_template_and_the_token_that_ends_an_answer(folder: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    source = BUILT_IN["chatml"].replace("<|im_end|>", "<pad>")
    (tmp_path / "template.jinja").write_text(source)
    tokenizer = {"kind": "bytes", "chat_template": str(tmp_path / "template.jinja")}
    run_dir = trained(folder, "llama3_debug", run="chat", steps=0, tokenizer=tokenizer)
    checks = export_run(run_dir, tmp_path / "model", to=["gguf"], dtype="fp32")["gguf"]
    assert all(check.passed for check in checks)
    fields = gguf.GGUFReader(tmp_path / "model" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == source
    assert (fields["tokenizer.ggml.eos_token_id"].contents(), fields["tokenizer.ggml.eot_token_id"].contents()) == (
        257,
        258,
    )


@pytest.mark.parametrize("dtype", ["bf16", "q8_0"])
def test_gguf_holds_narrow_weights(dtype: str, folder: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    run_dir = trained(folder, "llama3_debug", **DENSE["llama3_debug"])
    checks = export_run(run_dir, tmp_path / "model", to=["gguf"], dtype=dtype)["gguf"]
    assert checks[0].passed
    reader = gguf.GGUFReader(tmp_path / "model" / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == {"bf16": "BF16", "q8_0": "Q8_0"}[dtype]
    assert kinds["blk.0.ffn_norm.weight"] == kinds["rope_freqs.weight"] == "F32"


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "deepseek_v3"])
def test_values_of_a_model_of_transformers_are_rounded_as_gguf_stores_them(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders

    dense = {"mlp_only_layers": []} if kind == "qwen3_moe" else {}  # llama.cpp has no name for a dense layer of it
    base = hf_folders.make(tmp_path / "base", kind, num_hidden_layers=2, **dense)
    model: Any = build_model(ModelConfig(name=f"hf:{base}", seq_len=32), vocab_size=96, device="cpu").requires_grad_(
        False
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    run: Any = SimpleNamespace(model=model)
    _round_weights(model, Job(run=run, step=base, name="", dtype="q8_0", max_shard_bytes=1, load=run))
    names = model.own_family.load_hf()
    with Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(1, TrainState(model=model, rng=False))
        export_hf(checkpointer.path(1), tmp_path / "rounded", names=names.key_map, config=names.config_of(model.args))
    gguf = gguf_library()
    config = _filled(json.loads((tmp_path / "rounded" / "config.json").read_text()))
    for key, source in _sources(tmp_path / "rounded", config, _ARCHITECTURES[config["model_type"]]):
        values = source.read().float()
        stored = _kind(gguf, key, source, "q8_0")
        read = gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), stored), stored)
        torch.testing.assert_close(torch.from_numpy(read), values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe_debug", "deepseek_debug"])
def test_the_step_function_of_a_mixture_of_experts_computes_the_model(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name), vocab_size=97, device="cpu").requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.1)
    tokens = torch.randint(97, (2, 12))
    want = model(tokens)
    stepped = StepModel(copy.deepcopy(model))
    positions = torch.arange(12).expand(2, -1)
    got, caches = stepped(tokens[:, :9], positions[:, :9], stepped.shape.empty(2, 12))
    assert (got - want[:, :9]).abs().max() <= 1e-5 * want.abs().max()  # the gate's float32 sums, in another order
    for at in range(9, 12):
        got, caches = stepped(tokens[:, at : at + 1], positions[:, at : at + 1], caches)
        assert (got[:, 0] - want[:, at]).abs().max() <= 1e-5 * want.abs().max()


SLOW_ONNX = ("llama3_debug", "qwen3_debug", "qwen3_moe_debug", "deepseek_debug")


@pytest.mark.parametrize("name", ["gpt_debug", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_ONNX)])
def test_onnx_computes_what_the_run_computes(name: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    begun = {"add_bos": True} if name == "gpt_debug" else None  # the example begins a text so too
    run_dir = trained(folder, name, data=begun, **(DENSE | YARN).get(name, {}))
    checks = export_run(run_dir, tmp_path / "model", to=["onnx"], dtype="fp32")["onnx"]
    assert [check.name for check in checks] == ROWS
    loaded = load_exported(tmp_path / "model")
    ours = load_run(run_dir, device="cpu").model
    for shape in ((1, 1), (1, 7), (4, 33)):  # none of them traced
        tokens = torch.randint(259, shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            want = ours(tokens)
        got = loaded.logits(tokens)
        assert got is not None
        assert (want - got).abs().max() <= 1e-5 * want.abs().max()
    padded_rows_continue_as_alone(loaded, ours)
    if begun:  # a tokenizer that also ends texts must not end the prompt
        end_texts(tmp_path / "model" / "tokenizer.json")
    example = [sys.executable, tmp_path / "model" / "generate.py", "def f("]
    written = subprocess.run(
        example, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    run = load_run(run_dir, device="cpu")
    (new,) = generate(run.model, [encode_prompt(run, "def f(")], max_new_tokens=40)
    assert written.stdout.rstrip("\n") == "def f(" + run.tokenizer.decode(new).rstrip("\n")
    answers_as_the_run(tmp_path / "model", run)
    if name == "gpt_debug":
        with pytest.raises(ValueError, match="600 positions are needed, but the model has learned 512"):
            loaded.logits(torch.zeros(1, 600, dtype=torch.int64))


def end_texts(file: Path) -> None:
    """Make a ``tokenizer.json`` put a special token behind a text too."""
    content = json.loads(file.read_text())
    begins = content["post_processor"]
    begins["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    begins["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [257], "tokens": ["<eos>"]}
    file.write_text(json.dumps(content))


def test_a_run_that_asked_for_a_first_token_that_its_tokenizer_lacks_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = trained(folder, "gpt_debug", data={"add_bos": True})
    assert load_run(run_dir, device="meta").begin_ids == (256,)
    monkeypatch.setattr(ByteTokenizer, "bos_id", None)  # as a run of prepared tokens may have one
    assert load_run(run_dir, device="meta").begin_ids == ()


def answers_as_the_run(folder: Path, run) -> None:
    """What `titan-train serve` continues with an exported folder: rows of a batch, sampled, with the run's own draws."""
    pieces = {}
    for loaded in (run, load_served(folder)):
        prompts = [loaded.tokenizer.encode(text).tolist() for text in ("def f(", "x")]
        options = {"max_new_tokens": 12, "sampling": Sampling(temperature=0.9, top_p=0.9), "seeds": [3, 4]}
        rows = ["", ""]
        for piece in stream_text(loaded, prompts, **options):
            rows[piece.row] += piece.text
        pieces[id(loaded)] = rows
    first, second = pieces.values()
    assert first == second


def padded_rows_continue_as_alone(exported, model) -> None:
    """As Optimum feeds a batch: names, padding on the left, a cache that begins empty and grows."""
    inputs = {entry.name: entry.shape for entry in exported._session.get_inputs()}
    names = [f"past_key_values.{layer}.{kind}" for layer in range(len(model.layers)) for kind in ("key", "value")]
    assert list(inputs) == ["input_ids", "attention_mask", "position_ids", *names]
    assert inputs["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert inputs["past_key_values.1.value"][0::2] == ["batch_size", "past_sequence_length"]
    outputs = [entry.name for entry in exported._session.get_outputs()]
    assert outputs == ["logits", *(name.replace("past_key_values", "present") for name in names)]

    text = torch.randint(259, (1, 6), generator=torch.Generator().manual_seed(2))
    rows = torch.cat([torch.zeros(1, 3, dtype=torch.int64), text], 1).expand(2, -1).clone()
    rows[1] = torch.arange(9)
    mask, past = torch.ones_like(rows), [cache.numpy() for cache in exported.begin(2, 0)]
    mask[0, :3] = 0
    places, found = (mask.cumsum(1) - 1).clamp(min=0), []
    for part in (slice(0, 7), slice(7, 8), slice(8, 9)):
        fed = [rows[:, part], mask[:, : part.stop], places[:, part]]
        logits, *past = exported._session.run(None, dict(zip(inputs, [*(x.numpy() for x in fed), *past], strict=True)))
        found.append(torch.from_numpy(logits))
    with torch.no_grad():
        want = model(text)
    # the gate's float32 sums, in another order
    assert (torch.cat(found, 1)[:1, 3:] - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("tokens", [3, 1])
def test_a_step_has_a_graph_of_any_size(folder: Path, tokens: int) -> None:
    stepped = StepModel(load_run(trained(folder, "llama3_debug"), device="cpu").model).eval()
    program, (_, _, caches) = exported_step(stepped, tokens)
    with torch.no_grad():
        text, at = torch.arange(5 * tokens).view(5, tokens), torch.arange(tokens).expand(5, -1).contiguous()
        empty = stepped.shape.empty(5, 23)
        got, _ = program.module()(text, at, [cache.clone() for cache in empty])
        assert torch.equal(got, stepped(text, at, empty)[0])
    assert len(caches) == len(empty)


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiled twice
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_package_of_a_mixture_of_experts_computes_what_the_run_computes(folder: Path, tmp_path: Path) -> None:
    run_dir = trained(folder, "qwen3_moe_debug")
    checks = export_run(run_dir, tmp_path / "model", to=["aoti"], dtype="fp32")["aoti"]
    assert [check.name for check in checks] == ROWS
    assert json.loads((tmp_path / "model" / "export.json").read_text())["seq_len"] == 64  # what `eval` reads at once


def test_dcp_is_read_by_torch(folder: Path, tmp_path: Path) -> None:
    run_dir = trained(folder, "qwen3_moe_debug")
    checks = export_run(run_dir, tmp_path / "model", to=["dcp"], dtype="fp32")["dcp"]
    assert [check.name for check in checks] == ROWS
    assert checks[0].measured == "0.0e+00"
    import torch.distributed.checkpoint as dcp

    model = load_run(run_dir, device="cpu").model
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    dcp.load({"model": state}, checkpoint_id=tmp_path / "model", no_dist=True)
    assert all(torch.equal(state[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "name",
    ["llama3_debug", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe_debug", "deepseek_debug"))],
)
def test_float8_folders_are_read_by_transformers(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    run_dir = trained(folder, name, **DENSE.get(name, {}))
    from transformers.quantizers import quantizer_finegrained_fp8 as quantizer

    # as on a machine with an H100, where transformers itself would keep them in float8
    gpu = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0))
    monkeypatch.setattr(quantizer, "torch", SimpleNamespace(**vars(torch) | {"cuda": gpu}))
    checks = export_run(run_dir, tmp_path / "model", dtype="float8")["hf"]
    assert [check.name for check in checks] == ROWS
    from safetensors import safe_open

    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        weight = next(name for name in sorted(names) if name.endswith("o_proj.weight"))
        assert file.get_slice(weight).get_dtype() == "F8_E4M3"
        assert file.get_slice(weight + "_scale_inv").get_dtype() == "F32"
        if name == "llama3_debug":  # 192 is no multiple of 128: readers would take its blocks for 96 x 96
            assert file.get_slice("model.layers.0.mlp.up_proj.weight").get_dtype() == "BF16"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    assert quantization["ignored_layers"] == quantization["modules_to_not_convert"]


def test_several_targets_are_folders_side_by_side_and_one_failure_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = trained(folder, "qwen3_debug", **DENSE["qwen3_debug"])
    command = ["export", str(run_dir), "--to", "dcp,hf", "--out", str(tmp_path / "both")]
    assert main(command) == 0
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["dcp", "hf"]
    assert capsys.readouterr().out.count("| token ids | 17 of 17 texts equal | all | passed |") == 2
    for target in ("dcp", "hf"):
        parity = json.loads((tmp_path / "both" / target / "parity.json").read_text())
        assert parity["target"] == target
        assert all(check["passed"] for check in parity["checks"])

    class Off:
        """Another model's answers."""

        def __init__(self, exported: Exported) -> None:
            self.exported = exported
            self.greedy = exported.greedy
            self.ids = exported.ids

        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            found = self.exported.logits(tokens)
            assert found is not None
            return found * 1.001

    monkeypatch.setattr("titan_train.export.run.read_exported", lambda path: Off(load_exported(path)))
    command[-1] = str(tmp_path / "again")
    assert main(command) == 2
    assert "does not compute what the run's model computes (largest difference" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both"]


@pytest.mark.parametrize("averaged", [False, True])
def test_targets_of_a_run_that_goes_on_are_of_one_step(
    averaged: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    run_dir = shutil.copytree(trained(folder, "llama3_debug"), tmp_path / "run")
    if averaged:
        config = replace(read_config(run_dir), average=AverageConfig(use="checkpoints", checkpoints=2))
        (run_dir / "config.toml").write_text(dump_config(config))
    model = load_run(run_dir, device="cpu").model.requires_grad_(True)

    def train() -> None:
        with torch.no_grad(), Checkpointer(run_dir / "checkpoints", keep_last=3) as checkpointer:
            for parameter in model.parameters():
                parameter.mul_(2)
            checkpointer.save(checkpointer.steps()[-1] + 1, TrainState(model=model, rng=False))

    def loads(*args: Any, **options: Any) -> LoadedRun:
        found = load_run(*args, **options)
        train()
        return found

    written: list[torch.Tensor] = []

    def writes(path: Path, model: Any, **_: object) -> None:
        path.mkdir()
        written.append(model.tok_embeddings.weight.detach().clone())

    train()
    monkeypatch.setattr("titan_train.export.run.load_run", loads)
    monkeypatch.setattr("titan_train.export.onnx_folder.write_onnx", writes)
    export_run(run_dir, tmp_path / "model", to=["hf", "onnx"], dtype="fp32", gate=False)
    stored = load_file(tmp_path / "model" / "hf" / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], written[0])


def test_of_two_exports_at_once_the_first_one_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = trained(folder, "gpt_debug")
    out = tmp_path / "model"

    def other_ends_first(*args: object, **kwargs: object) -> str:
        out.mkdir()
        (out / "theirs").touch()
        return "card"

    monkeypatch.setattr("titan_train.export.run.model_card", other_ends_first)
    with pytest.raises(ValueError, match="has appeared meanwhile"):
        export_run(run_dir, out, gate=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "theirs"]


@pytest.mark.parametrize(
    ("name", "to", "dtype", "words"),
    [
        ("qwen3_debug", ["hf", "tf"], "bf16", "--to hf,tf is not a list of targets"),
        ("qwen3_debug", ["hf", "onnx"], "float8", "--dtype float8 is for --to hf alone"),
        ("gpt_debug", ["hf"], "float8", "know no matrix of this model as float8"),
    ],
)
def test_what_a_target_cannot_hold_is_refused_before_anything_is_written(
    name: str, to: list[str], dtype: str, words: str, folder: Path, tmp_path: Path
) -> None:
    run_dir = trained(folder, name, **DENSE.get(name, {}))
    with pytest.raises(ValueError, match=words):
        export_run(run_dir, tmp_path / "model", to=to, dtype=dtype)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3_text"}, "models of type gemma3_text are not written as GGUF"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "always normalizes the weights"),
        ({"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn"}}, "stretched as yarn are not written for qwen3"),
        ({"n_shared_experts": 0}, "always has shared experts"),
        ({"q_lora_rank": None}, "only if they have 27 layers, and this one has 3"),
        ({"rms_norm_eps": 1e-5}, "norms latents with rms_norm_eps=1e-05 too"),
        ({"model_type": "deepseek_v2", "n_group": 4}, "scores a group of experts by its best two"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(changes: dict[str, object], words: str) -> None:
    args = families()["deepseek"].configs["deepseek_debug"]
    with pytest.raises(ValueError, match=words):
        check_gguf(families()["deepseek"].load_hf().config_of(args) | changes)


_WATCHED = """
import sys, threading, time
from pathlib import Path
from titan_train.export.run import export_run
from titan_train.export.step_model import StepModel
import gguf.quants, torch.distributed.checkpoint

def taken():  # memory that is no file's
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

peak = before = taken()
def watch():
    global peak
    while True:
        peak = max(peak, taken())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
export_run(Path(sys.argv[1]), Path(sys.argv[2]), to=["hf", "gguf", "dcp"], dtype="bf16", gate=False)
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_export_without_the_gate_never_holds_the_model(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    run_dir = trained(folder, "llama3_debug", **DENSE["llama3_debug"])
    large = tmp_path / "large"
    shutil.copytree(run_dir, large, ignore=shutil.ignore_patterns("checkpoints"))
    config = (large / "config.toml").read_text()
    (large / "config.toml").write_text(config.replace("[model.args]", "[model.args]\ndim = 1024\nnum_layers = 24"))
    loaded = load_run_without_weights(large)
    with Checkpointer(large / "checkpoints") as checkpointer:
        checkpointer.save(6, TrainState(model=loaded, rng=False))
    size = sum(parameter.numel() * 4 for parameter in loaded.parameters())
    assert size > 300_000_000
    command = [sys.executable, "-c", _WATCHED, str(large), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert sum(file.stat().st_size for file in (tmp_path / "out").rglob("*")) > 3 * size // 2  # three times in bfloat16
    assert int(done.stdout) < size / 4  # buffers, code and metadata; the model in bfloat16 would be size / 2


def load_run_without_weights(run_dir: Path) -> torch.nn.Module:
    return build_model(read_config(run_dir).model, vocab_size=259, device="cpu")
