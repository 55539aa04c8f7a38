"""Defer the weight gradients of custom autograd functions and of compiled regions.

Problem: such a function is one node of the graph, and its backward computes all gradients. No operation inside can be cut.

Idea: in ``ctx.needs_input_grad`` PyTorch says which gradients a backward must compute, and a function that was written with
care computes no others. So after a stage's forward its graph is searched for custom functions that take a parameter (or a
view or a cast of one). Their parameters are struck from ``ctx.needs_input_grad``; the I pass then calls the backward for the
activations alone, and the W pass calls it once more, for the parameters alone, with the same context, saved tensors and
output gradients. Both calls together do the work of one, but for what both halves share.

A backward that does not ask returns all gradients in the I pass: that is right, not deferred, and reported. It runs once.
A compiled region asks if it was compiled with `titan_pipeline.runtime.split_backend`.

Not deferred either: functions inside a checkpoint or another saved-tensor hook, and parameters with gradient hooks, which
autograd would call with None.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from titan_pipeline.runtime.weight_grad.queue import ELSEWHERE, Deferring, has_hooks

COMPILED = "inside a compiled module, whose backward is one piece: compile it with backend=titan_pipeline.runtime.split_backend()"
WEIGHT_PASS = "titan_pipeline_weight_pass"
"""Attribute of a context: the W half, set by a backward that has it ready; it returns one gradient or None per argument."""

_VIEWS = frozenset({
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0",
    "AliasBackward0", "ToCopyBackward0", "SelectBackward0", "SliceBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
    "SqueezeBackward1",
})  # fmt: skip
"""Operations that save no tensors: their gradients can be computed after the I pass has been through them."""


class _Weight(NamedTuple):
    """An input of a function that depends on one parameter alone."""

    argument: int
    """Its number among the arguments, as in ``ctx.needs_input_grad`` and in what backward returns."""
    tensor: int
    """Its number among the tensors, as in ``next_functions`` and in what a hook is given."""
    edge: GradientEdge
    parameter: nn.Parameter


class FunctionSplit:
    """Splits the custom functions in the graphs of one engine's stage."""

    def __init__(self, engine: Deferring) -> None:
        self._engine = engine
        self._together: dict[type, set[int]] = {}
        """By function: inputs whose gradients its backward returned although they were not wanted."""
        self._looks = True
        self.deferred: set[int] = set()
        """Identities of the parameters that were deferred so far."""
        self.refused: dict[int, str] = {}
        """By identity of a parameter that could not be deferred: why."""

    def arrange(self, outputs: Iterable[Any]) -> None:
        """After a forward: split what the graph holds. A stage whose first microbatch has no such function is left alone."""
        if not self._looks:
            return
        found = False
        for node in _custom_functions(outputs):
            weights = _weights(node)
            if weights:
                found = True
                self._arrange(node, weights)
        self._looks = found

    def _arrange(self, node: Any, weights: list[_Weight]) -> None:
        name = node._forward_cls.__name__
        together = self._together.get(node._forward_cls, set())
        wanted: list[_Weight] = []
        for weight in weights:
            if has_hooks(weight.parameter):
                reason = "it has a gradient hook, which autograd would call without a gradient"
            elif weight.argument in together:
                reason = (
                    "its backward returns all gradients at once: let it compute those that ctx.needs_input_grad names"
                )
                if name == "CompiledFunction":
                    reason = COMPILED
            elif any(saved.unpack_hook is not None for saved in _raw_saved(node)):
                reason = "it is inside a checkpoint or another saved-tensor hook"
            else:
                wanted.append(weight)
                continue
            self.refused[id(weight.parameter)] = f"{name}: {reason}" if reason != COMPILED else reason
        if wanted:
            late = {w.argument for w in wanted}
            node.needs_input_grad = tuple(need and i not in late for i, need in enumerate(node.needs_input_grad))
            node.register_hook(_Arrival(self, node, wanted))

    def arrived(self, node: Any, weights: list[_Weight], results: Sequence[Any], grads: Sequence[Any]) -> None:
        """The I half of a function has run: note the W half."""
        queue = self._engine.queue
        if queue is None:
            raise RuntimeError(ELSEWHERE)
        kind = node._forward_cls
        returned = {w.argument for w in weights if results[w.tensor] is not None}
        if returned:
            self._together.setdefault(kind, set()).update(returned)
            self.deferred.difference_update(id(w.parameter) for w in weights if w.argument in returned)
        late = [w for w in weights if w.argument not in returned]
        if late:
            self.deferred.update(id(w.parameter) for w in late)
            queue.notes.append(
                ([w.parameter for w in late], _weight_gradients, (_LateContext(node, late), late, grads))
            )


