"""One optimizer step: forward and backward over the micro-batches, reduce, clip, update.

The loss of a step is the mean over all valid labels of all ranks and micro-batches. The divisor must be known before
the first backward, so the ranks first sum their label counts; that same collective carries the requests to stop or
to save, so that all ranks act on them at the same step, and costs nothing extra. The sum stays on the device. After the
last backward one more sums the loss and the squared gradient norm, so that every rank has the same bits of both and takes
the same decision. The update is launched, and is one that changes nothing if they are not finite (`titan_train.optim.update`);
then the host reads all of it at once: the only time in a step that it waits for the device. An optimizer without such an update,
and steps that may have to be computed again, wait before the update.

With CUDA graphs, forward and backward are one launch (`titan_train.train.graphs`); what comes after them is as without.

A step whose loss or gradient is not finite changes nothing: its gradients are dropped and it is counted. So is one whose
gradient is far larger than usual, if that is asked for (`titan_train.optim.spikes`).
"""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import titan_fp8
import titan_fsdp as fsdp
import torch
from torch import Tensor

from titan_train.data.loader.source import TaskBatch
from titan_train.models.common.moe.balance import (
    LayerRouting,
    end_routing,
    forget_routing,
    routing_statistics,
    share_routing,
    summed_routing,
)
from titan_train.observe.timing import StepTimer
from titan_train.optim.schedule import drop_frozen_gradients, frozen_parameters
from titan_train.optim.spikes import Spikes
from titan_train.optim.update import can_update, update
from titan_train.parallel.gradients import scale_gradients
from titan_train.parallel.qk_clip import QKClip
from titan_train.train.observer import StepResult
from titan_train.train.reduce_scope import ReduceScope

if TYPE_CHECKING:
    from titan_train.parallel.model import ParallelModel
    from titan_train.train.rerun import Rerun, RerunVerdict


class Execution(NamedTuple):
    """One execution of a step's forwards and backwards, as the host reads it."""

    figures: tuple[float, float, float]
    """The loss, the gradient's norm, and this rank's part of the loss."""
    counts: list[float]
    """Labels of the step, tokens that its rows lack, then the ranks that made each request."""
    layer_norms: dict[str, float]
    attention_logits: dict[str, float]
    mtp_losses: tuple[float, ...]
    """Mean loss of each module that predicts a token further ahead."""
    load: list[float]
    """How the experts were used, as `summed_routing` has it on the device."""
    updated: bool
    """The update is made already."""


