"""Turn a model's linear layers into float8 layers, in place, and say what was done.

A converted layer is the same module object with the same parameters, names and dtypes; only its forward differs. So
optimizers, checkpoints, hooks and later wrapping (tensor parallel, activation checkpointing, compile, FSDP2) see what
they saw before. Works on the meta device.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from titan_fp8.convert.patterns import check_patterns, clean_fqn, matching_pattern
from titan_fp8.convert.report import ConversionReport, ConvertedLayer
from titan_fp8.convert.roofline import H200, Hardware, predict_speedup
from titan_fp8.layers.linear import Float8Linear
from titan_fp8.recipe import Recipe

DEFAULT_SKIP = ("lm_head", "router")
"""The head (its error goes straight into the loss) and routers of experts (tiny, and their order decides)."""

_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def convert_to_float8(
    model: nn.Module,
    recipe: str | Recipe = "blockwise",
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    skip: Sequence[str] | None = None,
    min_speedup: float = 1.0,
    tokens: int = 16384,
    hardware: Hardware = H200,
    eager: bool = True,
    strict_filters: bool = True,
    fsdp_all_gather: bool | Literal["auto"] = "auto",
) -> ConversionReport:
    """Make the linear layers of a model compute in float8.

    Args:
        model: Any module, on any device (meta too), before tensor parallelism and FSDP2. Changed in place: each chosen
            ``nn.Linear`` becomes a `Float8Linear`, keeping object, parameters, names, dtypes and hooks.
        recipe: A recipe or its name: tensorwise, rowwise, rowwise_gw_hp, blockwise, mxfp8.
        module_filter_fn: ``fn(module, fqn) -> bool``; False leaves the layer alone. Called for linear layers only.
        skip: Patterns of names to leave alone (see `titan_fp8.convert.patterns`); None takes `DEFAULT_SKIP`. Of a layer under
            several names, these and ``module_filter_fn`` look at all; the report has the first.
        min_speedup: Leave a layer alone if it is predicted to be less than this many times as fast as in bfloat16;
            0 converts any size.
        tokens: Rows one device computes at once, for that prediction.
        hardware: The device, for that prediction.
        eager: The layers will not be compiled, so that small ones take the host's time; for that prediction.
        strict_filters: Refuse a given skip pattern that matches no linear layer.
        fsdp_all_gather: Whether `apply_float8_all_gather` later takes these layers: ``"auto"`` where the recipe can.

    Returns:
        What was converted, what was not, and why.

    Raises:
        ValueError: If a pattern matches nothing, the recipe is unknown, or ``fsdp_all_gather=True`` with a recipe
            whose weights cannot be gathered in float8. The model is unchanged then.
    """
    chosen = Recipe.get(recipe)
    if fsdp_all_gather is True and not chosen.fsdp_all_gather:
        raise ValueError(
            f"fsdp_all_gather=True with recipe {chosen.name!r}: {_ALL_GATHER_IMPOSSIBLE} Use blockwise or tensorwise, "
            "or fsdp_all_gather='auto'."
        )
    layers = _linear_layers(model)
    patterns = DEFAULT_SKIP if skip is None else tuple(skip)
    if strict_filters and skip is not None:
        check_patterns(patterns, [fqn for fqns in layers.values() for fqn in fqns])
    gather = chosen.fsdp_all_gather if fsdp_all_gather == "auto" else fsdp_all_gather

    uses = count_uses(model)
    skipped: dict[str, str] = {}
    converted: dict[nn.Linear, ConvertedLayer] = {}
    for layer, fqns in layers.items():
        fqn = fqns[0]
        speedup = predict_speedup(tokens, layer.in_features, layer.out_features, chosen, hardware, eager=eager)
        if (pattern := next(filter(None, (matching_pattern(name, patterns) for name in fqns)), None)) is not None:
            skipped[fqn] = f"named by skip pattern {pattern!r}"
        elif (reason := _unfit(layer, uses[id(layer.weight)])) is not None:
            skipped[fqn] = reason
        elif module_filter_fn is not None and not all(module_filter_fn(layer, name) for name in fqns):
            skipped[fqn] = "rejected by module_filter_fn"
        elif speedup < min_speedup:
            skipped[fqn] = (
                f"[{layer.out_features}, {layer.in_features}] is predicted {speedup:.2f}x as fast as bfloat16 with "
                f"{tokens} tokens on {hardware.name}, below min_speedup={min_speedup:g}"
            )
        else:
            converted[layer] = ConvertedLayer(fqn, layer.in_features, layer.out_features, speedup)
    for layer in converted:
        Float8Linear.from_linear(layer, chosen, fsdp_all_gather=gather)
    return ConversionReport(chosen.name, tuple(converted.values()), skipped, _all_gather_note(chosen, gather))


def _linear_layers(model: nn.Module) -> dict[nn.Linear, list[str]]:
    """Each linear layer once, with all its names."""
    found: dict[nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            found.setdefault(module, []).append(clean_fqn(name))
    return found


def count_uses(model: nn.Module) -> Counter[int]:
    """How many times modules hold each parameter, by its ``id``."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)


def _unfit(layer: nn.Linear, uses: int) -> str | None:
    """Why a layer cannot be converted, or None."""
    if isinstance(layer, Float8Linear):
        return "is a float8 layer already"
    if type(layer) is not nn.Linear:
        return f"is a {type(layer).__name__}, whose own forward would be lost"
    if "forward" in layer.__dict__:
        return "has a forward set on the object, which would run instead"
    if type(layer.weight) is not nn.Parameter:
        return f"its weight is a {type(layer.weight).__name__}: convert before tensor parallelism and FSDP2"
    if uses > 1:
        return "shares its weight with another module that needs it in high precision"
    if layer.weight.dtype not in _WEIGHT_DTYPES:
        return f"its weight is {layer.weight.dtype}, not bfloat16, float16 or float32"
    if min(layer.in_features, layer.out_features) == 0:
        return "is empty"
    return None


_ALL_GATHER_IMPOSSIBLE = (
    "its backward needs column scales, which span ranks, so the weight would be sent twice in float8 with no gain."
)


def _all_gather_note(recipe: Recipe, gather: bool) -> str:
    if gather:
        amax = "one amax collective per step" if recipe.w.gran == "tensor" else "no amax collective for aligned shards"
        return f"float8 once apply_float8_all_gather has been called ({amax})"
    return "high precision: " + ("as requested" if recipe.fsdp_all_gather else _ALL_GATHER_IMPOSSIBLE)