class _Arrival:
    """Hook of a function's node."""

    def __init__(self, split: FunctionSplit, node: Any, weights: list[_Weight]) -> None:
        self._given: tuple[FunctionSplit, Any, list[_Weight]] | None = (split, node, weights)

    def __call__(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
        assert self._given is not None
        (split, node, weights), self._given = self._given, None  # the node holds this hook
        grads = [_defined(g, like) for g, like in zip(grad_outputs, node._input_metadata, strict=True)]
        split.arrived(node, weights, grad_inputs, grads)


class _LateContext:
    """A function's context, after autograd has freed its node."""

    def __init__(self, node: Any, weights: list[_Weight]) -> None:
        late = {w.argument for w in weights}
        self._node = node
        self.needs_input_grad = tuple(i in late for i in range(len(node.needs_input_grad)))
        self.ready = getattr(node, WEIGHT_PASS, None)
        self.saved_tensors = () if self.ready is not None else node.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _weight_gradients(ctx: _LateContext, weights: list[_Weight], grads: list[Tensor]) -> list[Tensor | None]:
    """The W half."""
    if ctx.ready is not None:
        results = ctx.ready()
    else:
        kind = ctx._forward_cls
        plain = kind.vjp is torch.autograd.Function.vjp
        results = (kind.backward if plain else kind.vjp)(ctx, *grads)
    results = results if isinstance(results, tuple | list) else (results,)
    taken = {_memory(tensor) for tensor in (*grads, *ctx.saved_tensors) if isinstance(tensor, Tensor)}
    found: list[Tensor | None] = []
    for weight in weights:
        grad = _to_parameter(weight, cast(Tensor | None, results[weight.argument]))
        if grad is not None:
            if _memory(grad) in taken:  # a parameter's gradient is added to in place
                grad = grad.clone()
            taken.add(_memory(grad))
        found.append(grad)
    return found


def _memory(tensor: Tensor) -> int:
    """The same for tensors that share memory; of a tensor made of others, its identity."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return id(tensor)


def _to_parameter(weight: _Weight, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    if not hasattr(weight.edge.node, "variable"):
        meta = cast(Any, weight.edge.node)._input_metadata[weight.edge.output_nr]
        (grad,) = torch.autograd.grad([weight.edge], [weight.parameter], [grad.sum_to_size(meta.shape).to(meta.dtype)])
        return grad
    return grad.sum_to_size(weight.parameter.shape).to(weight.parameter.dtype)


def _custom_functions(outputs: Iterable[Any]) -> Iterator[Any]:
    """All custom functions' nodes in the graph of the outputs."""
    stack = [o.grad_fn for o in outputs if isinstance(o, Tensor) and o.grad_fn is not None]
    seen: set[Any] = set(stack)
    while stack:
        node = stack.pop()
        if isinstance(node, BackwardCFunction):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _weights(node: Any) -> list[_Weight]:
    """Inputs of a function that are parameters, or views of one; none if they are all vectors, or all that there is."""
    arguments = [i for i, need in enumerate(node.needs_input_grad) if need]
    tensors = [
        (i, following, number) for i, (following, number) in enumerate(node.next_functions) if following is not None
    ]
    found: list[_Weight] = []
    for argument, (tensor, following, number) in zip(arguments, tensors, strict=True):
        parameter = _parameter_behind(following)
        if parameter is not None:
            found.append(_Weight(argument, tensor, GradientEdge(following, number), parameter))
    if len(found) == len(node.next_functions) or all(w.parameter.dim() < 2 for w in found):
        return []
    return found


def _parameter_behind(node: Any) -> nn.Parameter | None:
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, nn.Parameter) else None


def parameters_behind(tensor: Tensor) -> tuple[nn.Parameter, ...]:
    """The parameters that a tensor is made of by a custom function of nothing else, such as a fake quantization."""
    node = tensor.grad_fn
    if not isinstance(node, BackwardCFunction):
        return ()
    found = [_parameter_behind(following) for following, _ in node.next_functions]
    return () if None in found else tuple(p for p in found if p is not None)


def _raw_saved(node: Any) -> Sequence[Any]:
    return node._raw_saved_tensors or ()


def _defined(grad: Tensor | None, meta: Any) -> Tensor:
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