class OptimizerStep:
    """Runs optimizer steps of one model."""

    def __init__(
        self,
        model: "ParallelModel",
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        accumulate: fsdp.Accumulate,
        scope: ReduceScope,
        device: torch.device,
        timer: StepTimer,
        spikes: Spikes | None = None,
        qk_clip: QKClip | None = None,
        rerun_above: float = 0.0,
        cudagraphs: bool = False,
    ) -> None:
        """No step is made yet.

        Args:
            model: What this rank trains. Gradients must be summed, not averaged, over data-parallel ranks.
            optimizer: Holds its parameters.
            max_grad_norm: Clip the gradient's 2-norm to this; 0 only measures.
            accumulate: What titan-fsdp keeps between micro-batches.
            scope: Which sums this rank takes part in.
            device: Where the batches are.
            timer: Takes the time of forward, backward and optimizer.
            qk_clip: Bounds attention logits; None does not measure them.
            spikes: Decides which steps have far too large a gradient; None leaves none out for that.
            rerun_above: Execute a step again whose loss is not finite, or above so many times the last ones' mean; 0 never.
            cudagraphs: Run forward and backward of all micro-batches as one CUDA graph.
        """
        self._timer = timer
        self._spikes, self._qk_clip = spikes, qk_clip
        self._rerun = None
        if rerun_above:
            from titan_train.train.rerun import Rerun

            self._rerun = Rerun(rerun_above, device, scope.data_group)
        self._model = model
        self._optimizer = optimizer
        self._max_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self._accumulate: fsdp.Accumulate = accumulate
        self._scope = scope
        self._device = device
        # Float8 layers cast each weight once for all micro-batches of a step.
        self._constant_weights = titan_fp8.ConstantWeights(*model.parts)
        self._mtp_weight = 0.0
        self._load: Tensor | None = None
        """How the last execution used the experts."""
        self._graphs = None
        if cudagraphs:
            from titan_train.train.graphs import StepGraphs

            self._graphs = StepGraphs(self._forward_backward, model.parts, device, forget=self._forget_gradients)
        # A graph keeps only casts that it made: a block around all steps would make it cast frozen weights at every use.
        self.frozen_weights = titan_fp8.ConstantWeights(*([] if cudagraphs else model.parts), frozen=True)
        """Entered around all steps: weights that do not train keep their casts from one step to the next."""

    def __call__(
        self,
        batches: Sequence[TaskBatch],
        requests: Sequence[bool] = (),
        *,
        layer_norms: bool = False,
        mtp_weight: float = 0.0,
        tokens_lacking: int = 0,
    ) -> StepResult:
        """Train on one step's micro-batches.

        Args:
            batches: This rank's micro-batches; every rank passes as many.
            requests: This rank's flags (stop, save, …), combined with "any" over the ranks.
            layer_norms: Measure the gradient by layer too; the same on every rank.
            mtp_weight: Of the losses of tokens further ahead, for a model that predicts several.
            tokens_lacking: What the rows of these micro-batches are short of ``model.seq_len``.
        """
        self._mtp_weight = mtp_weight
        # from page-locked memory, or the copy would wait for the optimizer of the step before
        lacking = tokens_lacking if self._scope.counts_labels else 0
        asked = torch.tensor([0, lacking, *requests], dtype=torch.int64, pin_memory=self._device.type == "cuda")
        counts = asked.to(self._device, non_blocking=True)
        if self._scope.counts_labels:
            for batch in batches:
                counts[0] += self._model.task.count(batch)
        counts = self._scope.sum(counts)

        if self._rerun is None:
            run, verdict = self._execute(batches, counts, layer_norms), None
        else:
            run, verdict = self._execute_checked(self._rerun, batches, counts, layer_norms)
        loss, grad_norm, _ = run.figures
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm)) or (verdict is not None and verdict.skips)
        skipped |= self._spikes is not None and grad_norm > self._spikes.limit
        spike = self._spikes is not None and self._spikes.note(grad_norm, skipped=skipped)
        routing: dict[str, LayerRouting] = {}
        if self._load is not None:
            frozen = frozen_parameters(self._optimizer)
            routing = end_routing(self._model.parts, self._load, run.load, skip=skipped, frozen=frozen)
        routing = share_routing(routing, self._model.experts, self._scope.pipeline_group, self._device)
        with self._timer.phase("optimizer"):
            if not skipped and not run.updated:
                self._optimizer.step()
            if self._qk_clip is not None:
                self._qk_clip.clip() if not skipped else self._qk_clip.forget()
            if skipped:
                for hook in map(fsdp.gradient_compression, self._model.parts):
                    if hook is not None:
                        hook.forget()  # it would add what is not finite to the next gradient
            self._forget_gradients()
        num_labels, lacking, *flags = (int(count) for count in run.counts)
        return StepResult(
            loss,
            grad_norm,
            num_labels,
            skipped,
            tuple(flag > 0 for flag in flags),
            routing_statistics(routing),
            verdict,
            run.layer_norms,
            run.attention_logits,
            spike,
            run.mtp_losses,
            lacking,
        )

    def _execute(self, batches: Sequence[TaskBatch], counts: Tensor, layer_norms: bool) -> Execution:
        """Forward, backward, clip and, if the optimizer can skip it by itself, the update."""
        denominator = counts[0].clamp(min=1)
        ahead = self._model.begin_ahead(self._mtp_weight, self._device)
        if self._graphs is None:
            total = self._forward_backward(batches, denominator)
        else:
            with self._timer.phase("backward"):  # of both: a graph has no parts
                total = self._graphs(batches, denominator)
        gradients = self._model.gradients
        with self._timer.phase("optimizer"):
            gradients.finish()
            drop_frozen_gradients(self._optimizer)
            local = gradients.local()
            norms = gradients.norms_by_layer(local, self._device) if layer_norms else counts.new_empty(0)
            sums = torch.stack([total, gradients.square_norm(local).to(self._device)])
            if ahead is not None:
                sums = torch.cat([sums, ahead.flatten()])
            if not self._scope.counts_loss:
                sums[0] = 0.0
            sums = self._scope.sum(sums)
            grad_norm = sums[1].sqrt()
            scale_gradients(local, torch.clamp(self._max_norm / (grad_norm + 1e-6), max=1.0))
            updated = self._rerun is None and can_update(self._optimizer, self._device)
            if updated:
                left_out = ~torch.isfinite(torch.stack([sums[0], grad_norm])).all()
                if self._spikes is not None:
                    left_out |= grad_norm > self._spikes.limit
                update(self._optimizer, left_out.float())
        logits = counts.new_empty(0) if self._qk_clip is None else self._qk_clip.share()
        self._load = summed_routing(self._model.parts, self._scope.tokens_group)
        # the one host sync: until here the host only queued work (of a pipeline, all but its ranks' last meeting)
        values = [
            torch.stack([sums[0], grad_norm, total]),
            counts,
            norms,
            logits,
            sums[2:],
            *([] if self._load is None else [self._load]),
        ]
        read = iter(torch.cat([value.double() for value in values]).tolist())
        lists = [list(itertools.islice(read, value.numel())) for value in values]
        (loss, norm, own), counted, by_layer, largest, further, *load = lists
        mtp_losses = tuple(n / max(1.0, count) for n, count in zip(further[::2], further[1::2], strict=True))
        named = {f"layers.{i}": logit for i, logit in enumerate(largest)}
        return Execution(
            (loss, norm, own), counted, _named(by_layer), named, mtp_losses, load[0] if load else [], updated
        )

    def _execute_checked(
        self, rerun: "Rerun", batches: Sequence[TaskBatch], counts: Tensor, layer_norms: bool
    ) -> "tuple[Execution, RerunVerdict | None]":
        """`_execute`, again if it is suspect; the last execution, and what the others showed."""
        rerun.remember()
        run = self._execute(batches, counts, layer_norms)

        def again(lent: Sequence[TaskBatch]) -> tuple[float, float, float]:
            nonlocal run
            self._forget_gradients()
            if self._qk_clip is not None:
                self._qk_clip.forget()
            for part in self._model.parts:
                forget_routing(part)
            run = self._execute(lent, counts, layer_norms)
            return run.figures

        verdict = rerun(batches, run.figures, again)
        return run, verdict

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _forward_backward(self, batches: Sequence[TaskBatch], num_labels: Tensor) -> Tensor:
        """Gradients of one step; returns this rank's part of the mean loss, a float32 scalar.

        Args:
            batches: This rank's micro-batches.
            num_labels: The step's, over all ranks, at least 1: a scalar on the device.
        """
        model = self._model
        cut = model.with_ahead(batches) if model.context is None else [model.context.cut(batch) for batch in batches]
        with self._constant_weights:
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


def _named(norms: Sequence[float]) -> dict[str, float]:
    """From `Gradients.norms_by_layer`: the layers', then that of all other parameters."""
    names = [*(f"layers.{i}" for i in range(len(norms) - 1)), "other"]
    return dict(zip(names, norms, strict=False))
