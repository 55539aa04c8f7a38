"""One step of one rank: walk the program, action by action."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from titan_pipeline.ir.schedule import COMPUTE, Action, Kind
from titan_pipeline.runtime.clock import Clock
from titan_pipeline.runtime.program import Program
from titan_pipeline.runtime.stage.protocol import Stage
from titan_pipeline.runtime.transport.base import Transport
from titan_pipeline.runtime.transport.messages import Key, PeerFailure, PipelineAborted
from titan_pipeline.runtime.transport.tree import TensorTree

_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a step was called with."""

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    extras: Sequence[Mapping[str, Any]] | None
    denominator: float | Tensor | None
    aux_weight: float | None
    training: bool
    wants_loss: bool = True
    """False for an inference, whose results are the last stage's outputs."""


class StepRun:
    """The state of one step on one rank.

    Args:
        program: What to run.
        batch: With what.
        stages: The stages of this rank.
        transport: To the other ranks.
        count_tokens: Tokens of one target; None counts each microbatch as 1.
        clock: Gives a mark before and after each compute action; None does not trace.
        around: Gives a block to run each compute action in, and with None each wait for a message; None runs all without.
    """

    def __init__(
        self,
        program: Program,
        batch: StepBatch,
        stages: Mapping[int, Stage],
        transport: Transport,
        count_tokens: Callable[[Any], float] | None,
        clock: Clock | None,
        around: Callable[[Action | None], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.program = program
        self.batch = batch
        self.stages = stages
        self.transport = transport
        self.position = -1
        self.waiting = -1
        """Rank whose message is waited for; -1 otherwise."""
        self.loss_sum = 0.0
        self.aux_sum = 0.0
        self.denominator: float | Tensor = 1.0 if batch.denominator is None else batch.denominator
        self.losses: list[Any] = []
        self.outputs: dict[int, Any] = {}
        self.metrics: dict[int, Any] = {}
        self.marks: list[Any] = []
        """With a clock: before and after each compute action."""
        self._count = count_tokens
        self._clock = clock
        self._around = around
        self._aux_weight = 1.0 / program.num_microbatches if batch.aux_weight is None else batch.aux_weight
        self._last = program.num_stages - 1
        # results that wait for their send, or for the next stage on this rank
        self._forward: dict[tuple[int, int], Any] = {}
        self._backward: dict[tuple[int, int], Any] = {}
        self._loss_parts: dict[int, Any] = {}
        self._aux: list[Any] = []
        self._loss_weight: float | Tensor = 1.0

    def prepare(self) -> None:
        """Check the batch, count its tokens."""
        m, batch = self.program.num_microbatches, self.batch
        if 0 in self.stages and (batch.inputs is None or len(batch.inputs) != m):
            raise ValueError(
                f"the schedule runs {m} microbatches and rank {self.transport.rank} holds stage 0, but got "
                f"{_length(batch.inputs)} inputs. Give {m}, or swap() to a schedule for another number."
            )
        if batch.extras is not None and len(batch.extras) != m:
            raise ValueError(
                f"the schedule runs {m} microbatches but got {len(batch.extras)} extras. Give one per microbatch."
            )
        if self._last in self.stages and batch.wants_loss:
            self._check_targets(m)

    def _check_targets(self, m: int) -> None:
        targets = self.batch.targets
        if targets is None or len(targets) != m:
            raise ValueError(
                f"rank {self.transport.rank} holds the last stage and needs {m} targets, got {_length(targets)}. "
                "Give one per microbatch."
            )
        absent = [mb for mb, target in enumerate(targets) if target is None]
        if absent:
            raise ValueError(
                f"the targets of microbatches {absent} are None, for which a stage returns outputs and no loss. Give each "
                "microbatch something; a loss that needs no target may ignore it."
            )
        if self.batch.denominator is None:
            self.denominator = float(m if self._count is None else sum(self._count(t) for t in targets))
            if not self.denominator > 0:
                raise ValueError("the batch holds no tokens to average the loss over. Skip it, or mask less.")

    def execute(self) -> None:
        """Walk the program."""
        transport, clock, divisor = self.transport, self._clock, self.denominator
        self._loss_weight = divisor.double().reciprocal() if isinstance(divisor, Tensor) else 1.0 / divisor
        for stage in self.stages.values():
            stage.begin(self.batch.training, self._aux_weight)
        run: dict[Kind | None, Callable[[int, int], None]] = {
            Kind.F: self._run_forward,
            Kind.B: self._run_backward,
            Kind.I: self._run_input_grad,
            Kind.W: self._run_weight_grad,
            Kind.SEND_F: self._send_forward,
            Kind.SEND_B: self._send_backward,
            None: self._finish,
        }
        for position, (kind, s, mb) in enumerate(self.program.actions):
            self.position = position
            failure = transport.failed()
            if failure is not None:
                raise PipelineAborted(failure)
            if self._around is not None and kind in COMPUTE:
                with self._around(Action(cast(Kind, kind), s, mb)):
                    run[kind](s, mb)
            else:
                run[kind](s, mb)
            if clock is not None and kind in COMPUTE:
                self.marks.append(clock.mark())
        self.position = -1
        self.losses = [self._loss_parts[mb] for mb in sorted(self._loss_parts)]
        self.loss_sum = float(sum(float(x) for x in self.losses))
        self.aux_sum = self._aux_weight * sum(float(x) for x in self._aux if x is not None)

    def _run_forward(self, s: int, mb: int) -> None:
        batch = self.batch
        if s == 0:
            value = cast(Sequence[Any], batch.inputs)[mb]
            given = value if isinstance(value, tuple) else (value,)
        elif self.program.local[s - 1]:
            given = self._forward.pop((s - 1, mb))
        else:
            given = self.receive(self.program.place[s - 1], (0, s, mb))
        if self._clock is not None:
            self.marks.append(self._clock.mark())
        target = batch.targets[mb] if s == self._last and batch.targets is not None else None
        extra = _NOTHING if batch.extras is None else batch.extras[mb]
        outputs = self.stages[s].forward(mb, given, target, extra, batch.training)
        if s < self._last:
            self._forward[s, mb] = outputs
        elif target is not None:
            self._loss_parts[mb] = outputs[0]
            if len(outputs) > 1:
                self.metrics[mb] = outputs[1]
        elif isinstance(outputs, TensorTree):
            self.outputs[mb] = outputs.unpack(lambda t, _: t)[0]
        else:
            self.outputs[mb] = outputs[0] if len(outputs) == 1 else outputs

    def _run_backward(self, s: int, mb: int, defer: bool = False) -> None:
        if s == self._last:
            grads: Any = (self._loss_weight,)
        elif self.program.local[s]:
            grads = self._backward.pop((s + 1, mb))
        else:
            grads = self.receive(self.program.place[s + 1], (1, s, mb))
        if self._clock is not None:
            self.marks.append(self._clock.mark())
        result = self.stages[s].backward(mb, grads, defer)
        if s:
            self._backward[s, mb] = result

    def _run_input_grad(self, s: int, mb: int) -> None:
        self._run_backward(s, mb, defer=True)

    def _run_weight_grad(self, s: int, mb: int) -> None:
        if self._clock is not None:
            self.marks.append(self._clock.mark())
        self.stages[s].backward_weight(mb)

    def _send_forward(self, s: int, mb: int) -> None:
        self.transport.send(self.program.place[s + 1], (0, s + 1, mb), self._forward.pop((s, mb)))

    def _send_backward(self, s: int, mb: int) -> None:
        self.transport.send(self.program.place[s - 1], (1, s - 1, mb), self._backward.pop((s, mb)))

    def _finish(self, s: int, mb: int) -> None:
        self._aux.append(self.stages[s].finish(self.batch.training))

    def receive(self, source: int, key: Key) -> Any:
        """One message, while the watchdog and `around` know that this rank waits; `PipelineAborted` if it will not come."""
        self.waiting = source
        if self._around is None:
            got = self.transport.receive(source, key)
        else:
            with self._around(None):
                got = self.transport.receive(source, key)
        self.waiting = -1
        if isinstance(got, PeerFailure):
            raise PipelineAborted(got)
        return got


def _length(values: Sequence[Any] | None) -> str:
    return "none" if values is None else str(len(values))
