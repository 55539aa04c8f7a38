"""What one rank trains: its part of the model, and what a step needs to know of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import titan_fp8
import titan_fsdp as fsdp
import torch
from torch import Tensor, nn

from titan_train.data.loader.source import TaskBatch
from titan_train.models.call import accepted_inputs
from titan_train.models.common.loss import ObservedLoss, TokenLoss
from titan_train.models.common.moe.balance import set_aux_scale
from titan_train.models.common.mtp import AHEAD, mtp_of, with_ahead
from titan_train.parallel.gradients import Gradients
from titan_train.parallel.param_shard import ParamShards
from titan_train.parallel.pipeline import Pipeline
from titan_train.parallel.tensor.micro_pipeline import FusedProducts
from titan_train.parallel.tied import ParameterNames
from titan_train.task import ContextCut, Task


@dataclass(slots=True)
class Report:
    """What came of applying parallelism, for logs and records; training does not read it."""

    num_parameters: int
    """Of the whole model."""
    flops_per_token: float
    """Of the whole model, forward and backward."""
    plans: list[fsdp.WrapPlan] = field(default_factory=list[fsdp.WrapPlan])
    """How each part was wrapped; empty in mode "none"."""
    float8: list[titan_fp8.ConversionReport] = field(default_factory=list[titan_fp8.ConversionReport])
    """Which linears of each part compute in float8; empty where that was not asked for."""
    fused: FusedProducts | None = None
    """What the compiler overlapped of tensor parallelism, known after the first step; None where it was not asked to."""


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """What one rank trains."""

    parts: Sequence[nn.Module]
    """The model; under pipeline parallelism, this rank's stages."""
    cuts: ParamShards
    """Which box of each parameter is here, where tensor or expert parallelism cut it."""
    names: ParameterNames
    """Of all parameters of the whole model."""
    trained: Sequence[str]
    """The names of those that train, apart from ``optimizer.frozen_steps``; the same on every rank."""
    experts: Mapping[str, int]
    """Experts of each mixture-of-experts layer of the whole model, by the layer's name."""
    task: Task
    """What the model is trained on."""
    loss: TokenLoss
    """From the output (of a decoder: its local logits) and the target to the sum of the loss, unless the head computes it."""
    fused_loss: bool
    """The head computes the loss, a chunk of tokens at a time."""
    own_loss: bool
    """The loss is not the cross-entropy of next tokens, so that it is none of bits."""
    observed: ObservedLoss | None
    """The same loss, where the task reports it by parts."""
    gradients: Gradients
    mtp_depth: int
    """Tokens that the whole model predicts besides the next one."""
    context: ContextCut | None
    pipeline: Pipeline | None
    report: Report

    def set_batch(self, sequences: int) -> None:
        """The next steps take so many sequences, over all ranks: what the experts' auxiliary losses are means over."""
        for part in self.parts:
            set_aux_scale(part, 1 / sequences)

    def begin_ahead(self, weight: float, device: torch.device) -> Tensor | None:
        """Before a step: what the losses of tokens further ahead weigh.

        Returns:
            Where the step adds them up, with their labels, ``[D, 2]``; zeros on a rank without the modules, None for a model
            without.
        """
        if not self.mtp_depth:
            return None
        for part in self.parts:
            if (modules := mtp_of(part)) is not None:
                return modules.begin(weight, device)
        return torch.zeros(self.mtp_depth, 2, device=device)

    def with_ahead(self, batches: Sequence[TaskBatch]) -> Sequence[TaskBatch]:
        """Whole batches with what the model is given to predict several tokens."""
        return [with_ahead(batch, self.mtp_depth) for batch in batches] if self.mtp_depth else batches

    def loss_sum(self, batch: TaskBatch) -> Tensor:
        """Sum of the loss over a batch, of text in nats over its valid labels; not under a pipeline."""
        (module,) = self.parts
        taken = accepted_inputs(module, (*self.task.keywords, *AHEAD) if self.mtp_depth else self.task.keywords)
        passed = {name: value for name, value in batch.keywords.items() if name in taken and value is not None}
        if self.fused_loss:
            return module(*batch.inputs, **passed, labels=batch.target)
        return self.loss(module(*batch.inputs, **passed), batch.target)
