"""Float8 products by titan-fp8, in the places that a model has for them.

Conversion comes before tensor parallelism, which then cuts float8 layers like others; layers with one scale for a whole
tensor are told the ranks that hold its other parts, so that the scale is the same for any number of them. Several
linears of one input share its cast; experts multiply in float8 too.

A weight's cast is kept over the micro-batches of a step, by each float8 layer and here for those that share an input;
under FSDP, which casts shards when it gathers them, only as long as the gathered weight is there.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import titan_fp8
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_train.config import Float8Config
from titan_train.models.common.shared_input import SharedInput
from titan_train.models.moe import Experts

_GATHER: dict[str, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}


class SharedFloat8Input(SharedInput):
    """Linears of one input that is cast once."""

    def __init__(self, *, keep_casts: bool = False) -> None:
        """With ``keep_casts`` each weight is cast once a step: for weights that stay whole in memory."""
        super().__init__()
        self._keep_casts = keep_casts
        self._caches: list[titan_fp8.WeightCache] = []

    def forward(self, x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        """As `SharedInput`; linears that are not all float8 of one recipe run one by one."""
        layers = [linear for linear in linears if isinstance(linear, titan_fp8.Float8Linear)]
        if len(layers) < len(linears) or any(layer.recipe != layers[0].recipe for layer in layers):
            return super().forward(x, *linears)
        first = layers[0]
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers]
        caches = None
        if self._keep_casts and not torch.compiler.is_compiling():
            self._caches += [titan_fp8.WeightCache() for _ in layers[len(self._caches) :]]
            caches = self._caches[: len(layers)]
        return titan_fp8.linears(x, weights, biases, first.recipe, caches=caches, amax_group=first.amax_group)


class Deferring(Protocol):
    """What a pipeline's engine for split backwards offers, see `titan_pipeline.runtime.WeightGradEngine`."""

    anchor: Tensor

    def defer(self, parameter: Tensor, compute: Callable[..., Tensor], *given: Any) -> None:
        """Note a weight gradient for later."""
        ...


def defer_linear(engine: Deferring, linear: titan_fp8.Float8Linear, plain: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A float8 linear whose weight gradient waits for the pipeline's weight pass, in float8."""
    return linear.forward_deferred(x, anchor=engine.anchor, defer=engine.defer)


def defer_shared(
    engine: Deferring, shared: SharedFloat8Input, plain: Callable[..., Any], x: Tensor, *linears: nn.Module
) -> tuple[Tensor, ...]:
    """Linears of one input, one by one so that each defers; the input is then cast for each of them."""
    return SharedInput.forward(shared, x, *linears)


DEFERRING_RULES: Mapping[type[nn.Module], Callable[..., Any]] = {
    titan_fp8.Float8Linear: defer_linear,
    SharedFloat8Input: defer_shared,
}
"""For `titan_pipeline.runtime.TorchStage`: how float8 layers take part in schedules that split backward."""


def convert_to_float8(
    model: nn.Module, config: Float8Config, *, tokens: int, keep_casts: bool = False
) -> titan_fp8.Report:
    """Make the linears and experts of ``model`` compute in float8; in place, on any device, before anything is cut.

    Args:
        model: The whole model or a pipeline stage.
        config: Recipe and exceptions.
        tokens: That one rank computes at once, for the prediction of speed.
        keep_casts: Weights that share an input are cast once a step; without FSDP, whose gathered weights come and go.

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
            model.set_submodule(name, SharedFloat8Input(keep_casts=keep_casts))
        elif isinstance(module, Experts):
            module.grouped_mm = titan_fp8.Float8GroupedMM(config.recipe)
    return report


def share_scales(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Tell the float8 layers of a cut model which ranks hold the other parts of its tensors."""
    for module in model.modules():
        if isinstance(module, titan_fp8.Float8Linear):
            module.amax_group = group
