"""A Hugging Face folder that is not whole, or not what its ``config.json`` says, answers nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported_runs import trained
from safetensors.torch import load_file, save_file
from titan_train.cli import main
from titan_train.export.run import export_run

pytest.importorskip("transformers")
WEIGHTS = "model.safetensors"
NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    out = folder / "whole"
    if not out.exists():
        export_run(trained(folder, "llama3_debug"), out, dtype="fp32", gate=False)
    return out


def rewrite(folder: Path, name: str, value: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(name, None)
    save_file(tensors if value is None else tensors | {name: value}, folder / WEIGHTS, {"format": "pt"})


def as_dtype(folder: Path, name: str, dtype: torch.dtype) -> None:
    rewrite(folder, name, load_file(folder / WEIGHTS)[name].to(dtype))


def index(folder: Path) -> None:
    """An index that names a second file, which is not there."""
    weight_map = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS) | {NORM: "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def link_out(folder: Path, name: str) -> None:
    away = shutil.move(folder / name, folder.parent / name)
    (folder / name).symlink_to(away)


def configure(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (index, "is missing ['model-00002-of-00002.safetensors']"),
    "missing tensor": (lambda f: rewrite(f, NORM, None), f"1 tensors are missing ['{NORM}']"),
    "extra tensor": (
        lambda f: rewrite(f, "vision.weight", torch.zeros(1)),
        "1 tensors are unexpected ['vision.weight']",
    ),
    "wrong shape": (lambda f: rewrite(f, DOWN, torch.zeros(64, 8)), f"{DOWN} has shape [64, 8], not [64, 192]"),
    "integers": (lambda f: as_dtype(f, NORM, torch.int32), f"{NORM} is I32"),
    "float8 without scales": (lambda f: as_dtype(f, DOWN, torch.float8_e4m3fn), f"{DOWN} is F8_E4M3"),
    "another width": (lambda f: configure(f, hidden_size=128), "has shape [259, 64], not [259, 128]"),
    "another depth": (lambda f: configure(f, num_hidden_layers=3), "9 tensors are missing ['model.layers.2."),
    "another family": (lambda f: configure(f, model_type="bert"), "tensors are unexpected"),
    "code of its own": (
        lambda f: configure(f, model_type="own", auto_map={"AutoModelForCausalLM": "a.B"}),
        "names Python code in the folder",
    ),
    "weights elsewhere": (lambda f: link_out(f, WEIGHTS), f"{WEIGHTS} is a link to"),
    "config elsewhere": (lambda f: link_out(f, "config.json"), "config.json is a link to"),
    "empty file": (lambda f: (f / WEIGHTS).write_bytes(b""), f"{WEIGHTS} is not a safetensors file"),
    "cut short": (lambda f: os.truncate(f / WEIGHTS, 5000), f"{WEIGHTS} is not a safetensors file"),
    "empty config": (lambda f: (f / "config.json").write_bytes(b""), "config.json"),
    "empty tokenizer": (lambda f: (f / "tokenizer.json").write_bytes(b""), "cannot be used"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "is missing all safetensors files"),
}
COMMANDS = {
    "generate": ["--prompt", "def", "--temperature", "0", "--max-new-tokens", "2"],
    "eval": ["--text", "TEXT"],
    "serve": ["--port", "0"],
    "export": ["--out", "OUT"],
}


@pytest.mark.filterwarnings("ignore:.rope_scaling.:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_damaged_folder_is_refused_by_name(
    case: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = CASES[case]
    damaged = tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    damage(damaged)
    (tmp_path / "text").write_text("def f(x):\n    return x\n")
    before = sorted(tmp_path.rglob("*"))
    given = {"TEXT": str(tmp_path / "text"), "OUT": str(tmp_path / "out")}
    for command, options in COMMANDS.items():
        assert main([command, str(damaged), *(given.get(word, word) for word in options)]) == 2
        shown = capsys.readouterr()
        (error,) = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        assert str(damaged) in error
        assert (words if command in ("generate", "eval", "serve") else "is not a run's folder") in error
        assert not shown.out
    assert sorted(tmp_path.rglob("*")) == before


def test_another_floating_dtype_and_a_cache_of_the_hub_are_read(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/abc", "blobs"))
    shutil.copytree(whole, snapshot)
    as_dtype(snapshot, DOWN, torch.bfloat16)
    blobs.mkdir()
    for name in (WEIGHTS, "config.json"):
        shutil.move(snapshot / name, blobs / name)
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / name)
    assert main(["generate", str(snapshot), *COMMANDS["generate"]]) == 0
    assert capsys.readouterr().out.startswith("def")
