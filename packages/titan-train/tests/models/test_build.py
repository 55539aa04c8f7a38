"""Models by name and by dotted path, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.trust import use_code
from torch import nn

OWN_MODULE = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

def build(width: int = 8) -> nn.Module:
    return Tiny(width, 50)

def anything(**kwargs) -> "nn.Module":
    return Tiny(**kwargs)

def not_a_model() -> nn.Module:
    return 3

def undeclared(width: int = 8):
    return Tiny(width, 50)

def fails() -> nn.Module:
    return Tiny(3)

a_number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in a folder of ``--code``."""
    name = "own_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN_MODULE)
    for variable in ("PYTHONPATH", "TITAN_TRAIN_CODE"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))  # restored afterwards
    monkeypatch.setattr(sys, "path", list(sys.path))
    use_code([str(tmp_path)])
    return name


def test_arguments_change_the_shipped_shape() -> None:
    model = build_model(ModelConfig(name="llama3_8b", args={"num_layers": 3, "rope_theta": 10_000}), vocab_size=1000)
    assert len(model.layers) == 3  # type: ignore[arg-type]
    assert model.args.rope_theta == 10_000.0
    assert model.tok_embeddings.weight.shape == (1000, 4096)  # type: ignore[union-attr]


def test_the_vocabulary_may_be_padded_but_not_cut() -> None:
    padded = build_model(ModelConfig(args={"vocab_size": 320}), vocab_size=300)
    assert padded.lm_head.weight.shape[0] == 320  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"model.args.vocab_size=256 is less than the tokenizer's 300"):
        build_model(ModelConfig(args={"vocab_size": 256}), vocab_size=300)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"args": {"num_layer": 3}}, ["model.args.num_layer=3", "'num_layers'"]),
        ({"args": {"num_layers": "3"}}, ["model.args.num_layers='3'", "int", "llama3_debug has 2"]),
        ({"args": {"num_layers": (1,)}}, ["model.args.num_layers=[1] must be of type int, not a list"]),
        (
            {"name": "qwen3_vl_debug", "args": {"deepstack_layers": (0.5,)}},
            ["deepstack_layers=[0.5] must be a list, each of type int, not a list of others; qwen3_vl_debug has [0]"],
        ),
        ({"args": {"num_layers": True}}, ["model.args.num_layers=True", "int"]),
        ({"args": {"tied_embeddings": 1}}, ["model.args.tied_embeddings=1", "bool"]),
        ({"args": {"num_kv_heads": 3}}, ["model.args.num_kv_heads=3", "nearest valid choice is 2"]),
        ({"name": "gpt_debug", "seq_len": 513}, ["model.seq_len=513", "512", "model.args.max_seq_len=513"]),
    ],
)
def test_arguments_that_cannot_work_are_refused(config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match="model") as caught:
        build_model(ModelConfig(**config), vocab_size=300)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "llama3-8b"}, ["model.name='llama3-8b'", "'llama3_8b'", "package.module:callable"]),
        ({"name": "my module:build"}, ["model.name='my module:build'", "my_package.my_model:build"]),
        ({"seq_len": 0}, ["model.seq_len=0", "1"]),
    ],
)
def test_config_names_key_value_and_nearest_choice(config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match="model") as caught:
        ModelConfig(**config)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_config_reads_from_strict_json() -> None:
    text = json.dumps({"name": "llama3_1b", "args": {"num_layers": 4, "norm_eps": 1e-6, "tied_embeddings": False}})
    config = TypeAdapter(ModelConfig).validate_json(text, strict=True)
    assert config.args == {"num_layers": 4, "norm_eps": 1e-6, "tied_embeddings": False}
    assert [type(value) for value in config.args.values()] == [int, float, bool]


def test_own_module_is_found_in_a_folder_of_code(own_module: str) -> None:
    model = build_model(ModelConfig(name=f"{own_module}:Tiny", args={"width": 4}), vocab_size=30)
    assert isinstance(model, nn.Module)
    assert model.embed.weight.shape == (30, 4)  # type: ignore[union-attr]
    assert model.embed.weight.is_meta  # type: ignore[union-attr]


def test_own_function_without_vocab_size_is_called_without_it(own_module: str) -> None:
    model = build_model(ModelConfig(name=f"{own_module}:build"), vocab_size=30, device="cpu")
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 50)
    takes_anything = build_model(ModelConfig(name=f"{own_module}:anything", args={"width": 4}), vocab_size=30)
    assert takes_anything.embed.weight.shape == (30, 4)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "args", "words"),
    [
        ("{}:Tinny", {}, ["no 'Tinny'", "'Tiny'"]),
        ("{}:a_number", {}, ["is a int", "function that returns a torch.nn.Module"]),
        ("{}:torch.load", {}, ["one name must follow the colon"]),
        ("{}:undeclared", {}, ["does not declare to return a model", "-> torch.nn.Module"]),
        ("{}:fails", {}, ["building the model failed: TypeError", "line 27"]),
        ("{}:not_a_model", {}, ["returned a int", "torch.nn.Module"]),
        ("{}:Tiny", {"widht": 4}, ["model.args.widht=4", "'width'"]),
        ("{}:Tiny", {}, ["missing", "'width'", "[model.args]"]),
        (
            "no_such_module_here.models:build",
            {},
            ["module 'no_such_module_here' is neither installed nor in a folder given with --code"],
        ),
    ],
)
def test_a_dotted_path_that_cannot_work_is_refused(
    own_module: str, path: str, args: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="model") as caught:
        build_model(ModelConfig(name=path.format(own_module), args=args), vocab_size=30)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_import_error_inside_the_users_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_broken_model.py").write_text("import a_library_that_is_not_installed\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TITAN_TRAIN_CODE", "")
    use_code([str(tmp_path)])
    with pytest.raises(ValueError, match="imports 'a_library_that_is_not_installed', which is not installed"):
        build_model(ModelConfig(name="own_broken_model:build"), vocab_size=30)


def test_building_on_meta_does_not_load_torchs_compiler() -> None:
    program = """
import sys
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
for name in ("llama3_debug", "gpt_debug", "qwen3_moe_debug", "deepseek_debug"):
    build_model(ModelConfig(name=name), vocab_size=None, device="meta")
    assert "torch._dynamo" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_weights_on_a_real_device_are_still_drawn() -> None:
    model = build_model(ModelConfig(name="gpt_debug"), vocab_size=None, device="cpu")
    assert all(p.std() > 0 for name, p in model.named_parameters() if p.ndim == 2), "a matrix of equal values"
