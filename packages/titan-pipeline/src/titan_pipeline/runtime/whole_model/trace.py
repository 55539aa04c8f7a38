"""One run of the whole model on an example: which module is called when, with what, and at what cost."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

_LARGE = 1 << 20
"""Elements of a tensor on the meta device that gets numbers of its own."""

CallId = tuple[str, int]
"""Name of a module and number of its call, from 0."""


@dataclass(slots=True)
class ModuleCall:
    """One call of a module."""

    id: CallId
    begin: int
    """Calls and returns are numbered in order."""
    stack: tuple[CallId, ...]
    """The calls it happened in, outermost first."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flops_before: float
    end: int = -1
    output: Any = None


@dataclass(slots=True)
class ModelTrace:
    """The calls of one run of a model."""

    calls: dict[CallId, ModuleCall] = field(default_factory=dict[CallId, ModuleCall])
    counts: Counter[str] = field(default_factory=Counter[str])
    output: Any = None
    flops: float = 0.0
    """0 where they could not be counted."""
    hooked: frozenset[str] = frozenset()
    """Modules whose results the model collects by forward hooks."""

    def of(self, name: str) -> list[ModuleCall]:
        """All calls of a module."""
        return [self.calls[name, k] for k in range(self.counts[name])]


def copied(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares every parameter and buffer.

    Raises:
        ValueError: The model holds something that cannot be copied.
    """
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    try:
        copy_of = copy.deepcopy(model, {id(t): t for t in tensors})
    except Exception as err:
        raise ValueError(
            f"the model cannot be copied ({type(err).__name__}: {err}), which split does to give every stage its part. "
            "Split it before it is wrapped or compiled, and without process groups, locks or results in its attributes."
        ) from err
    for config in [getattr(module, "config", None) for module in copy_of.modules()]:
        if getattr(config, "use_cache", None):
            cast(Any, config).use_cache = False  # keys and values of other stages' layers are elsewhere
    return copy_of


def with_numbers(model: nn.Module) -> nn.Module:
    """The model itself; or, if parts of it are on the meta device, a copy with numbers on the CPU in their place.

    Large ones take no memory: a matrix is one row, repeated by a stride of zero, and all else is zeros never written.
    """
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return model
    made = copied(model)
    random = torch.Generator().manual_seed(0)
    known: dict[int, Tensor] = {}

    def numbers(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in known:
            value = _numbers_like(tensor, random)
            known[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
        return known[id(tensor)]

    for module in made.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({k: cast(Any, numbers(t)) for k, t in tensors.items() if t is not None})
    return made


def _numbers_like(tensor: Tensor, random: torch.Generator) -> Tensor:
    """Random numbers of a size that layers keep; no numbers for masks and indices, which are True and 0."""
    if not tensor.is_floating_point():
        return torch.full(tensor.shape, tensor.dtype is torch.bool, dtype=tensor.dtype)
    large = tensor.numel() > _LARGE
    if large and tensor.dim() != 2:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    shape = tensor.shape[-1:] if large else tensor.shape
    scale = max(1, tensor.numel() // max(1, max(tensor.shape, default=1))) ** -0.5
    return (scale * torch.randn(shape, generator=random)).to(tensor.dtype).expand(tensor.shape)


def take_tensors(modules: Sequence[nn.Module], model: nn.Module) -> None:
    """Give stages the model's own parameters and buffers, by name."""
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for stage in modules:
        for name, module in stage.named_modules(remove_duplicate=False):
            prefix = f"{name}." if name else ""
            for held in (module._parameters, module._buffers):
                held.update({k: cast(Any, tensors[prefix + k]) for k, t in held.items() if t is not None})


def trace_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelTrace:
    """Run ``model`` on an example, in evaluation mode and without gradients, and write down every call of a module."""
    try:
        return _Tracer(copied(model).eval()).run(args, kwargs)
    except AssertionError:  # torch's counter refuses modules that are given a parameter
        return _Tracer(copied(model).eval(), count=False).run(args, kwargs)


def _flop_counter() -> "FlopCounterMode":
    from torch.utils.flop_counter import FlopCounterMode  # loads triton, and only the cut of a whole model counts

    return FlopCounterMode(display=False)


class _Tracer:
    """Hooks on every module of a copy of the model."""

    def __init__(self, model: nn.Module, count: bool = True) -> None:
        self._model = model
        self._trace = ModelTrace()
        self._stack: list[ModuleCall] = []
        self._clock = 0
        self._flops = _flop_counter() if count else None
        self._hooks: set[int] = set()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelTrace:
        """One forward."""
        trace = self._trace
        for name, module in self._model.named_modules():
            module.register_forward_pre_hook(
                lambda _, a, k, n=name: self._enter(n, a, k), with_kwargs=True, prepend=True
            )
            self._hooks.add(module.register_forward_hook(lambda _, a, o: self._leave(o)).id)
        with torch.no_grad(), self._flops or nullcontext():
            trace.output = self._model(*args, **kwargs)
        trace.flops = self._count()
        trace.hooked = frozenset(
            name
            for name, module in self._model.named_modules()
            if any(k not in self._hooks for k in module._forward_hooks)
        )
        return trace

    def _enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._clock += 1
        trace = self._trace
        id = (name, trace.counts[name])
        trace.counts[name] += 1
        trace.calls[id] = ModuleCall(id, self._clock, tuple(c.id for c in self._stack), args, kwargs, self._count())
        self._stack.append(trace.calls[id])

    def _leave(self, output: Any) -> None:
        self._clock += 1
        call = self._stack.pop()
        call.end, call.output = self._clock, output

    def _count(self) -> float:
        return 0.0 if self._flops is None else float(self._flops.get_total_flops())


def list_items(model: nn.Module) -> list[str]:
    """Names of the items of the outermost lists of layers (``nn.ModuleList``, ``nn.Sequential``)."""
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        children = list(module.named_children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1:
            found.extend(prefix + child for child, _ in children)
            return
        for child, inner in children:
            visit(prefix + child, inner)

    visit("", model)
    return found


def has_only_plain_leaves(value: Any) -> bool:
    """Whether a result is made of tensors and plain values, so that another one of its kind can be put together."""
    return all(x is None or isinstance(x, Tensor | bool | int | float | str) for x in tree_flatten(value)[0])
