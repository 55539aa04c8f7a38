"""Families from anywhere: registered here, installed by a package, or refused with the reason."""

import dataclasses
import importlib
import logging
import operator
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from titan_ckpt import KeyMap
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, registry
from titan_train.models.arguments import model_args
from titan_train.models.family import Family
from titan_train.models.llama import LLAMA_FAMILY
from titan_train.models.llama.args import LlamaArgs
from titan_train.models.registry import families, family_of, list_models, register_family

TINY = LlamaArgs(dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=64, vocab_size=64)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def family(**changes: object) -> Family:
    return dataclasses.replace(LLAMA_FAMILY, **({"name": "mine", "configs": {"mine_tiny": TINY}} | changes))


def test_a_registered_family_can_be_configured_and_built() -> None:
    register_family(family())
    assert list_models()[-1] == "mine_tiny"
    model = build_model(ModelConfig(name="mine_tiny", args={"num_layers": 2}), vocab_size=70)
    assert model.args == dataclasses.replace(TINY, num_layers=2, vocab_size=70)
    assert register_family(family()) == families()["mine"]  # the same family again is no conflict


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedArgs(LlamaArgs):
    window: int | None = None
    scale: float | None = None
    max_seq_len: int | None = None


def test_arguments_that_may_be_none_can_be_set() -> None:
    own = WindowedArgs(**dataclasses.asdict(TINY))
    register_family(family(args=WindowedArgs, configs={"mine_windowed": own}))
    args = model_args(ModelConfig(name="mine_windowed", args={"window": 128, "scale": 2}), vocab_size=None)
    assert args == dataclasses.replace(own, window=128, scale=2.0)
    assert isinstance(args.scale, float)
    with pytest.raises(ValueError, match=r"model\.args\.window='a' must be of type int, not of type str"):
        model_args(ModelConfig(name="mine_windowed", args={"window": "a"}), vocab_size=None)


def test_names_that_are_taken_are_refused() -> None:
    with pytest.raises(ValueError, match="a family named 'llama' is already registered"):
        register_family(family(name="llama"))
    with pytest.raises(ValueError, match="the family 'llama' already has a configuration 'llama3_8b'"):
        register_family(family(configs={"llama3_8b": TINY}))


def test_a_family_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="has no field vocab_size"):
        family(args=dataclasses.make_dataclass("Bare", ["dim"]), configs={})
    with pytest.raises(ValueError, match="configuration 'mine_tiny' is of type int"):
        family(configs={"mine_tiny": 3})
    register_family(family(model="titan_train.models:Llama"))
    with pytest.raises(ValueError, match=r"is defined as 'titan_train\.models\.llama\.model:Llama'"):
        build_model(ModelConfig(name="mine_tiny"), vocab_size=None)


def test_a_family_whose_arguments_state_no_shape_cannot_be_planned() -> None:
    bare = dataclasses.make_dataclass("Bare", ["vocab_size"])
    with pytest.raises(ValueError, match=r"Bare has no method shape\(name\), which the planner reads"):
        family(args=bare, configs={}).shape(bare(8))


def test_the_family_of_a_module_is_that_of_its_class() -> None:
    model = build_model(ModelConfig(), vocab_size=None)
    assert family_of(model) is LLAMA_FAMILY
    subclass = type("Other", (type(model),), {})
    assert family_of(subclass(model.args)) is None


def test_a_broken_package_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[titan_train.families]\nbroken = no_such_module:X\nodd = json:dumps\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._installed.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert "llama3_8b" in list_models()
    registry._installed.cache_clear()
    assert "entry point broken of titan_train.families could not be loaded" in caplog.text
    assert "entry point odd of titan_train.families is a function, not a Family" in caplog.text


def test_the_key_maps_that_the_package_declares_exist() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for path in project["entry-points"]["titan_ckpt.key_maps"].values():
        module, _, attribute = path.partition(":")
        assert isinstance(operator.attrgetter(attribute)(importlib.import_module(module)), KeyMap)


def test_names_are_readable_without_torch() -> None:
    code = "import sys, titan_train.models.registry as r; r.list_models(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
