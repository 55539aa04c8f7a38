"""Pipeline parallelism: run the stages of one rank by a schedule.

titan-pipeline owns schedules and execution; here the parts that `stages` cut become its stages, and a step's microbatches
the executor's inputs. Every pipeline rank reads the same batch, so positions and labels are never sent: only hidden states
travel.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from titan_fsdp import named_parameters
from titan_mesh import Mesh
from titan_pipeline import Action, Kind, Schedule
from titan_pipeline.runtime import (
    DeviceClock,
    DeviceTransport,
    Executor,
    GlooTransport,
    SocketTransport,
    TiedWeight,
    TorchStage,
    Transport,
    host_transport,
)
from torch import Tensor, nn

from titan_train.config import PipelineConfig
from titan_train.data.loader.source import TaskBatch
from titan_train.models import accepted_inputs
from titan_train.models.call import computes_on
from titan_train.models.common.loss import TokenLoss
from titan_train.observe.timing import StepTimer
from titan_train.observe.timing.collectives import CollectiveMeter


def make_transport(
    schedule: Schedule, mesh: Mesh, device: torch.device, timeout_s: float, tied: Sequence[TiedWeight] = ()
) -> Transport:
    """How this rank exchanges hidden states with the stages before and after. Collective over all ranks of the run.

    Args:
        schedule: The same on every rank.
        mesh: All ranks.
        device: Where stages compute. Tensors of an accelerator travel from device to device, those of the CPU through
            sockets on one machine and by gloo between machines.
        timeout_s: Seconds until a rank that does not connect is an error.
        tied: Weights that several stages hold; on accelerators, ranks that share one get channels for its gradients.
    """
    if device.type == "cpu":
        return host_transport(mesh.group("pp"))
    return device_transport(schedule, mesh, device, timeout_s, tied)


def device_transport(
    schedule: Schedule, mesh: Mesh, device: torch.device, timeout_s: float, tied: Sequence[TiedWeight] = ()
) -> Transport:
    """A channel of the device's own backend for each pair of neighbours, or of ranks that share a weight, of every pipeline.
    Collective over all ranks.
    """
    every_rank, place = mesh["pp", "dp_replicate", "fsdp", "tp"], schedule.placement
    shared = [(place[min(weight.names)], place[stage]) for weight in tied for stage in weight.names]
    return DeviceTransport(every_rank, "pp", place, device, timeout_s=timeout_s, also_between=shared)


TOKEN_IDS = "token_ids"
"""What stages after the first are given by this name: the tokens of their rows."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Labels of one microbatch."""

    labels: Any


