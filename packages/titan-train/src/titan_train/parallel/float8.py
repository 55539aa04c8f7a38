"""Float8 products by titan-fp8, in the places that a model has for them.

Conversion comes before tensor parallelism, which then cuts float8 layers like others; layers with one scale for a whole
tensor are told the ranks that hold its other parts, so that the scale is the same for any number of them. Several
linears of one input share its cast; experts multiply in float8 too.
"""

from typing import Literal

import titan_fp8
import torch.distributed as dist
from torch import Tensor, nn

from titan_train.config import Float8Config
from titan_train.models.moe import Experts
from titan_train.models.shared_input import SharedInput

_GATHER: dict[str, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}


class SharedFloat8Input(SharedInput):
    """Linears of one input that is cast once."""

    def forward(self, x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        """As `SharedInput`; linears that are not all float8 of one recipe run one by one."""
        layers = [linear for linear in linears if isinstance(linear, titan_fp8.Float8Linear)]
        if len(layers) < len(linears) or any(layer.recipe != layers[0].recipe for layer in layers):
            return super().forward(x, *linears)
        first = layers[0]
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers]
        return titan_fp8.linears(x, weights, biases, first.recipe, amax_group=first.amax_group)


def convert_to_float8(model: nn.Module, config: Float8Config, *, tokens: int) -> titan_fp8.Report:
    """Make the linears and experts of ``model`` compute in float8; in place, on any device, before anything is cut.

    Args:
        model: The whole model or a pipeline stage.
        config: Recipe and exceptions.
        tokens: That one rank computes at once, for the prediction of speed.

    Returns:
        What was converted, what was not, and why.

    Raises:
        ValueError: The recipe's weights cannot be gathered in float8 as asked.
    """
    report = titan_fp8.convert_to_float8(
        model,
        config.recipe,
        skip=config.skip or None,
        strict_filters=False,  # a stage need not hold what a pattern protects
        min_speedup=config.min_speedup,
        tokens=tokens,
        fsdp_all_gather=_GATHER[config.all_gather],
    )
    for name, module in list(model.named_modules()):
        if type(module) is SharedInput:
            model.set_submodule(name, SharedFloat8Input())
        elif isinstance(module, Experts):
            module.grouped_mm = titan_fp8.Float8GroupedMM(config.recipe)
    return report


def share_scales(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Tell the float8 layers of a cut model which ranks hold the other parts of its tensors."""
    for module in model.modules():
        if isinstance(module, titan_fp8.Float8Linear):
            module.amax_group = group
