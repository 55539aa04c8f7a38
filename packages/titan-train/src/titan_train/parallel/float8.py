"""Float8 products by titan-fp8, in the places that a model has for them.

Conversion comes before tensor parallelism, which then cuts float8 layers like others; layers with one scale for a whole
tensor are told the ranks that hold its other parts, so that the scale is the same for any number of them. Several
linears of one input share its cast; experts multiply in float8 too. The norm before such linears, and SwiGLU or GELU before the
last linear of a feed-forward, are computed in the pass that casts (`CastingNorm`, `GatedFloat8Input`), in eager mode and where
the linears are whole. A block names its norms and what reads each alone in ``norm_readers``.

A weight's cast is kept by its layer over the micro-batches of a step, which `titan_train.train.step` declares with
`titan_fp8.ConstantWeights`; a weight that FSDP gathered in high precision keeps it only until the weight is freed.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

import titan_fp8
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_train.config import Config, Float8Config
from titan_train.models.common.moe.experts import Experts
from titan_train.models.common.moe.routed import StackedExperts
from titan_train.models.common.norm import RMSNorm, ZeroCentredRMSNorm
from titan_train.models.common.shared_input import GatedInput, GeluInput, ModulatedNorm, SharedInput
from titan_train.models.traits import traits_of
from titan_train.parallel.tied import parameter_names, skip_patterns

_CAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GATHER: dict[str, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}


_Biases = Sequence[Tensor | None]
_Caches = Sequence[titan_fp8.WeightCache | None]
_Recipe = titan_fp8.Recipe


def _observed(*linears: nn.Module) -> bool:
    """Whether something looks at what goes through one of the linears, so that each must be called as a module."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in linears)


def run_forward_hooks(linears: Sequence[nn.Module], x: Tensor, outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs as the linears' forward hooks leave them, for linears that are not called as modules."""
    seen = list(outs)
    for i, linear in enumerate(linears):
        for number, hook in linear._forward_hooks.items():
            keywords = ({},) if number in linear._forward_hooks_with_kwargs else ()
            changed = hook(linear, (x,), *keywords, seen[i])
            seen[i] = seen[i] if changed is None else changed
    return tuple(seen)


def _shares_amax(layer: titan_fp8.Float8Linear) -> bool:
    """Whether ranks meet inside the layer to find a scale."""
    recipe = layer.recipe
    return layer.amax_group is not None and "tensor" in (recipe.x.gran, recipe.w.gran, recipe.g.gran)


def _fuses(x: Tensor) -> bool:
    """Whether what reads ``x`` may be computed with the cast: a compiler fuses by itself."""
    return not torch.compiler.is_compiling() and x.dtype in _CAST_DTYPES


def _defers(norm: nn.Module, x: Tensor) -> bool:
    """Whether a norm leaves itself to its reader: not where hooks gather its parameters only while it runs, or look at it."""
    return _fuses(x) and not _observed(norm)


class NormedInput(NamedTuple):
    """The input of a norm that its reader shall apply."""

    x: Tensor
    """``[B, S, d]``."""
    norm: "CastingNorm"
    """What to apply."""

    def compute(self) -> Tensor:
        """The norm's output."""
        return self.norm.compute(self.x)

    def linears(
        self, weights: Sequence[Tensor], biases: _Biases, recipe: _Recipe, caches: _Caches
    ) -> tuple[Tensor, ...]:
        """Linears of the norm's output."""
        eps = self.norm.eps
        assert eps is not None
        return titan_fp8.norm_linears(self.x, self.norm.gain, eps, weights, biases, recipe, caches=caches)


class CastingNorm(RMSNorm):
    """An RMSNorm whose only reader is a `SharedFloat8Input`, which normalizes and casts in one pass."""

    def forward(self, x: Tensor) -> Any:
        """``[B, S, d]`` to a `NormedInput`; under ``torch.compile`` (it fuses by itself) and with hooks to the norm's output."""
        return NormedInput(x, self) if _defers(self, x) and self.eps is not None else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The norm's output."""
        return super().forward(x)


class CastingZeroCentredNorm(CastingNorm, ZeroCentredRMSNorm):
    """The same for a gain of one more than the weight."""


class LayerNormedInput(NamedTuple):
    """The input of a LayerNorm that its reader shall apply."""

    x: Tensor
    """``[B, S, d]``."""
    gain: Tensor
    """``[d]`` or ``[B, 1, d]``."""
    shift: Tensor
    eps: float

    def compute(self) -> Tensor:
        """The norm's output."""
        return titan_fp8.layer_norm(*self)

    def linears(
        self, weights: Sequence[Tensor], biases: _Biases, recipe: _Recipe, caches: _Caches
    ) -> tuple[Tensor, ...]:
        """Linears of the norm's output."""
        return titan_fp8.layer_norm_linears(*self, weights, biases, recipe, caches=caches)


class CastingLayerNorm(nn.LayerNorm):
    """A LayerNorm whose only reader is a `SharedFloat8Input`."""

    def forward(self, input: Tensor) -> Any:
        """``[B, S, d]`` to a `LayerNormedInput`; under ``torch.compile`` and with hooks to the norm's output."""
        if not _defers(self, input):
            return super().forward(input)
        return LayerNormedInput(input, self.weight, self.bias, self.eps)


class CastingModulatedNorm(ModulatedNorm):
    """A `ModulatedNorm` whose only readers are `SharedFloat8Input`s."""

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Any:
        """``[B, S, d]`` to a `LayerNormedInput`; under ``torch.compile`` and with hooks to the norm's output."""
        return LayerNormedInput(x, 1 + scale, shift, self.eps) if _defers(self, x) else super().forward(x, shift, scale)


class SharedFloat8Input(SharedInput):
    """Linears of one input that is cast once.

    Linears with hooks run one by one, as modules. Not where ranks meet inside: hooks that one rank has alone must not change
    how often. Forward hooks see the outputs there, others do not run.
    """

    def forward(self, x: Tensor | NormedInput | LayerNormedInput, *linears: nn.Module) -> tuple[Tensor, ...]:
        """As `SharedInput`; linears that are not all float8 of one recipe run one by one too."""
        layers = [linear for linear in linears if isinstance(linear, titan_fp8.Float8Linear)]
        alike = len(layers) == len(linears) and all(layer.recipe == layers[0].recipe for layer in layers)
        if not alike or (_observed(*linears) and not _shares_amax(layers[0])):
            return super().forward(x if isinstance(x, Tensor) else x.compute(), *linears)
        first = layers[0]
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers]
        caches = [layer.weight_cache for layer in layers]
        if not isinstance(x, Tensor):
            if first.amax_group is None:
                return x.linears(weights, biases, first.recipe, caches)
            x = x.compute()
        outs = titan_fp8.linears(x, weights, biases, first.recipe, caches=caches, amax_group=first.amax_group)
        return run_forward_hooks(linears, x, outs)