class Pipeline:
    """The stages of this rank under an executor."""

    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[nn.Module],
        transport: Transport,
        *,
        loss: TokenLoss,
        tied: Sequence[TiedWeight],
        keywords: Sequence[str],
        fused_loss: bool,
        config: PipelineConfig,
        schedule_for: Callable[[int], Schedule],
        gather_each_microbatch: bool,
        rules: Mapping[type[nn.Module], Callable[..., Any]],
    ) -> None:
        """Join the executor.

        Args:
            schedule: The same on every rank.
            parts: This rank's stages, in the order of ``schedule.stages_of(rank)``.
            transport: See `make_transport`.
            loss: From logits and labels to the sum over labels; used by the last stage.
            tied: By the clean names of the parameters; at the end of a step every copy has the sum of all gradients.
            keywords: What the stages may take by name.
            fused_loss: The last stage's module is given the labels and returns that sum itself.
            config: Of the pipeline.
            schedule_for: The schedule for another number of microbatches.
            gather_each_microbatch: Free FSDP's gathered parameters after every pass, not only after the step.
            rules: How modules take part in schedules that split backward; see `titan_pipeline.runtime.TorchStage`.
        """
        last = schedule.num_stages - 1

        def loss_of(output: Tensor, target: _Target) -> Tensor:
            return output if fused_loss else loss(output, target.labels)

        stages = [
            TorchStage(
                part,
                index,
                loss=loss_of if index == last else None,
                keywords=(
                    *sorted(accepted_inputs(part, keywords)),
                    *(["labels"] if fused_loss and index == last else []),
                ),
                gather="microbatch" if gather_each_microbatch else "step",
                rules=rules,
            )
            for index, part in zip(schedule.stages_of(transport.rank), parts, strict=True)
        ]
        self._keywords, self._schedule_for = keywords, schedule_for
        wrapped = {  # each stage's parameters, by clean name, as its wrapper names them
            stage.index: dict(
                zip(
                    (name for name, _ in named_parameters(stage.module, duplicates=True)),
                    (name for name, _ in stage.module.named_parameters(remove_duplicate=False)),
                    strict=True,
                )
            )
            for stage in stages
        }
        filled = next((part for part in parts if next(part.parameters(), None) is not None), None)
        device = torch.device("cpu") if filled is None else computes_on(filled)
        self.executor = Executor(
            schedule,
            stages,
            transport,
            tied=[
                TiedWeight({stage: wrapped.get(stage, {}).get(name, name) for stage, name in weight.names.items()})
                for weight in tied
            ],
            deterministic=config.deterministic,
            clock=None if device.type == "cpu" else DeviceClock(device),
        )

    def measure(self, timer: StepTimer, meter: CollectiveMeter) -> None:
        """Take the time of forward and backward passes, and name them in a trace."""

        def phase(action: Action | None) -> AbstractContextManager[object]:
            name = "forward" if action is not None and action.kind is Kind.F else "backward"  # whatever else computes
            block = timer.waiting("pp") if action is None else timer.phase(name)
            if meter.label is None:
                return block
            label = meter.label(
                "pp wait" if action is None else f"pp stage {action.stage} {action.kind.value} mb{action.microbatch}"
            )
            both = ExitStack()
            both.enter_context(label)
            both.enter_context(block)
            return both

        self.executor.around = phase
        transport = self.executor.transport
        if isinstance(transport, GlooTransport):
            transport.around_transfer = lambda num_bytes: timer.transfer("pp", num_bytes)
        elif isinstance(transport, SocketTransport):
            transport.around_transfer = partial(_read_by_rank, timer)

    def step(self, batches: Sequence[TaskBatch], num_labels: Tensor) -> float:
        """Forward and backward of one step's microbatches; gradients are then complete on data-parallel ranks too.

        Args:
            batches: This rank's microbatches.
            num_labels: Of the step over all ranks, a scalar on the device; read when the microbatches have run.

        Returns:
            Sum of the loss over this replica's labels, divided by ``num_labels``.
        """
        self._serve(len(batches))
        return self.executor.step(*_arguments(batches), extras=self._extras(batches), denominator=num_labels).loss

    def evaluate(self, batches: Sequence[TaskBatch]) -> float:
        """Sum of the loss over this replica's labels, without gradients; as many batches as the full step has."""
        self._serve(len(batches))
        return self.executor.evaluate(*_arguments(batches), extras=self._extras(batches), denominator=1.0).loss

    def _serve(self, microbatches: int) -> None:
        """Take the schedule for so many microbatches, which a ramp of the batch changes; collective when it does."""
        if self.executor.schedule.num_microbatches != microbatches:
            self.executor.swap(self._schedule_for(microbatches))

    def _extras(self, batches: Sequence[TaskBatch]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for b in batches:
            given = {TOKEN_IDS: b.inputs[0], **b.keywords}
            found.append({**{name: given.get(name) for name in self._keywords}, "labels": b.target})
        return found


@contextmanager
def _read_by_rank(timer: StepTimer, num_bytes: int) -> Generator[None]:
    """A block in which the rank itself reads a message, between two actions too: it computes nothing meanwhile."""
    with timer.waiting("pp"), timer.transfer("pp", num_bytes):
        yield


def _arguments(batches: Sequence[TaskBatch]) -> tuple[list[Any], list[_Target]]:
    return [b.inputs if len(b.inputs) != 1 else b.inputs[0] for b in batches], [_Target(b.target) for b in batches]
