"""Regions whose linears are float8 gather their input in float8.

What a region gathers it casts to float8 anyway, so each rank casts its own tokens and sends the codes: half of bfloat16's
bytes. Backward gathers the codes again, in the layout of the weight gradient, rather than to keep those of all tokens:
in all the bytes of one gather in bfloat16, and 1/n of the input is kept.

With 1x128 blocks along rows and 128 tokens in a column's block, the codes of the parts are those of the whole: every bit
of outputs and gradients is what it is with the cast after the gather. With one scale a tensor it need not be: weights
and gradients are then scaled by what one rank holds of them. Rowwise linears keep plain collectives: their backward
needs the gradient in both layouts, which are the bytes of bfloat16 again.

A region can if it hands its input to its linears through one `SharedFloat8Input` (and to nothing else), and all its
linears are float8 of one recipe, without bias. One that also reads it in another way says so by an attribute
``reads_its_input``, as a gate does. The shared input is replaced, and the region's gather left out. Other
regions keep it. The weight gradients of these linears come with the input gradients, also under a pipeline schedule that
splits backward.
"""

from collections.abc import Sequence
from typing import cast

import titan_fp8
import torch.distributed as dist
from titan_fsdp import clean_fqn
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.parallel.float8 import LayerNormedInput, NormedInput, SharedFloat8Input, run_forward_hooks
from titan_train.parallel.tensor.boundaries import enter
from titan_train.parallel.tensor.plan import PlannedModule

_BLOCK_TOKENS = 128


class GatherFloat8Linears(SharedFloat8Input):
    """Linears of one input that is cast, then gathered. Forward hooks are given this rank's tokens as the input."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Gather over ``group``."""
        super().__init__()
        self._group = group

    def forward(self, x: Tensor | NormedInput | LayerNormedInput, *linears: nn.Module) -> tuple[Tensor, ...]:
        """``[B, S / n, K]`` to ``[B, S, F]`` for each linear; where a block of tokens would span ranks, gather first."""
        if not isinstance(x, Tensor):  # what is gathered is the norm's output
            x = x.compute()
        layers = cast("tuple[titan_fp8.Float8Linear, ...]", linears)
        recipe = layers[0].recipe
        if recipe.x.gran != "tensor" and x.shape[-2] % _BLOCK_TOKENS:
            return super().forward(enter(x, self._group, sequence_parallel=True), *linears)
        outs = titan_fp8.all_gather_linears(x, [layer.weight for layer in layers], recipe, group=self._group)
        return run_forward_hooks(linears, x, outs)


def can_gather_float8(recipe: titan_fp8.Recipe) -> bool:
    """Whether activations of this recipe can be gathered in float8: no scale of theirs spans the ranks' tokens."""
    return recipe.x.gran in ("tensor", "block1x128") and recipe.wgrad == "fp8"


def gathers_same_bits(recipe: titan_fp8.Recipe) -> bool:
    """Whether gathering in float8 gives the bits of casting what was gathered."""
    return can_gather_float8(recipe) and recipe.x.gran != "tensor"


def check_gather(config: Config) -> None:
    """Refuse with a ValueError to gather in float8 with a recipe that cannot, or with what reads tokens before the cast."""
    recipe = config.float8.recipe
    if recipe != "none" and config.float8.tp_gather == "on" and not can_gather_float8(titan_fp8.Recipe.get(recipe)):
        raise ValueError(
            f"float8.tp_gather='on' and float8.recipe={recipe!r}: scales of this recipe span the tokens of all ranks in the "
            "weight gradient. Use recipe 'blockwise' or 'tensorwise', or tp_gather='auto'."
        )
    if recipe != "none" and config.float8.tp_gather == "on" and config.activations.mlp_tiles > 1:
        raise ValueError(
            f"float8.tp_gather='on' and activations.mlp_tiles={config.activations.mlp_tiles}: a tile would gather its part of "
            "each rank's tokens, in another order than that of the whole. Use tp_gather='auto', or mlp_tiles=1."
        )
    if recipe != "none" and config.float8.tp_gather == "on" and config.model.lora_rank:
        raise ValueError(
            f"float8.tp_gather='on' and model.lora_rank={config.model.lora_rank}: an adapter reads what its base reads, before "
            "the cast. Use tp_gather='auto', which gathers in high precision with adapters."
        )


def gathers_float8(config: Config, *, split_backward: bool) -> bool:
    """Whether sequence parallelism gathers in float8: as configured; by itself where nothing is lost."""
    # an adapter reads what its base reads, before the cast; tiles would gather tiles, and tokens change places
    if config.model.lora_rank or config.activations.mlp_tiles > 1:
        return False
    if config.float8.recipe == "none" or config.float8.tp_gather != "auto":
        return config.float8.recipe != "none" and config.float8.tp_gather == "on"
    return gathers_same_bits(titan_fp8.Recipe.get(config.float8.recipe)) and not split_backward


def gather_in_float8(model: nn.Module, modules: Sequence[PlannedModule], group: dist.ProcessGroup) -> set[str]:
    """Replace the shared inputs of the regions that can gather in float8.

    Args:
        model: The model, its parameters cut.
        modules: Of its plan.
        group: The ranks, which share the tokens outside of regions.

    Returns:
        Names of these regions: their inputs need no gather, their outputs are still to be summed.
    """
    found: set[str] = set()
    for region in modules:
        shared = [name for name, child in region.module.named_children() if type(child) is SharedFloat8Input]
        if region.style == "region" and len(shared) == 1 and _alike(region.module):
            setattr(model.get_submodule(region.fqn), shared[0], GatherFloat8Linears(group))
            found.add(region.fqn)
    return found


def float8_gathering_modules(model: nn.Module) -> list[str]:
    """Names of the modules that gather in float8."""
    return [clean_fqn(name) for name, module in model.named_modules() if isinstance(module, GatherFloat8Linears)]


def _alike(region: nn.Module) -> bool:
    """Whether all linears read the shared input, and are float8 of one recipe that can be gathered, without biases."""
    if getattr(region, "reads_its_input", False):
        return False
    linears = [m for m in region.modules() if isinstance(m, nn.Linear)]
    layers = [linear for linear in linears if isinstance(linear, titan_fp8.Float8Linear)]
    plain = all(cast("Tensor | None", layer.bias) is None for layer in layers)
    recipes = {layer.recipe for layer in layers}
    return len(layers) == len(linears) and len(recipes) == 1 and plain and can_gather_float8(recipes.pop())