class GatedFloat8Input(GatedInput):
    """SwiGLU and the cast that its linear takes in one pass."""

    def forward(self, gate: Tensor, up: Tensor, linear: nn.Module) -> Tensor:
        """As `GatedInput`."""
        if not isinstance(linear, titan_fp8.Float8Linear) or linear.amax_group is not None:
            return super().forward(gate, up, linear)
        if not _fuses(gate) or gate.dtype != up.dtype or _observed(linear):
            return super().forward(gate, up, linear)
        weight, cache = linear.weight, linear.weight_cache
        return titan_fp8.swiglu_linear(gate, up, weight, linear.bias, linear.recipe, cache=cache)


class GeluFloat8Input(GeluInput):
    """GELU and the cast that its linear takes in one pass."""

    def forward(self, x: Tensor, linear: nn.Module) -> Tensor:
        """As `GeluInput`."""
        if not isinstance(linear, titan_fp8.Float8Linear) or linear.amax_group is not None:
            return super().forward(x, linear)
        if not _fuses(x) or _observed(linear):
            return super().forward(x, linear)
        return titan_fp8.gelu_linear(x, linear.weight, linear.bias, linear.recipe, cache=linear.weight_cache)


class WeightGradDeferrer(Protocol):
    """What a pipeline's engine for split backwards offers, see `titan_pipeline.runtime.WeightGradEngine`."""

    anchor: Tensor

    def defer(self, parameter: Tensor, compute: Callable[..., Tensor], *given: Any) -> None:
        """Note a weight gradient for later."""
        ...


def defer_linear(
    engine: WeightGradDeferrer, linear: titan_fp8.Float8Linear, plain: Callable[..., Tensor], x: Tensor
) -> Tensor:
    """A float8 linear whose weight gradient waits for the pipeline's weight pass, in float8."""
    return linear.forward_deferred(x, anchor=engine.anchor, defer=engine.defer)


def defer_shared(
    engine: WeightGradDeferrer,
    shared: SharedFloat8Input,
    plain: Callable[..., Any],
    x: Tensor | NormedInput | LayerNormedInput,
    *linears: nn.Module,
) -> tuple[Tensor, ...]:
    """Linears of one input, one by one so that each defers; the input is then cast for each of them."""
    return SharedInput.forward(shared, x if isinstance(x, Tensor) else x.compute(), *linears)


def defer_gated(
    engine: WeightGradDeferrer,
    gated: GatedFloat8Input,
    plain: Callable[..., Any],
    gate: Tensor,
    up: Tensor,
    linear: nn.Module,
) -> Tensor:
    """SwiGLU, and then the linear, which defers."""
    return GatedInput.forward(gated, gate, up, linear)


