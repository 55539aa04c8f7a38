"""Folders whose weights are quantized: gpt-oss' experts in MXFP4 come in exactly, and what is not read is refused by name."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.train.warm_start import check_init

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
PARALLEL = Path(__file__).parents[1] / "parallel"


def publish(folder: Path) -> None:
    """A small gpt-oss whose experts have random codes: a folder in MXFP4, and beside it what transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outer, inner // 32), dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "plain" / "model.safetensors", {"format": "pt"})
    (folder / "mxfp4").mkdir()
    published = json.loads((folder / "plain" / "config.json").read_text())
    published["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "mxfp4" / "config.json").write_text(json.dumps(published))
    rest = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in packed}
    codes = {name: tensor for name, tensor in packed.items() if name.endswith("_blocks")}
    files = {  # blocks and their exponents in different files
        "model-00001-of-00002.safetensors": codes,
        "model-00002-of-00002.safetensors": rest | {name: packed[name] for name in packed if name not in codes},
    }
    for file, content in files.items():
        save_file(content, folder / "mxfp4" / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, content in files.items() for name in content}}
    (folder / "mxfp4" / "model.safetensors.index.json").write_text(json.dumps(index))


def settings(folder: Path, which: str, layout: dict[str, Any]) -> Any:
    sys.path.insert(0, str(PARALLEL))
    import composition

    name = f"hf:{folder / which}"
    model = {"model": {"name": name, "init": name, "seq_len": 32, "args": {}}, "train": {"steps": 2, "microbatch": 2}}
    return parse_config(composition.tree(folder, "run", composition.joined(model, layout)))


def train(folder: Path, which: str, layout: dict[str, Any]) -> list[float]:
    from titan_train.train import Trainer

    with Trainer(settings(folder, which, layout), folder / f"run {which}") as trainer:
        trainer.fit(until=2)
        trainer.save()
        return trainer.losses


def prepare(folder: Path) -> None:
    sys.path.insert(0, str(PARALLEL))
    import composition

    composition.prepare(folder)


def test_experts_in_mxfp4_train_as_those_that_transformers_dequantizes(tmp_path: Path) -> None:
    publish(tmp_path)
    run_ranks(prepare, 1, tmp_path, init=False)
    plain = run_ranks(train, 1, tmp_path, "plain", {}, init=False)[0]
    assert run_ranks(train, 1, tmp_path, "mxfp4", {}, init=False)[0] == plain
    shutil.rmtree(tmp_path / "run mxfp4")
    over_two = run_ranks(train, 2, tmp_path, "mxfp4", {"parallel": {"ep": 2}})
    assert over_two[0] == pytest.approx(plain, abs=1e-5)

    from titan_train.export.run import export_run

    export_run(tmp_path / "run mxfp4", tmp_path / "out", to=("hf",))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.isfinite(model(torch.arange(24)[None]).logits).all()


def test_a_folder_quantized_in_another_way_is_refused_by_its_name(tmp_path: Path) -> None:
    publish(tmp_path)
    file, config = tmp_path / "plain" / "model.safetensors", tmp_path / "plain" / "config.json"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj"
    tensors |= {f"{name}.qweight": torch.zeros(8, 64, dtype=torch.int32), f"{name}.scales": torch.ones(1, 64)}
    save_file({key: value for key, value in tensors.items() if key != f"{name}.weight"}, file, {"format": "pt"})
    published = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    config.write_text(json.dumps(published))
    given = ModelConfig(name=f"hf:{tmp_path / 'plain'}", init=f"hf:{tmp_path / 'plain'}")
    with torch.device("meta"):
        model = build_model(given, vocab_size=259)
    with pytest.raises(ValueError, match=r"quantized by 'gptq'.*not read here: 1 parameters have no tensor.*q_proj"):
        check_init(given.init, model, given)


def test_an_exported_folder_in_mxfp4_asks_for_no_kernels_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_train.export.hf_model import HfModel
    from transformers.integrations import hub_kernels
    from transformers.quantizers import quantizer_mxfp4 as quantizer

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("asks a hub for kernels")

    publish(tmp_path)
    gpu = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0), empty_cache=lambda: None)
    monkeypatch.setattr(quantizer, "torch", SimpleNamespace(**vars(torch) | {"cuda": gpu}))
    monkeypatch.setattr(quantizer, "is_kernels_available", lambda: True)
    monkeypatch.setattr(quantizer, "is_triton_available", lambda _: True)
    monkeypatch.setattr(quantizer, "get_current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(hub_kernels, "get_kernel", refuse)
    tokens = torch.arange(24)[None]
    assert torch.equal(HfModel(tmp_path / "mxfp4").logits(tokens), HfModel(tmp_path / "plain").logits(tokens))

    config = tmp_path / "plain" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "eetq"}}))
    with pytest.raises(ValueError, match="quantized by 'eetq'"):
        HfModel(tmp_path / "plain")
