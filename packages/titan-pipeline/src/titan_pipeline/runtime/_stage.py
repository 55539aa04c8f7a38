"""A stage of a model, as the executor sees it, and the one that wraps an ``nn.Module``."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from titan_pipeline.runtime._weight_grad import Queue, Rule, WeightGradEngine


class Stage(Protocol):
    """What a host framework implements to run under the executor. Tensors are opaque to it, transports aside."""

    index: int
    """Position in the model, from 0."""

    def configure(self, splits_backward: bool) -> None:
        """Called when a schedule is set: whether this stage's backwards will come in two halves."""
        ...

    def forward(self, microbatch: int, inputs: tuple[Any, ...], target: Any, training: bool) -> tuple[Any, ...]:
        """Run forward and keep what a backward needs. ``target`` is given on the last stage only: return the loss,
        summed over tokens, as the only output. ``target=None`` there means inference: return the outputs.
        """
        ...

    def backward(self, microbatch: int, grads: tuple[Any, ...], defer: bool) -> tuple[Any, ...]:
        """Gradients of the inputs, given those of the outputs (on the last stage: a float, the weight of the loss).
        With ``defer`` the weight gradients wait for `backward_weight`.
        """
        ...

    def backward_weight(self, microbatch: int) -> None:
        """The deferred weight gradients of one microbatch."""
        ...

    def finish(self) -> None:
        """All gradients of the step are complete: the place to reduce them over data-parallel ranks."""
        ...

    def clear(self) -> None:
        """Drop everything kept for microbatches, after a step that failed."""
        ...


class TorchStage:
    """A stage that is an ``nn.Module`` taking and returning tensors (or tuples of them).

    Args:
        module: The stage's layers.
        index: Position in the model.
        loss: On the last stage: ``loss(output, target)``, summed over tokens, not averaged.
        finish: Called with the module when the step's gradients are complete.
        rules: How layers defer their weight gradients, by type, on top of the default ones; see
            `titan_pipeline.runtime.WeightGradEngine`. Types not covered get their gradients with the input gradient.
        through_autograd: For DistributedDataParallel; see `titan_pipeline.runtime.WeightGradEngine`.
        split: False never defers: W actions then find nothing left to do.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        finish: Callable[[nn.Module], None] | None = None,
        rules: Mapping[type[nn.Module], Rule] | None = None,
        through_autograd: bool = False,
        split: bool = True,
    ) -> None:
        self.module = module
        self.index = index
        self._loss = loss
        self._finish = finish
        self._split = split
        self._rules = rules
        self._through_autograd = through_autograd
        self._engine: WeightGradEngine | None = None
        self._seed = torch.zeros(())
        self._kept: dict[int, tuple[tuple[Tensor, ...], list[Any], list[bool]]] = {}
        self._queues: dict[int, Queue] = {}

    def configure(self, splits_backward: bool) -> None:
        """See `Stage.configure`: the engine is attached only while it is needed."""
        wanted = splits_backward and self._split
        if wanted and self._engine is None:
            self._engine = WeightGradEngine(self.module, self._rules, through_autograd=self._through_autograd)
        elif not wanted and self._engine is not None:
            self._engine.detach()
            self._engine = None

    def forward(self, microbatch: int, inputs: tuple[Any, ...], target: Any, training: bool) -> tuple[Any, ...]:
        """See `Stage.forward`."""
        if not training:
            with torch.no_grad():
                return self._run(inputs, target)
        if self.index > 0:
            inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in cast(tuple[Tensor, ...], inputs))
        if self._engine is None:
            outputs = self._run(inputs, target)
        else:
            with self._engine.recording():
                outputs = self._run(inputs, target)
        if target is not None:
            self._seed = outputs[0].detach()  # dtype and device of the loss
        tracked = [isinstance(o, Tensor) and o.requires_grad for o in outputs]
        # Only the edge into the graph is kept, not the output itself: after the send nobody needs its data.
        edges = [get_gradient_edge(o) for o, t in zip(outputs, tracked, strict=True) if t]
        self._kept[microbatch] = (inputs, edges, tracked)
        return tuple(o.detach() if isinstance(o, Tensor) else o for o in outputs)

    def backward(self, microbatch: int, grads: tuple[Any, ...], defer: bool) -> tuple[Any, ...]:
        """See `Stage.backward`."""
        inputs, edges, tracked = self._kept.pop(microbatch)
        if len(grads) == 1 and isinstance(grads[0], float):
            grads = (self._seed.new_full((), grads[0]),)
        given = [g for g, t in zip(grads, tracked, strict=True) if t]
        pairs = [(e, g) for e, g in zip(edges, given, strict=True) if g is not None]
        if self._engine is None:
            _run_backward(pairs)
        else:
            with self._engine.deferring() as queue:
                _run_backward(pairs)
            if defer:
                self._queues[microbatch] = queue
            else:
                queue.run()
        if self.index == 0:
            return ()
        return tuple(x.grad if x.is_floating_point() else None for x in inputs)

    def backward_weight(self, microbatch: int) -> None:
        """See `Stage.backward_weight`."""
        queue = self._queues.pop(microbatch, None)
        if queue is not None:
            queue.run()

    def finish(self) -> None:
        """See `Stage.finish`."""
        if self._finish is not None:
            self._finish(self.module)

    def clear(self) -> None:
        """See `Stage.clear`."""
        self._kept.clear()
        self._queues.clear()

    def _run(self, inputs: tuple[Any, ...], target: Any) -> tuple[Any, ...]:
        output = self.module(*inputs)
        if target is not None:
            if self._loss is None:
                raise ValueError(
                    f"stage {self.index} is the last and got a target, but no loss. Pass loss= to TorchStage."
                )
            return (self._loss(output, target),)
        return output if isinstance(output, tuple) else (output,)


def _run_backward(pairs: list[tuple[Any, Tensor]]) -> None:
    if pairs:
        edges, grads = zip(*pairs, strict=True)
        torch.autograd.backward(list(edges), list(grads))