def defer_gelu(
    engine: WeightGradDeferrer, gelu: GeluFloat8Input, plain: Callable[..., Any], x: Tensor, linear: nn.Module
) -> Tensor:
    """GELU, and then the linear, which defers."""
    return GeluInput.forward(gelu, x, linear)


def defer_grouped(
    engine: WeightGradDeferrer,
    product: titan_fp8.Float8GroupedMM,
    plain: Callable[..., Tensor],
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor,
) -> Tensor:
    """Experts in float8 whose weight gradients wait. ``mat_b`` is a parameter, or the transpose of one."""
    parameter = mat_b if mat_b.is_leaf else mat_b._base
    transposed = parameter is not None and parameter is not mat_b and parameter.shape == mat_b.mT.shape
    if not mat_b.requires_grad or not isinstance(parameter, nn.Parameter) or not (transposed or parameter is mat_b):
        return plain(mat_a, mat_b, offs=offs)
    return titan_fp8.grouped_mm_deferred(
        mat_a, mat_b, offs, product.recipe, anchor=engine.anchor, parameter=parameter, defer=engine.defer,
        to_parameter=_transposed if transposed else None,
    )  # fmt: skip


def _transposed(grad: Tensor) -> Tensor:
    return grad.mT


DEFERRING_RULES: Mapping[type[nn.Module], Callable[..., Any]] = {
    titan_fp8.Float8Linear: defer_linear,
    SharedFloat8Input: defer_shared,
    GatedFloat8Input: defer_gated,
    GeluFloat8Input: defer_gelu,
    titan_fp8.Float8GroupedMM: defer_grouped,
}
"""For `titan_pipeline.runtime.TorchStage`: how float8 layers take part in schedules that split backward."""


def convert_to_float8(
    model: nn.Module, config: Float8Config, *, tokens: int, fuse_norms: bool = True, eager: bool = True
) -> titan_fp8.ConversionReport:
    """Make the linears and experts of ``model`` compute in float8; in place, on any device, before anything is cut.

    Args:
        model: The whole model or a pipeline stage.
        config: Recipe and exceptions.
        tokens: That one rank computes at once, for the prediction of speed.
        fuse_norms: Normalize and cast in one pass. Not where something stands between a norm and its linears: tensor
            parallelism's gather, a schedule that takes the norm's weight gradient apart.
        eager: The blocks will not be compiled; for the prediction of speed.

    Returns:
        What was converted, what was not, and why.

    Raises:
        ValueError: The recipe's weights cannot be gathered in float8 as asked.
    """
    skip = skip_patterns(model, config)
    report = titan_fp8.convert_to_float8(
        model,
        config.recipe,
        skip=skip,
        strict_filters=False,  # a stage need not hold what a pattern protects
        min_speedup=config.min_speedup,
        tokens=tokens,
        eager=eager,
        fsdp_all_gather=_GATHER[config.all_gather],
    )
    for name, module in list(model.named_modules()):
        if type(module) is SharedInput:
            model.set_submodule(name, SharedFloat8Input())
        elif type(module) is GatedInput:
            gated = GatedFloat8Input()
            gated.swiglu_kernel = module.swiglu_kernel
            model.set_submodule(name, gated)
        elif type(module) is GeluInput:
            model.set_submodule(name, GeluFloat8Input())
        elif isinstance(module, Experts | StackedExperts) and titan_fp8.matching_pattern(name, skip) is None:
            module.grouped_mm = titan_fp8.Float8GroupedMM(config.recipe)
    if fuse_norms:
        _cast_in_norms(model)
    return report


def check_float8(config: Config, model: nn.Module) -> None:
    """Refuse what `convert_to_float8` would refuse on a rank, and patterns that protect nothing.

    Raises:
        ValueError: Names the key.
    """
    recipe = config.float8.recipe
    check_skip(model, config.float8)
    if recipe != "none" and config.float8.all_gather == "on" and not titan_fp8.Recipe.get(recipe).fsdp_all_gather:
        raise ValueError(
            f"float8.all_gather='on' and float8.recipe={recipe!r}: a scale of this recipe spans the shards of several "
            "ranks. Use recipe 'blockwise' or 'tensorwise', or all_gather='auto'."
        )
    if recipe != "none" and config.float8.all_gather == "on" and _reshards_to_some(config):
        raise ValueError(
            f"float8.all_gather='on', and parallel.reshard={config.parallel.reshard!r} or an override of it keeps weights "
            "sharded over some of the ranks: torch cannot do that to weights that are gathered in float8. Use "
            "all_gather='auto', or 'always' in place of the number."
        )


