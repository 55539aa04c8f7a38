"""Defer the weight gradients of any operation on a parameter: convolutions, GPT-2's Conv1D, einsum, batched products.

Problem: the fast rules know a few layer types. Everything else (a convolution, a `Conv1D`, expert weights in one tensor, a
layer of your own) would compute its weight gradients with the input gradients, and a zero-bubble schedule would gain
nothing there.

Idea: cut the graph at the operation. While such a layer runs, a torch-function mode sees every operation that takes a
parameter and an activation. The operation then runs on detached activations, so that its own little graph ends there; one
node in the stage's graph stands for it. When that node's gradient arrives, the little graph is asked for the gradients of
the activations only (autograd then computes nothing else), and is kept. The W pass asks all little graphs of the
microbatch for the parameters' gradients, in one call of the engine: linear in the operations, nothing runs twice, and
the rest of the stage's graph has been freed in between. Kernels and shapes are autograd's own, so gradients are bit-equal
to an unsplit backward where a parameter is used once.

What depends on parameters alone (a transposed, cast or sliced weight) belongs to the little graph of the operation that
uses it.

A mode does not see custom autograd functions as operations: `titan_pipeline.runtime.weight_grad.functions`.

Not deferred, but right:

- operations without a contraction (a sum, a scale, a concatenation): their weight gradient is cheap, and keeping their
  inputs would cost memory;
- operations in place, tensor subclasses, and recurrences (an LSTM's backward is one piece);
- what runs inside a checkpoint or another saved-tensor hook: the little graph would be recomputed once more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from titan_pipeline.runtime.weight_grad.functions import parameters_behind
from titan_pipeline.runtime.weight_grad.queue import ELSEWHERE, Deferring, LittleGraph, others_save

_LEAVES = "_titan_pipeline_leaves"
"""Attribute of a tensor that depends on parameters alone: these parameters."""

_CHEAP = frozenset({
    "add", "sub", "mul", "div", "true_divide", "floor_divide", "pow", "rsub", "addcmul", "addcdiv", "lerp", "maximum",
    "minimum", "where", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "expand_as", "view_as", "reshape_as",
    "type_as", "to", "broadcast_tensors", "masked_fill", "masked_scatter", "index_add", "index_copy", "index_put",
    "scatter", "scatter_add", "copy", "clone", "eq", "ne", "lt", "le", "gt", "ge", "layer_norm", "rms_norm", "group_norm",
    "batch_norm", "instance_norm", "prelu",
})  # fmt: skip
"""Operations whose weight gradient costs no more than the operation itself."""

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Operations whose whole backward would run twice."""

_SEES_NONE: dict[str, Any] = {"has_torch_function": lambda given: False}  # pyright: ignore[reportUnknownLambdaType]
_ATTENTION = FunctionType(
    functional.multi_head_attention_forward.__code__, functional.__dict__ | _SEES_NONE,
    argdefs=functional.multi_head_attention_forward.__defaults__,
)  # fmt: skip
"""``nn.MultiheadAttention``'s function, which a mode sees as one, without the line that hands it to the mode. As one
operation its attention would run backward in both halves."""


