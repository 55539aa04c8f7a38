"""Against torchao: its calls work here, and on the same data we are as exact. Skipped where torchao is not installed."""

from typing import Any

import pytest
import titan_fp8
import torch
from titan_fp8.interop.torchao import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torch import nn


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 32, bias=False))


def test_torchaos_calls_convert_and_return_the_module() -> None:
    model = small_model()
    seen: list[str] = []

    def keep(module: nn.Module, fqn: str) -> bool:
        seen.append(fqn)
        return fqn != "2"

    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    assert convert_to_float8_training(model, module_filter_fn=keep, config=config) is model
    assert seen == ["0", "2"]
    assert isinstance(model[0], titan_fp8.Float8Linear)
    assert model[0].recipe.name == "rowwise_gw_hp"
    assert type(model[2]) is nn.Linear
    assert convert_to_float8_training(nn.Linear(8, 8)).recipe.name == "tensorwise"
    precompute_float8_dynamic_scale_for_fsdp(model)


def test_torchaos_switches_have_their_meaning() -> None:
    exact = Float8LinearConfig(round_scales_to_power_of_2=False).to_recipe()
    assert not any(s.pow2 for s in (exact.x, exact.w, exact.g))
    model = convert_to_float8_training(small_model(), config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    assert hasattr(model[0].weight, "fsdp_pre_all_gather")
    assert model(torch.randn(4, 64)).shape == (4, 32)
    with pytest.raises(ValueError, match="column scales"):
        convert_to_float8_training(small_model(), config=Float8LinearConfig("rowwise", True))


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    noise = (got.double() - want.double()).square().sum()
    return 10 * float(torch.log10(want.double().square().sum() / noise))


def run(model: Any, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(g)
    return [y.detach(), x.grad, model.weight.grad]


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_signal_over_noise_is_within_half_a_decibel_of_torchao(recipe: str, seed: int, pow2: bool) -> None:
    torchao = pytest.importorskip("torchao.float8")
    torch.manual_seed(seed)
    weight = torch.randn(256, 512, dtype=torch.bfloat16) * 512**-0.5
    x, g = torch.randn(384, 512, dtype=torch.bfloat16), torch.randn(384, 256, dtype=torch.bfloat16)

    def layer() -> nn.Linear:
        module = nn.Linear(512, 256, bias=False, dtype=torch.bfloat16)
        module.weight.data.copy_(weight)
        return module

    ours = layer()
    chosen = titan_fp8.Recipe.get(recipe)
    if not pow2:
        chosen = Float8LinearConfig(chosen, round_scales_to_power_of_2=False).to_recipe()
    titan_fp8.convert_to_float8(ours, chosen, min_speedup=0)
    theirs = torchao.convert_to_float8_training(layer(), config=torchao.Float8LinearConfig.from_recipe_name(recipe))
    exact = layer().double()
    want = run(exact, x.double(), g.double())
    for name, a, b, c in zip(("y", "dx", "dw"), run(ours, x, g), run(theirs, x, g), want, strict=True):
        assert sqnr(a, c) >= sqnr(b, c) - 0.5, name
