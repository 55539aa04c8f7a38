"""torchao's float8 training calls: a framework that makes them switches by changing its import.

``from torchao.float8 import convert_to_float8_training, Float8LinearConfig`` becomes
``from titan_fp8.interop.torchao import convert_to_float8_training, Float8LinearConfig``.

Signatures follow torchao 0.18. torchao itself is not imported.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from titan_fp8.convert.convert import convert_to_float8
from titan_fp8.parallel.fsdp import apply_float8_all_gather
from titan_fp8.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Float8LinearConfig:
    """The part of torchao's configuration that has a meaning here."""

    recipe: str | Recipe = "tensorwise"
    """torchao's default recipe; `from_recipe_name` sets another."""
    enable_fsdp_float8_all_gather: bool = False
    """Have FSDP2 gather weights in float8."""
    round_scales_to_power_of_2: bool = True
    """Power-of-two scales; torchao's default is False for tensorwise."""

    @staticmethod
    def from_recipe_name(recipe_name: str) -> "Float8LinearConfig":
        """``tensorwise``, ``rowwise``, ``rowwise_with_gw_hp``, or a recipe that torchao lacks.

        Raises:
            ValueError: If the name is unknown.
        """
        return Float8LinearConfig(Recipe.get(recipe_name))

    def to_recipe(self) -> Recipe:
        """The recipe it means."""
        recipe = Recipe.get(self.recipe)
        if self.round_scales_to_power_of_2:
            return recipe
        exact = {name: replace(getattr(recipe, name), pow2=False) for name in ("x", "w", "g")}
        return replace(recipe, **exact)


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Make every ``nn.Linear`` of ``module`` a float8 layer, in place, and return ``module``.

    As in torchao nothing is skipped but what ``module_filter_fn(module, fqn)`` refuses; `convert_to_float8` also
    protects the head, leaves alone what would be slower, and reports.

    Raises:
        ValueError: If float8 all-gather is asked for with a recipe that cannot.
    """
    chosen = config or Float8LinearConfig()
    convert_to_float8(
        module,
        chosen.to_recipe(),
        module_filter_fn=module_filter_fn,
        skip=(),
        min_speedup=0.0,
        fsdp_all_gather=chosen.enable_fsdp_float8_all_gather,
    )
    if chosen.enable_fsdp_float8_all_gather:
        apply_float8_all_gather(module)
    return module


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Does nothing: accepted so that a training loop written for torchao runs unchanged.

    Each weight then finds its scale when it is gathered. `titan_fp8.ConstantWeights` around a step's forwards and
    backwards finds all of them in one all-reduce.
    """
    del module