class SplitMode(TorchFunctionMode):
    """While active, operations on a parameter and an activation defer the parameter's gradient."""

    def __init__(self, engine: Deferring) -> None:
        super().__init__()
        self._engine = engine
        self.deferred: set[int] = set()
        """Identities of the parameters that were deferred so far."""
        self.cheap: set[int] = set()
        """Identities of the parameters that an operation with a cheap weight gradient used."""
        self.entered = False

    def wanted(self) -> bool:
        """Whether a forward that starts now should defer."""
        return self._engine.active and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See the class."""
        options = dict(kwargs or {})
        if not torch.is_grad_enabled():
            return func(*args, **options)
        if func is functional.multi_head_attention_forward:  # cut at its products, not as one operation
            with self:
                return _ATTENTION(*args, **options)
        tensors = list(_tensors((args, tuple(options.values()))))
        leaves = {id(p): p for t in tensors for p in _leaves_of(t)}
        if not leaves:
            return func(*args, **options)
        name = getattr(func, "__name__", "")
        if "embedding" not in name and all(_leaves_of(t) or _is_index(t) for t in tensors):
            return _mark(func(*args, **options), tuple(leaves.values()))
        if name.strip("_") in _CHEAP or (name.startswith("__r") and name.strip("_")[1:] in _CHEAP):
            self.cheap.update(leaves)
            return func(*args, **options)
        if name in _RECURRENT or not _can_be_cut(name, options, tensors) or others_save():
            return func(*args, **options)
        return self._cut(func, args, options, tuple(leaves.values()))

    def _cut(self, func: Any, args: Sequence[Any], options: dict[str, Any], leaves: tuple[Tensor, ...]) -> Any:
        """Run the operation on detached activations, and put one node in its place."""
        outer: list[Tensor] = []
        inner: list[Tensor] = []

        def detached(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not value.requires_grad or _leaves_of(value):
                    return value
                outer.append(value)
                inner.append(value.detach().requires_grad_())
                return inner[-1]
            if isinstance(value, tuple | list):
                return type(cast(Any, value))(detached(v) for v in cast(Sequence[Any], value))
            return value

        out = func(*(detached(a) for a in args), **{k: detached(v) for k, v in options.items()})
        results = out if isinstance(out, tuple) else (out,)
        tracked = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        if type(results) is not tuple or not tracked or any(type(r) is not Tensor for r in tracked):
            return func(*args, **options)  # a result of its own class, or nothing to differentiate
        self.deferred.update(id(p) for p in leaves)
        little = LittleGraph([get_gradient_edge(r) for r in tracked], inner, leaves)
        nodes = _Node.apply(self._engine.anchor, little, self._engine, [r.detach() for r in tracked], *outer)
        outs = dict(zip(map(id, tracked), nodes, strict=True))
        joined = tuple(outs.get(id(r), r) for r in results)
        return joined if isinstance(out, tuple) else joined[0]


class _Node(torch.autograd.Function):
    """What stands in the stage's graph for a little one."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, little: LittleGraph, engine: Deferring, outs: list[Tensor], *outer: Tensor
    ) -> Any:
        ctx.little, ctx.engine = little, engine
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        little, ctx.little = ctx.little, None
        queue = ctx.engine.queue
        if queue is None:
            raise RuntimeError(ELSEWHERE)
        return None, None, None, None, *little.input_gradients(grads, queue)


def contracting_parameters(module: nn.Module) -> list[str]:
    """Names of the module's own parameters that a contraction may use: those of two dimensions or more.

    Its own are also those in its parameter lists, and those that its parametrizations make a weight of.
    """
    holders = [n for n, m in module.named_children() if isinstance(m, nn.ParameterList | nn.ParameterDict)]
    inside = tuple(f"{n}." for n in (*holders, "parametrizations") if isinstance(getattr(module, n, None), nn.Module))
    return [
        n for n, p in module.named_parameters()
        if p.requires_grad and p.dim() > 1 and ("." not in n or n.startswith(inside))
    ]  # fmt: skip


def split_forward(mode: SplitMode, plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain`` under the mode."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if mode.entered or not mode.wanted():
            return plain(*args, **kwargs)
        mode.entered = True
        try:
            with mode:
                return plain(*args, **kwargs)
        finally:
            mode.entered = False

    return forward


def _can_be_cut(name: str, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    """Whether the operation makes new plain tensors and uses a weight, not only vectors."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    if in_place or options.get("out") is not None or any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
        return False
    return any(t.dim() > 1 for t in tensors if _leaves_of(t))


def _leaves_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The parameters a tensor depends on, if it depends on nothing else that needs a gradient."""
    if isinstance(tensor, nn.Parameter):
        return (tensor,) if tensor.requires_grad else ()
    marked = cast(tuple[Tensor, ...] | None, getattr(tensor, _LEAVES, None))
    return parameters_behind(tensor) if marked is None else marked


def _is_index(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _mark(result: Any, leaves: tuple[Tensor, ...]) -> Any:
    for tensor in _tensors((result,)):
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            setattr(tensor, _LEAVES, leaves)
    return result


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(cast(Iterable[Any], value))
