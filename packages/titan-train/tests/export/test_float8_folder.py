"""A float8 folder says of every matrix whether it has scales: readers on GPUs convert each linear that is not excepted."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.export.float8 import float8_config, float8_names
from titan_train.models import build_model
from titan_train.models.registry import family_of
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders

UNSUITED = {"moe_intermediate_size": 160}
"""No multiple of 128, and more than it."""


def read_by(config: ModelConfig) -> tuple[set[str], set[str], frozenset[str]]:
    """Linears that transformers takes as float8, modules of experts that it does, and tensors that are stored so."""
    from transformers import CONFIG_MAPPING
    from transformers.quantizers.quantizers_utils import should_convert_module

    model: Any = build_model(config, vocab_size=96)
    family = family_of(model)
    assert family is not None
    excepted = float8_config(model, family)["modules_to_not_convert"]
    published = family.load_hf().config_of(model.args)
    kind = CONFIG_MAPPING[published["model_type"]]
    with torch.device("meta"):
        theirs = hf_folders.auto_class(published["model_type"]).from_config(kind.from_dict(published))
    modules = {name: module for name, module in theirs.named_modules() if should_convert_module(name, excepted)}
    linears = {f"{name}.weight" for name, module in modules.items() if type(module) is nn.Linear}
    return linears, {name for name in modules if name.endswith(".experts")}, float8_names(model, family)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_next", "starcoder2", "phi", "phi3", "deepseek_v32"])
def test_every_linear_without_scales_is_excepted(kind: str, tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / kind, kind)
    linears, experts, stored = read_by(ModelConfig(name=f"hf:{folder}", seq_len=32))
    apart = re.compile(r"(.*\.experts)\.\d+\.")
    assert linears == {name for name in stored if not apart.match(name)}
    assert experts == {found[1] for name in stored if (found := apart.match(name))}


def test_linears_of_a_family_here_without_scales_are_excepted() -> None:
    linears, _, stored = read_by(ModelConfig(name="qwen3_next_debug"))
    assert linears == stored


def test_experts_that_stay_bf16_are_excepted_as_a_module(tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / "qwen2_moe", "qwen2_moe", **UNSUITED)
    _, experts, stored = read_by(ModelConfig(name=f"hf:{folder}", seq_len=32))
    assert experts == set()
    assert not any(".experts." in name for name in stored)


def test_the_sides_of_a_fused_matrix_are_those_of_the_whole(tmp_path: Path) -> None:
    for head_dim, suits in ((64, True), (32, False)):  # 256 + 64 + 64 rows, 128 + 32 + 32 rows
        wide = {"hidden_size": 256, "num_key_value_heads": 1, "head_dim": head_dim}
        folder = hf_folders.make(tmp_path / f"{head_dim}", "phi3", **wide)
        _, _, stored = read_by(ModelConfig(name=f"hf:{folder}", seq_len=32))
        assert any(name.endswith("self_attn.qkv_proj.weight") for name in stored) == suits
