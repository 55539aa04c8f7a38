"""One optimizer step: forward and backward over the micro-batches, reduce, clip, update.

The loss of a step is the mean over all valid labels of all ranks and micro-batches. The divisor must be known before
the first backward, so the ranks first sum their label counts; that same collective carries the requests to stop or
to save, so that all ranks act on them at the same step, and costs nothing extra. The sum stays on the device. After the
last backward one more sums the loss and the squared gradient norm, so that every rank has the same bits of both and takes
the same decision. The update is launched, and is one that changes nothing if they are not finite (`titan_train.optim.update`);
then the host reads all of it at once: the only time in a step that it waits for the device. An optimizer without such an update,
and steps that may have to be computed again, wait before the update.

With CUDA graphs, forward and backward are one launch (`titan_train.train.graphs`); what comes after them is as without.

A step whose loss or gradient is not finite changes nothing: its gradients are dropped and it is counted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import titan_fp8
import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from torch import Tensor

from titan_train.models.common.moe.balance import (
    LayerRouting,
    end_routing,
    forget_routing,
    routing_statistics,
    share_routing,
    summed_routing,
)
from titan_train.observe.timing import StepTimer
from titan_train.optim.schedule import drop_frozen_gradients
from titan_train.optim.update import can_update, update
from titan_train.parallel.apply import ParallelModel
from titan_train.task import TaskBatch
from titan_train.train.graphs import StepGraphs
from titan_train.train.reduce_scope import ReduceScope
from titan_train.train.rerun import (
    Execution,
    RandomState,
    RerunVerdict,
    Suspicion,
    gather,
    judge,
    judge_elsewhere,
    neighbours_batches,
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    loss: float
    """The mean loss; of text, cross-entropy in nats over all valid labels."""
    grad_norm: float
    """2-norm of the whole gradient before clipping."""
    num_labels: int
    """What the loss was divided by, over all ranks: labels, or elements."""
    skipped: bool
    """Loss or gradient was not finite: nothing was updated."""
    requests: tuple[bool, ...]
    """For each request passed in, whether any rank made it."""
    routing: dict[str, float]
    """How evenly the mixtures of experts were used, from `routing_statistics`; empty for a dense model."""
    rerun: RerunVerdict | None = None
    """What executing a suspect step again showed; None if it was not."""


class OptimizerStep:
    """Runs optimizer steps of one model."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        accumulate: fsdp.Accumulate,
        scope: ReduceScope,
        device: torch.device,
        timer: StepTimer,
        rerun_above: float = 0.0,
        cudagraphs: bool = False,
    ) -> None:
        """Prepare to step.

        Args:
            model: What this rank trains. Gradients must be summed, not averaged, over data-parallel ranks.
            optimizer: Holds its parameters.
            max_grad_norm: Clip the gradient's 2-norm to this; 0 only measures.
            accumulate: What titan-fsdp keeps between micro-batches.
            scope: Which sums this rank takes part in.
            device: Where the batches are.
            timer: Takes the time of forward, backward and optimizer.
            rerun_above: Execute a step again whose loss is not finite, or above so many times the last ones' mean; 0 never.
            cudagraphs: Run forward and backward of all micro-batches as one CUDA graph.
        """
        self._timer = timer
        self.wants_layer_norms = False
        """Whether the next step finds `layer_norms`; alike on every rank."""
        self.layer_norms: dict[str, float] = {}
        """Norm of the gradient before clipping, by layer."""
        self._suspicion = Suspicion(rerun_above) if rerun_above else None
        self._model = model
        self._optimizer = optimizer
        self._max_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self._accumulate: fsdp.Accumulate = accumulate
        self._scope = scope
        self._device = device
        # Float8 layers cast each weight once for all micro-batches of a step.
        self._constant_weights = titan_fp8.ConstantWeights(*model.parts)
        self._load: tuple[Tensor, list[float]] | None = None
        """How the last execution used the experts: on the device, and read."""
        self._graphs: StepGraphs | None = None
        if cudagraphs:
            self._graphs = StepGraphs(self._eager_gradients, model.parts, device, forget=self._forget_gradients)
        # A graph keeps only casts that it made: a block around all steps would make it cast frozen weights at every use.
        self.frozen_weights = titan_fp8.ConstantWeights(*([] if cudagraphs else model.parts), frozen=True)
        """Entered around all steps: weights that do not train keep their casts from one step to the next."""

    def __call__(self, batches: Sequence[TaskBatch], requests: Sequence[bool] = ()) -> StepResult:
        """Train on one step's micro-batches.

        Args:
            batches: This rank's micro-batches; every rank passes as many.
            requests: This rank's flags (stop, save, …), combined with "any" over the ranks.
        """
        # from page-locked memory, or the copy would wait for the optimizer of the step before
        asked = torch.tensor([0, *requests], dtype=torch.int64, pin_memory=self._device.type == "cuda")
        counts = asked.to(self._device, non_blocking=True)
        if self._scope.counts_labels:
            for batch in batches:
                counts[0] += self._model.task.count(batch)
        counts = self._scope.sum(counts)

        state = RandomState(self._device) if self._suspicion is not None else None
        run, counted, updated = self._execute(batches, counts)
        num_labels, *agreed = (int(count) for count in counted)
        verdict: RerunVerdict | None = None
        reason = self._suspicion.of(run.loss, run.grad_norm) if self._suspicion is not None else ""
        if reason and state is not None:
            verdict, run = self._rerun(batches, counts, run, reason, state)
        loss_value, norm_value = run.loss, run.grad_norm
        skipped = not (_finite(loss_value) and _finite(norm_value))
        skipped |= verdict is not None and verdict.verdict == "persistent hardware"
        routing: dict[str, LayerRouting] = {}
        if self._load is not None:
            routing = end_routing(self._model.parts, *self._load, skip=skipped)
        routing = share_routing(routing, self._model.experts, self._scope.pipeline_group, self._device)
        with self._timer.phase("optimizer"):
            if not skipped and not updated:
                self._optimizer.step()
            if skipped:
                for hook in map(fsdp.gradient_compression, self._model.parts):
                    if hook is not None:
                        hook.forget()  # it would add what is not finite to the next gradient
            self._forget_gradients()
        flags = tuple(flag > 0 for flag in agreed)
        return StepResult(loss_value, norm_value, num_labels, skipped, flags, routing_statistics(routing), verdict)

    def _execute(self, batches: Sequence[TaskBatch], counts: Tensor) -> tuple[Execution, list[float], bool]:
        """Forward, backward and the clipped gradient; ``counts``, read with the losses; whether the update is made already."""
        denominator = counts[0].clamp(min=1)
        if self._graphs is None:
            total = self._eager_gradients(batches, denominator)
        else:
            with self._timer.phase("backward"):  # of both: a graph has no parts
                total = self._graphs(batches, denominator)
        gradients = self._model.gradients
        with self._timer.phase("optimizer"):
            gradients.finish()
            drop_frozen_gradients(self._optimizer)
            norms = (
                gradients.norms_by_layer(self._device).double()
                if self.wants_layer_norms
                else counts.new_empty(0).double()
            )
            sums = torch.stack([total, gradients.square_norm().to(self._device)])
            if not self._scope.counts_loss:
                sums[0] = 0.0
            sums = self._scope.sum(sums)
            grad_norm = sums[1].sqrt()
            gradients.scale(torch.clamp(self._max_norm / (grad_norm + 1e-6), max=1.0))
            updated = self._suspicion is None and can_update(self._optimizer, self._device)
            if updated:
                update(self._optimizer, (~torch.isfinite(torch.stack([sums[0], grad_norm])).all()).float())
        load = summed_routing(self._model.parts, self._scope.tokens_group)
        # the one host sync: until here the host only queued work (of a pipeline, all but its ranks' last meeting)
        values = [torch.stack([sums[0], grad_norm, total]).double(), counts.double(), norms]
        read = torch.cat(values if load is None else [*values, load]).tolist()
        known = 3 + counts.numel()
        *layers, other = read[known : known + norms.numel()] or [0.0]
        self.layer_norms = (
            {f"layers.{i}": norm for i, norm in enumerate(layers)} | {"other": other} if norms.numel() else {}
        )
        self._load = None if load is None else (load, read[known + norms.numel() :])
        return Execution(*read[:3]), read[3:known], updated

    def _rerun(
        self, batches: Sequence[TaskBatch], counts: Tensor, first: Execution, reason: str, state: RandomState
    ) -> tuple[RerunVerdict, Execution]:
        """Execute a suspect step again here, then on other ranks; its gradients are then the last execution's."""
        again = self._again(batches, counts, state)
        parts, parts_again = gather(first.own, self._device), gather(again.own, self._device)
        whole = (first.loss, again.loss)
        verdict = judge(parts, parts_again, (first.grad_norm, again.grad_norm), reason, whole)
        if verdict is not None:
            return verdict, again
        group = self._scope.data_group
        if group is None:
            return RerunVerdict("reproduced", tuple(range(len(parts))), reason, whole), again
        lent, draws = neighbours_batches(batches, state, group, self._device)
        ranks = dist.get_process_group_ranks(group)
        source = [int(rank) for rank in gather(float(ranks[(group.rank() - 1) % group.size()]), self._device)]
        there = self._again(lent, counts, draws)
        elsewhere = gather(there.own, self._device)
        norms = (again.grad_norm, there.grad_norm)
        return judge_elsewhere(parts_again, elsewhere, source, norms, reason, (*whole, there.loss)), there

    def _again(self, batches: Sequence[TaskBatch], counts: Tensor, state: RandomState) -> Execution:
        self._forget_gradients()
        for part in self._model.parts:
            forget_routing(part)
        state.restore()
        return self._execute(batches, counts)[0]

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _eager_gradients(self, batches: Sequence[TaskBatch], num_labels: Tensor) -> Tensor:
        with self._constant_weights:
            return self._forward_backward(batches, num_labels)

    def _forward_backward(self, batches: Sequence[TaskBatch], num_labels: Tensor) -> Tensor:
        """Gradients of one step; returns this rank's part of the mean loss, a float32 scalar.

        Args:
            batches: This rank's micro-batches.
            num_labels: Of the step over all ranks, at least 1: a scalar on the device.
        """
        model = self._model
        cut = batches if model.context is None else [model.context.cut(batch) for batch in batches]
        if model.pipeline is not None:
            return torch.tensor(model.pipeline.step(cut, num_labels), device=self._device)
        total = torch.zeros((), device=self._device)
        (module,) = model.parts
        for index, batch in enumerate(cut):
            with fsdp.accumulate(module, index, len(cut), keep=self._accumulate):
                with self._timer.phase("forward"):
                    loss = model.loss_sum(batch) / num_labels
                with self._timer.phase("backward"):
                    loss.backward()
            total += loss.detach()
        return total


def _finite(value: float) -> bool:
    return value - value == 0.0


class Stopwatch:
    """Seconds spent in a part of a step."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def __enter__(self) -> "Stopwatch":
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.elapsed_s = time.perf_counter() - self._start