def gathers_float8_weights(config: Config) -> bool:
    """Whether FSDP gathers in float8 what it can: as configured, and by itself unless weights stay sharded over some ranks."""
    float8 = config.float8
    if float8.recipe == "none" or float8.all_gather == "off":
        return False
    return float8.all_gather == "on" or not _reshards_to_some(config)


def _reshards_to_some(config: Config) -> bool:
    parallel = config.parallel
    return any(isinstance(to, int) for to in (parallel.reshard, *parallel.reshard_overrides.values()))


def check_skip(model: nn.Module, config: Float8Config) -> None:
    """Refuse with a ValueError a pattern of ``float8.skip`` that names no linear and no experts of the whole model."""
    if config.recipe == "none":
        return
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Experts, StackedExperts))]
    tied = [  # of modules with the weight of such a layer
        other.rpartition(".")[0]
        for name, every in parameter_names(model).items()
        if name.rpartition(".")[0] in names
        for other in every
    ]
    for pattern in config.skip:
        if not any(titan_fp8.matching_pattern(name, (pattern,)) for name in [*names, *tied]):
            raise ValueError(
                f"float8.skip: {pattern!r} matches no linear layer and no experts of {type(model).__name__}, so what it should "
                f"keep out of float8 would not be. It has {', '.join(names[:8])}, …"
            )


def describe_conversion(
    reports: Sequence[titan_fp8.ConversionReport], config: Float8Config, parts: Sequence[nn.Module], *, staged: bool
) -> str:
    """One line for the log: how much of the model is float8, and if it is nothing, why.

    Args:
        reports: Of this rank's parts.
        config: What was asked for.
        parts: These.
        staged: They are stages of a pipeline.
    """
    experts = sum(isinstance(module, titan_fp8.Float8GroupedMM) for part in parts for module in part.modules())
    converted = sum(len(report.converted) for report in reports)
    total = converted + sum(len(report.skipped) for report in reports)
    where = " of this rank's stages" if staged else ""
    if converted or experts:
        kept = "half the bytes for backward, " if titan_fp8.Recipe.get(config.recipe).wgrad == "fp8" else ""
        more = f", and the experts of {experts} layers: {kept}{_OF_EXPERTS}" if experts else ""
        return f"float8.recipe={config.recipe!r}: {converted} of {total} linear layers{where}{more}"
    named = [(name, reason) for report in reports for name, reason in report.skipped.items()]
    told = [(name, reason) for name, reason in named if "skip pattern" not in reason] or named
    example = f" {told[0][0]} {told[0][1]}." if told else ""
    return (
        f"float8.recipe={config.recipe!r} converts none of {total} linear layers{where}: they compute in high precision."
        f"{example} float8.min_speedup=0 converts any size."
    )


_OF_EXPERTS = "0.86 (blockwise) or 1.06 (rowwise) of bfloat16's time on one H200; float8.skip"


def conversion_table(report: titan_fp8.ConversionReport) -> str:
    """What was converted and what not, one line for layers of one kind."""
    return "\n".join(dataclasses.replace(report, all_gather="").summary().splitlines()[1:])


def _cast_in_norms(model: nn.Module) -> None:
    """Let norms be computed by the linears that read them, in blocks that name all readers of the norm."""
    for block in model.modules():
        # of the class itself: a subclass may read its norms elsewhere too
        pairs = traits_of(block).norm_readers if "norm_readers" in vars(type(block)) else ()
        for name in dict(pairs):
            # None where the block has no such part: it has another, which reads the norm itself
            readers = [_named(block, reader) for norm, reader in pairs if norm == name]
            if all(isinstance(getattr(reader, "linears", None), SharedFloat8Input) for reader in readers):
                _cast_in_norm(_named(block, name))


def _named(block: nn.Module, name: str) -> Any:
    try:
        return attrgetter(name)(block)
    except AttributeError:
        raise ValueError(
            f"norm_readers of {type(block).__name__} names {name!r}, which it has not. Name norms, and the modules that read "
            "them, as attributes of the block."
        ) from None


def _cast_in_norm(norm: nn.Module) -> None:
    if type(norm) is RMSNorm and norm.elementwise_affine:
        norm.__class__ = CastingNorm
    elif type(norm) is ZeroCentredRMSNorm:
        norm.__class__ = CastingZeroCentredNorm
    elif type(norm) is nn.LayerNorm and norm.elementwise_affine and getattr(norm, "bias", None) is not None:
        norm.__class__ = CastingLayerNorm
    elif type(norm) is ModulatedNorm:
        norm.__class__ = CastingModulatedNorm


def share_scales(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Tell the float8 layers of a cut model which ranks hold the other parts of its tensors."""
    for module in model.modules():
        if isinstance(module, titan_fp8.Float8Linear):
            module.amax_group = group
