"""A stage that wraps an ``nn.Module``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from titan_pipeline.runtime.stage.data_parallel import Gather, wrapping_of
from titan_pipeline.runtime.transport.plain import rebuilt
from titan_pipeline.runtime.transport.tree import TensorTree, is_flat
from titan_pipeline.runtime.weight_grad.engine import WeightGradEngine
from titan_pipeline.runtime.weight_grad.queue import Rule, WeightGradQueue


class TorchStage:
    """A stage that is an ``nn.Module``.

    What it returns, the next stage's module is called with: a tuple as its arguments, anything else (a tensor, dict, list or
    dataclass of tensors, None and plain values; see `titan_pipeline.runtime.register_structure`) as the only one.
    Tensors may have any number, shape and data type; those that need no gradient here (detach them to say so) get none.

    The module may be wrapped by DistributedDataParallel or FSDP2 (itself or its children): gradients are then reduced
    once per step, when the stage's last gradient is there.

    Args:
        module: The stage's layers.
        index: Position in the model.
        loss: On the last stage: ``loss(output, target)``, summed over tokens, not averaged; or ``(loss, metrics)``, with
            anything beside it that `PipelineResult.metrics` then holds.
        aux_loss: Called with the module after each training forward: a scalar to add to the loss (such as a
            mixture-of-experts balance loss, its coefficient included), or None. See `Executor.step` for its weight.
        keywords: Names of the microbatch's extra inputs that this module takes; None for all of them.
        finish: Called with the module when the step's gradients are complete and reduced.
        gather: When parameters of an FSDP2 module are gathered: once a ``"step"`` (freed after the last gradient), or
            every ``"microbatch"``, as the module is configured.
        rules: How layers defer their weight gradients, by type, on top of the default ones; see
            `titan_pipeline.runtime.WeightGradEngine`. Layers of other types are split operation by operation.
        through_autograd: See `titan_pipeline.runtime.WeightGradEngine`.
        split: False never defers: W actions then find nothing left to do.

    Raises:
        ValueError: If a child of the module, but not the module itself, is DistributedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        aux_loss: Callable[[nn.Module], Tensor | None] | None = None,
        keywords: Sequence[str] | None = None,
        finish: Callable[[nn.Module], None] | None = None,
        gather: Gather = "step",
        rules: Mapping[type[nn.Module], Rule] | None = None,
        through_autograd: bool = False,
        split: bool = True,
    ) -> None:
        self.module = module
        self.index = index
        self._loss = loss
        self._aux_loss = aux_loss
        self._aux_weight = 0.0
        self._aux_sum: Tensor | None = None
        self._joins = False
        """Whether a training forward of this stage runs: its module may be in other stages too, or be called alone."""
        self._keywords = keywords
        self._finish = finish
        if aux_loss is not None:
            # Ahead of FSDP's hook, so that parameters are gathered before any gradient of the auxiliary loss flows.
            module.register_forward_hook(self._join_aux_loss, prepend=True)
        self._wrapping = wrapping_of(module, gather)
        self._split = split
        self._rules = rules
        self._through_autograd = through_autograd
        self._engine: WeightGradEngine | None = None
        self._seed: Tensor | None = None
        self._kept: dict[int, _Kept] = {}
        self._queues: dict[int, WeightGradQueue] = {}

    @property
    def not_deferred(self) -> dict[str, str]:
        """Name of each parameter whose gradient a split backward computes in its first half, and why.

        Empty while the schedule does not split backwards. Correct either way; but a stage that is compiled as a whole
        has nothing left for its W actions, and a zero-bubble schedule gains nothing there.
        """
        return {} if self._engine is None else dict(self._engine.not_deferred)

    @property
    def deferred_share(self) -> float:
        """Share of the weight gradients that wait for W actions, by the elements of weights; 0 without an engine.

        A forecast until the first backward, then what happened.
        """
        return 0.0 if self._engine is None else self._engine.deferred_share

    def configure(self, splits_backward: bool) -> None:
        """See `Stage.configure`: the engine is attached only while it is needed."""
        wanted = splits_backward and self._split
        if wanted and self._engine is None:
            self._engine = WeightGradEngine(self.module, self._rules, through_autograd=self._through_autograd)
        elif not wanted and self._engine is not None:
            self._engine.detach()
            self._engine = None

    def begin(self, training: bool, aux_weight: float) -> None:
        """See `Stage.begin`."""
        self._aux_weight = aux_weight
        self._aux_sum = None
        self._wrapping.release()  # the module may have run alone meanwhile, with other weights
        if training:
            self._wrapping.begin()

    def forward(
        self, microbatch: int, inputs: tuple[Any, ...], target: Any, extra: Mapping[str, Any], training: bool
    ) -> tuple[Any, ...]:
        """See `Stage.forward`."""
        if not training:
            args, _ = self._taken(inputs, False)
            with torch.no_grad():
                return self._run(args, target, extra, False)
        args, kept = self._taken(inputs, self.index > 0)
        with self._wrapping.forward():
            if self._engine is None:
                outputs = self._run(args, target, extra, True)
            else:
                with self._engine.recording():
                    outputs = self._run(args, target, extra, True)
                self._engine.arrange(outputs)
        metrics: tuple[Any, ...] = ()
        if target is not None:
            outputs, metrics = outputs[:1], outputs[1:]
            self._seed = outputs[0].detach()  # dtype and device of the loss
        tracked = [o.requires_grad for o in outputs]
        # Only the edge into the graph is kept, not the output itself: after the send nobody needs its data.
        edges = [get_gradient_edge(o) for o, t in zip(outputs, tracked, strict=True) if t]
        self._kept[microbatch] = _Kept(kept, edges, tracked)
        sent = [o.detach() for o in outputs]
        if isinstance(outputs, TensorTree):
            return outputs.holding(sent)
        return (*sent, *metrics)

    def _taken(self, inputs: tuple[Any, ...], differentiable: bool) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        """Arguments of the module, and their tensors as leaves of this stage's graph."""

        def leaf(tensor: Tensor, wanted: bool) -> Tensor:
            return tensor.detach().requires_grad_(wanted and differentiable)

        if isinstance(inputs, TensorTree):
            value, tensors = inputs.unpack(leaf)
            return (value if isinstance(value, tuple) else (value,)), tensors
        if not differentiable:
            return inputs, inputs
        tensors = tuple(leaf(x, x.is_floating_point() or x.is_complex()) for x in cast(tuple[Tensor, ...], inputs))
        return tensors, tensors

    def backward(self, microbatch: int, grads: tuple[Any, ...], defer: bool) -> tuple[Any, ...]:
        """See `Stage.backward`."""
        inputs, edges, tracked = self._kept.pop(microbatch)
        if self._seed is not None:  # the last stage: one over the divisor, a scalar that the host may not have read
            (scale,) = grads
            grads = (scale.to(self._seed) if isinstance(scale, Tensor) else self._seed.new_full((), scale),)
        given = [g for g, t in zip(grads, tracked, strict=True) if t]
        pairs = [(e, g) for e, g in zip(edges, given, strict=True) if g is not None]
        if self._engine is None:
            _run_backward(pairs)
        else:
            with self._engine.deferring() as queue:
                _run_backward(pairs)
            self._engine.check_observed(queue)
            if defer:
                self._queues[microbatch] = queue
            else:
                queue.run()
                self._wrapping.after_weights()
        if self.index == 0:
            return ()
        return tuple(x.grad for x in inputs)

    def backward_weight(self, microbatch: int) -> None:
        """See `Stage.backward_weight`."""
        queue = self._queues.pop(microbatch, None)
        if queue is not None:
            queue.run()
            self._wrapping.after_weights()

    def finish(self, training: bool) -> Tensor | None:
        """See `Stage.finish`."""
        if not training:
            self._wrapping.release()
            return None
        self._wrapping.reduce()
        if self._finish is not None:
            self._finish(self.module)
        return self._aux_sum

    def clear(self) -> None:
        """See `Stage.clear`."""
        self._kept.clear()
        self._queues.clear()
        self._wrapping.reset()

    def _join_aux_loss(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: lets the auxiliary loss's gradient start where the output's gradient arrives."""
        if not self._joins or self._aux_loss is None:
            return None
        aux = self._aux_loss(module)
        if aux is None:
            return None
        if aux.dim() or not aux.requires_grad:
            raise ValueError(
                f"the auxiliary loss of stage {self.index} has shape {list(aux.shape)}, "
                f"requires_grad={aux.requires_grad}. Return a differentiable scalar, or None."
            )
        value = aux.detach()
        self._aux_sum = value if self._aux_sum is None else self._aux_sum + value
        outputs: tuple[Any, ...] = output if isinstance(output, tuple) else (output,)
        able = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and (o.is_floating_point() or o.is_complex())]
        if not able:
            raise ValueError(
                f"stage {self.index} has an auxiliary loss, but its module returns a {type(output).__name__}: no tensor that can "
                "have a gradient, and no tuple with one. Return a floating-point or complex tensor, or a tuple with one."
            )
        # All of them: the next stage may use any. What was detached stays so, unless there is nothing else.
        places = [i for i in able if outputs[i].requires_grad] or able
        joined = dict(
            zip(places, _WithAuxLoss.apply(aux, self._aux_weight, *(outputs[i] for i in places)), strict=True)
        )
        new = tuple(joined.get(i, o) for i, o in enumerate(outputs))
        return new if isinstance(output, tuple) else new[0]

    def _run(self, inputs: tuple[Any, ...], target: Any, extra: Mapping[str, Any], training: bool) -> tuple[Any, ...]:
        if self._keywords is not None:
            missing = [k for k in self._keywords if k not in extra]
            if missing:
                raise ValueError(f"stage {self.index} takes extra inputs {missing}, which step() was not given.")
            extra = {k: extra[k] for k in self._keywords}
        self._joins = training
        try:
            output = self.module(*inputs, **extra)
        except RuntimeError as err:
            if self.index == 0 or "leaf Variable that requires grad" not in str(err):
                raise
            raise ValueError(
                f"the module of stage {self.index} changes its input or a parameter in place, a leaf of its graph ({err}). "
                "Let the first operation of a stage make a new tensor (nn.ReLU(inplace=False), say), or cut elsewhere."
            ) from err
        finally:
            self._joins = False
        if target is not None:
            if self._loss is None:
                raise ValueError(
                    f"stage {self.index} is the last and got a target, but no loss. Pass loss= to TorchStage."
                )
            return self._loss_and_metrics(self._loss(output, target))
        outputs: Any = (output,) if isinstance(output, Tensor) else output
        if is_flat(outputs, training):
            return outputs
        return TensorTree.pack(outputs, lambda t: t.requires_grad)

    def _loss_and_metrics(self, result: Any) -> tuple[Any, ...]:
        """The loss, and what the loss function returned beside it, without its graph."""
        loss, metrics = cast(tuple[Any, Any], result) if isinstance(result, tuple) else (result, None)
        if not isinstance(loss, Tensor) or loss.dim():
            given = f"has shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise ValueError(
                f"the loss of stage {self.index} {given}, and a backward starts from one number. Return a scalar tensor, "
                "such as the sum over tokens, or (scalar, metrics)."
            )
        return (loss, rebuilt(metrics, Tensor, lambda t: t.detach())) if isinstance(result, tuple) else (loss,)


class _Kept(NamedTuple):
    """What one microbatch waits for its backward with."""

    inputs: tuple[Any, ...]
    edges: list[Any]
    tracked: list[bool]


class _WithAuxLoss(torch.autograd.Function):
    """A stage's outputs, whose gradients' arrival also starts the auxiliary loss's."""

    @staticmethod
    def forward(ctx: Any, aux: Tensor, weight: float, *outputs: Tensor) -> Any:
        ctx.weight = aux.new_full((), weight)
        ctx.set_materialize_grads(False)
        return tuple(o.view_as(o) for o in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.weight, None, *grads


def _run_backward(pairs: list[tuple[Any, Tensor]]) -> None:
    if pairs:
        edges, grads = zip(*pairs, strict=True)
        torch.autograd.backward(list(edges), list(grads))
