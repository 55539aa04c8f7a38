"""The weight gradients that wait for their W action."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

ELSEWHERE = (
    "this forward was recorded by a WeightGradEngine, but its backward runs outside of the engine: its weight gradients "
    "would be lost. Run the backward through the stage, or inside engine.deferring()."
)

Rule = Callable[..., Any]
"""``rule(engine, module, plain_forward, *args, **kwargs)``: the module's output, deferring if the engine asks to."""


Note = tuple[Sequence[Tensor], Callable[..., Sequence[Tensor | None]], tuple[Any, ...]]
"""Parameters, and what gives their gradients: ``compute(*given)``; None for one that has no gradient."""


def others_save() -> bool:
    """Whether a saved-tensor hook (a checkpoint, an offload) is active. Undocumented; checked on torch 2.11 and 2.15 by
    ``test_active_saved_tensor_hooks_are_recognised``. Where it is missing, the answer that is always right is yes.
    """
    inner: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    top = getattr(inner._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


class WeightGradQueue:
    """The weight gradients of one microbatch that are not computed yet."""

    def __init__(self, through_autograd: bool = False) -> None:
        self.notes: list[Note] = []
        self.little_graphs: list[LittleGraph] = []
        """Of operations that no rule covers; see `titan_pipeline.runtime.weight_grad.generic`."""
        self._through_autograd = through_autograd

    def parameters(self) -> set[int]:
        """Identities of the parameters that wait."""
        return {id(p) for noted, _, _ in self.notes for p in noted} | {
            id(p) for g in self.little_graphs for p in g.leaves
        }

    def run(self) -> None:
        """Compute them, in the order they were noted, and accumulate each parameter once."""
        totals: dict[int, tuple[Tensor, Tensor]] = {}

        def add(parameter: Tensor, grad: Tensor) -> None:
            known = totals.get(id(parameter))
            totals[id(parameter)] = (parameter, grad if known is None else known[1] + grad)

        with torch.no_grad():
            for parameters, compute, given in self.notes:
                for parameter, grad in zip(parameters, compute(*given), strict=True):
                    if grad is not None:
                        add(parameter, grad)
            self.notes.clear()
            for parameter, grad in self._of_little_graphs(totals):
                add(parameter, grad)
            accumulate(totals.values(), self._through_autograd)

    def _of_little_graphs(self, noted: Mapping[int, Any]) -> Sequence[tuple[Tensor, Tensor]]:
        """Let autograd add the gradients of all little graphs to their parameters, in one call.

        Returns:
            Parameter and gradient of those that have notes too, to be added with them.
        """
        graphs, self.little_graphs = self.little_graphs, []
        leaves = list({id(p): p for g in graphs for p in g.leaves}.values())
        edges = [e for g in graphs for e in g.edges]
        grads = [grad for g in graphs for grad in g.grads]
        if not edges:
            return ()
        alone = [p for p in leaves if id(p) not in noted]
        both = [p for p in leaves if id(p) in noted]
        parts: Sequence[Tensor] = ()
        if both:
            parts = torch.autograd.grad(edges, both, grads, retain_graph=bool(alone))
        if alone:
            torch.autograd.backward(edges, grads, inputs=alone)
        return list(zip(both, parts, strict=True))


class LittleGraph:
    """The graph of one operation, from its results to detached activations and to parameters."""

    __slots__ = ("edges", "grads", "inputs", "leaves")

    def __init__(self, edges: list[GradientEdge], inputs: list[Tensor], leaves: tuple[Tensor, ...]) -> None:
        self.edges = edges
        self.inputs = inputs
        self.leaves = leaves
        self.grads: list[Tensor] = []

    def input_gradients(self, grads: Sequence[Tensor | None], queue: WeightGradQueue) -> Sequence[Tensor | None]:
        """Gradients of the activations; the parameters' are noted for later."""
        self.edges = [e for e, g in zip(self.edges, grads, strict=True) if g is not None]
        self.grads = [g for g in grads if g is not None]
        queue.little_graphs.append(self)
        inputs, self.inputs = self.inputs, []
        if not inputs:
            return ()
        return torch.autograd.grad(self.edges, inputs, self.grads, retain_graph=True, allow_unused=True)


class Deferring(Protocol):
    """What a rule needs of the engine."""

    anchor: Tensor
    """Differentiable input of deferring functions, in the place of the parameter."""
    active: bool
    queue: WeightGradQueue | None
    """Where notes go while a backward of the stage runs."""

    def defer(self, parameter: Tensor, compute: Callable[..., Tensor], *given: Any) -> None:
        """Note a weight gradient for later: ``compute(*given)``, which keeps what is given alive until then."""
        ...


def accumulate(pairs: Iterable[tuple[Tensor, Tensor]], through_autograd: bool = False) -> None:
    """Add each gradient to its parameter's ``.grad``, with every hook that a backward would have called.

    Call without grad mode; each parameter once. Autograd's own accumulation costs about 9 us per parameter when called from
    Python, adding directly 1 us. Adding directly is the same unless someone listens (`has_hooks`): a first gradient gets the
    layout of its parameter, which fused optimizers take for granted.

    Args:
        pairs: ``(parameter, gradient)``.
        through_autograd: Use autograd's accumulation for all, not only for parameters with hooks.
    """
    parameters: list[Tensor] = []
    grads: list[Tensor] = []
    for parameter, grad in pairs:
        if through_autograd or has_hooks(parameter):
            parameters.append(parameter)
            grads.append(grad)
            continue
        known = parameter.grad
        if known is not None:
            known.add_(grad)
        else:
            # FSDP2 asks for sums in the precision of its reduction
            wanted = getattr(parameter, "grad_dtype", None)
            own = grad if wanted is None or wanted == grad.dtype else grad.to(wanted)
            if parameter.is_contiguous():
                own = own.contiguous()
            elif own.stride() != parameter.stride():
                own = torch.empty_like(parameter, dtype=own.dtype).copy_(own)
            parameter.grad = own
    if parameters:
        torch.autograd.backward(parameters, grads)


def has_hooks(parameter: Tensor) -> bool:
    """Whether a gradient hook or a post-accumulate hook is registered on the tensor.

    Two attributes that are not documented say so. They are read here and nowhere else; checked on torch 2.11 and 2.15 by
    ``test_hooked_parameters_are_recognised``.
    """
    return bool(getattr(parameter, "_backward_hooks", None)) or bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
