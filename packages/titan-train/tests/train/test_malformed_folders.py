"""A published folder that is damaged or of another model is refused by name, before a run's folder exists."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from titan_ckpt import import_hf
from titan_train.cli import main
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.models.llama.hf import LLAMA_HF

ARGS = {"num_layers": 1, "ffn_dim": 64}
WEIGHTS = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def index(folder: Path, *, second: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    weight_map = dict.fromkeys(tensors, WEIGHTS) | {"model.norm.weight": second}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def link_out(folder: Path, name: str) -> None:
    away = folder.parent / "away"
    away.mkdir()
    shutil.move(folder / name, away / name)
    (folder / name).symlink_to(away / name)


def configure(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


CASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing shard": (
        lambda f: index(f, second="model-00002-of-00002.safetensors"),
        ["missing ['model-00002-of-00002"],
    ),
    "tensor not in its shard": (
        lambda f: (rewrite(f, model__norm__weight=None), index(f, second=WEIGHTS)),
        ["norm.weight"],
    ),
    "wrong shape": (
        lambda f: rewrite(f, **{DOWN.replace(".", "__"): torch.zeros(64, 32)}),
        ["layers.0.feed_forward.w2.weight has shape [64, 32] there and [64, 64] here"],
    ),
    "extra tensor": (lambda f: rewrite(f, model__vision__weight=torch.zeros(1)), ["model.vision.weight"]),
    "missing tensor": (lambda f: rewrite(f, model__norm__weight=None), ["1 parameters are missing ['norm.weight']"]),
    "integers": (
        lambda f: rewrite(f, model__norm__weight=torch.zeros(64, dtype=torch.int32)),
        ["norm.weight is I32 there, which is not converted to torch.float32"],
    ),
    "int8 without scales": (
        lambda f: rewrite(f, **{DOWN.replace(".", "__"): torch.zeros(64, 64, dtype=torch.int8)}),
        ["feed_forward.w2.weight is I8 there"],
    ),
    "other model": (lambda f: configure(f, num_hidden_layers=2), ["num_layers=1 should be 2"]),
    "other family": (lambda f: configure(f, model_type="bert"), ["model_type='bert'"]),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json is not valid JSON"]),
    "link out of the folder": (lambda f: link_out(f, WEIGHTS), ["is a link to", "out of the folder"]),
    "empty file": (lambda f: (f / WEIGHTS).write_bytes(b""), [WEIGHTS]),
    "cut short": (lambda f: os.truncate(f / WEIGHTS, 5000), [WEIGHTS]),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ["is missing all safetensors files"]),
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    model = build_model(ModelConfig(name="llama3_debug", args=ARGS), vocab_size=259, device="cpu")
    folder = tmp_path / "published"
    folder.mkdir()
    tensors = {}
    for name, parameter in model.named_parameters():
        pair, letters = LLAMA_HF.key_map.match_native(name)
        tensors[pair.hf.format(**letters)] = torch.zeros_like(parameter.data)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LLAMA_HF.config_of(model.args)))
    return folder


def run_words(folder: Path, command: str) -> list[str]:
    config = folder / "run.toml"
    config.write_text(
        f"""
[run]
dir = "{folder / "runs"}"
name = "init"
[model]
name = "llama3_debug"
seq_len = 32
init = "hf:{folder / "published"}"
args = {{ num_layers = 1, ffn_dim = 64 }}
[tokenizer]
kind = "bytes"
[data]
cache_dir = "{folder / "cache"}"
sources = [{{ name = "text", kind = "text", paths = ["{folder / "text.txt"}"] }}]
[launch]
device = "cpu"
"""
    )
    (folder / "text.txt").write_text("some text\n" * 200)
    return [command, str(config)]


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_folder_is_refused_by_name_and_nothing_is_written(
    case: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = CASES[case]
    damage(published)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    commands = ("run",) if case in ("wrong shape", "link out of the folder") else ("check",)
    for command in commands:
        line = run_words(tmp_path, command)
        assert main(line) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
        assert str(published) in error or "config.json" in error
    after = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    assert after - set(before) <= {Path("run.toml"), Path("text.txt"), Path("cache")} | {
        path for path in after if path.parts[0] == "cache"
    }


def test_the_folder_as_published_is_accepted_and_so_is_a_cache_of_the_hub(published: Path, tmp_path: Path) -> None:
    assert main(run_words(tmp_path, "check")) == 0
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    shutil.copy(published / WEIGHTS, blobs / "1234")
    (snapshot / WEIGHTS).symlink_to(Path("..") / ".." / "blobs" / "1234")
    shutil.copy(published / "config.json", snapshot / "config.json")
    model = build_model(ModelConfig(name="llama3_debug", args=ARGS), vocab_size=259, device="cpu")
    import_hf(snapshot, model, names=LLAMA_HF.key_map)
    assert all(not parameter.any() for parameter in model.parameters())
