"""Run a schedule: each rank walks its own program, nothing more.

The executor compiles the rank's program (with communication, see `titan_pipeline.lower`) to a list of bound calls and
runs them in order. What happens inside a stage is the stage's business, how messages move is the transport's; between
the two lies only this loop, at a few microseconds an action.

Failure: a rank that raises tells everyone who still waits for it, they stop at their next action, and all meet at the
end of the step, where every rank learns who failed first. The failing rank raises its own error, the others
`PipelineAborted` with the name, action and error of the first. `reset` makes the next step possible.

Loss: stages return sums over tokens; the step divides by the number of tokens of *all* microbatches, so uneven and
ragged microbatches weigh what they should.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from titan_pipeline._measure import Measurement
from titan_pipeline._schedule import Action, Kind, Schedule
from titan_pipeline._simulate import Slot
from titan_pipeline._verify import verify
from titan_pipeline.runtime._messages import Failure, Key, PipelineAborted
from titan_pipeline.runtime._program import Program, check_order, compile_program
from titan_pipeline.runtime._stage import Stage
from titan_pipeline.runtime._tied import TiedWeight, check_ties, reduce_tied
from titan_pipeline.runtime._transport import ThreadHub, Transport


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back, on every rank."""

    loss: float
    """Sum of all microbatches' losses over the denominator; the same on every rank."""
    denominator: float
    """What it was divided by: tokens, or microbatches."""
    losses: tuple[Any, ...]
    """Loss sums by microbatch, on the last stage's rank; empty elsewhere."""
    aux_loss: float = 0.0
    """Weighted sum of all stages' auxiliary losses, the same on every rank; not part of ``loss``."""


class Executor:
    """Runs the programs of one rank.

    Args:
        schedule: Verified at construction; give the same on every rank.
        stages: The stages this rank holds, in any order.
        transport: None for a pipeline of one rank.
        count_tokens: Tokens of one target; by default each microbatch counts 1 (give losses averaged over it then).
        tied: Parameters that several stages share; their gradients are summed at the end of a step. See `TiedWeight`.
        deterministic: Refuse a schedule whose stages see their microbatches out of order, so that every gradient is
            summed in the order of one process: the result is then bit-equal to it.
        trace: Record when each action ran; see `measured`.
        synchronize: Called before each time is read while tracing. Give ``torch.cuda.synchronize`` on a GPU, whose work
            is otherwise only queued when an action returns.

    Raises:
        ValueError: If the stages are not those of this rank, the transport has another number of ranks, or a tied
            weight names a stage or parameter that does not exist.
        ScheduleError: If the schedule cannot run.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        transport: Transport | None = None,
        *,
        count_tokens: Callable[[Any], float] | None = None,
        tied: Sequence[TiedWeight] = (),
        deterministic: bool = False,
        trace: bool = False,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.transport: Transport = transport if transport is not None else ThreadHub(1).transport(0)
        self.rank = self.transport.rank
        self.stages = {stage.index: stage for stage in stages}
        self.spans: list[Slot] = []
        """With ``trace``: when each action of this rank ran, in seconds since the step began here."""
        self._count = count_tokens
        self.tied = tuple(tied)
        self._deterministic = deterministic
        self._trace = trace
        self._clock = time.perf_counter if synchronize is None else _synchronized(synchronize)
        self._began = 0.0
        self._broken = False
        self._forward_program: Program | None = None
        self.swap(schedule)

    def swap(self, schedule: Schedule) -> None:
        """Use another schedule from the next step on; the placement of stages must stay. Call on every rank."""
        if schedule.num_ranks != self.transport.num_ranks:
            raise ValueError(
                f"the schedule is for {schedule.num_ranks} ranks, the transport has {self.transport.num_ranks}."
            )
        mine = set(schedule.stages_of(self.rank))
        if mine != set(self.stages):
            raise ValueError(
                f"rank {self.rank} holds stages {sorted(self.stages)}, the schedule puts {sorted(mine)} on it. "
                "Build those, or use a schedule with this placement."
            )
        verify(schedule)
        check_ties(self.tied, self.stages, schedule.num_stages)
        if self._deterministic:
            check_order(schedule)
        split = {a.stage for a in schedule.ranks[self.rank] if a.kind is Kind.I}
        for stage in self.stages.values():
            stage.configure(stage.index in split)
        self.schedule = schedule
        self._program = compile_program(schedule, self.rank)
        self._forward_program = None

    def step(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        extras: Sequence[Mapping[str, Any]] | None = None,
        denominator: float | None = None,
        aux_weight: float | None = None,
    ) -> StepResult:
        """Forward and backward of one batch; gradients are added to the parameters'.

        Args:
            inputs: On the rank of stage 0: one entry a microbatch, a tensor or a tuple of them. Shapes may differ.
            targets: On the rank of the last stage: one entry a microbatch.
            extras: Keyword tensors by microbatch for every stage of this rank (positions, document ids). They are not
                sent from stage to stage: every rank gives its own.
            denominator: Divide the loss by this instead of the counted tokens (with data parallelism, the tokens of
                all ranks; where the wrapper averages gradients, those over the number of replicas). Give it on every
                rank or on none.
            aux_weight: What one microbatch's auxiliary losses weigh; ``1 / num_microbatches`` by default.

        Raises:
            PipelineAborted: Another rank failed.
            ValueError: Inputs, targets or the schedule do not fit; every other rank then raises `PipelineAborted`.
        """
        batch = _Batch(inputs, targets, extras, denominator, aux_weight, training=True)
        return self._run(self._program, batch)[0]

    def evaluate(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        extras: Sequence[Mapping[str, Any]] | None = None,
        denominator: float | None = None,
    ) -> StepResult:
        """The loss of one batch without gradients; any schedule, as many microbatches as a step has."""
        return self._run(self._evaluation(), _Batch(inputs, targets, extras, denominator, None, training=False))[0]

    def infer(
        self, inputs: Sequence[Any] | None = None, *, extras: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Any]:
        """The outputs of the last stage by microbatch, on its rank; an empty list elsewhere."""
        outputs = self._run(self._evaluation(), _Batch(inputs, None, extras, None, None, training=False))[1]
        return [outputs[mb] for mb in sorted(outputs)]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, in rank order. Call on every rank, with as many values."""
        return self.transport.close_step(None, values)[1]

    def measured(self) -> Measurement:
        """The last training step as all ranks ran it. Needs ``trace=True``; call on every rank.

        Use: ``costs = fit_costs([executor.measured(), …])``, then ``executor.swap(solve(costs, …).schedule)``.

        Raises:
            RuntimeError: If the last step of this rank was not traced, or was no training step.
        """
        program = self.schedule.compute_only().ranks[self.rank]
        if tuple(span.action for span in self.spans) != program:
            raise RuntimeError(
                f"rank {self.rank} has {len(self.spans)} traced actions, the schedule {len(program)}. Make the executor "
                "with trace=True on every rank and run a training step first."
            )
        longest = max(len(p) for p in self.schedule.compute_only().ranks)
        times = [t + self._began for span in self.spans for t in (span.start, span.end)]
        rows = self.gather([*times, *[0.0] * (2 * longest - len(times))])
        compute = self.schedule.compute_only()
        begin = min(row[0] for row in rows)
        slots = tuple(
            tuple(Slot(a, row[2 * i] - begin, row[2 * i + 1] - begin) for i, a in enumerate(p))
            for p, row in zip(compute.ranks, rows, strict=True)
        )
        return Measurement(compute, slots)

    def reset(self) -> None:
        """Forget a step that failed. Call on every rank."""
        for stage in self.stages.values():
            stage.clear()
        self._broken = False

    def _evaluation(self) -> Program:
        if self._forward_program is None:
            self._forward_program = compile_program(self.schedule.for_evaluation(), self.rank)
        return self._forward_program

    def _run(self, program: Program, batch: "_Batch") -> tuple[StepResult, dict[int, Any]]:
        if self._broken:
            raise RuntimeError("the last step failed. Call reset() on every rank before the next one.")
        transport, training = self.transport, batch.training
        run = _Run(self, program, batch)
        error: BaseException | None = None
        failure: Failure | None = None
        transport.begin(*program.traffic_with(self.tied if training else (), self.rank))
        try:
            run.prepare()
            run.execute()
            if training:
                reduce_tied(self.tied, self.stages, self.schedule.placement, transport)
        except PipelineAborted as err:
            failure = err.failure
            transport.announce(failure)
        except BaseException as err:
            error = err
            failure = Failure(self.rank, *program.where(run.position), f"{type(err).__name__}: {err}")
            transport.announce(failure)
        first, reports = transport.close_step(failure, (run.loss_sum, run.denominator, run.aux_sum))
        self.spans = run.spans
        if first is not None:
            self._broken = True
            if error is not None:
                raise error
            raise PipelineAborted(first)
        loss_sum, divisor, _ = reports[self.schedule.placement[-1]]
        aux = sum(report[2] for report in reports)
        return StepResult(loss_sum / divisor, divisor, tuple(run.losses), aux), run.outputs


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a step was called with."""

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    extras: Sequence[Mapping[str, Any]] | None
    denominator: float | None
    aux_weight: float | None
    training: bool


class _Run:
    """The state of one step on one rank."""

    def __init__(
        self,
        executor: Executor,
        program: Program,
        batch: _Batch,
    ) -> None:
        self.executor = executor
        self.program = program
        self.inputs = batch.inputs
        self.targets = batch.targets
        self.extras = batch.extras
        self.training = batch.training
        self.position = -1
        self.loss_sum = 0.0
        self.aux_sum = 0.0
        self.denominator = 1.0 if batch.denominator is None else batch.denominator
        self._given = batch.denominator
        self.aux_weight = 1.0 / program.num_microbatches if batch.aux_weight is None else batch.aux_weight
        self.losses: list[Any] = []
        self.outputs: dict[int, Any] = {}
        self.spans: list[Slot] = []

    def prepare(self) -> None:
        """Check the batch, count its tokens."""
        m, last = self.program.num_microbatches, self.program.num_stages - 1
        stages = self.executor.stages
        if 0 in stages and (self.inputs is None or len(self.inputs) != m):
            given = "none" if self.inputs is None else str(len(self.inputs))
            raise ValueError(
                f"the schedule runs {m} microbatches and rank {self.executor.rank} holds stage 0, but got {given} "
                f"inputs. Give {m}, or swap() to a schedule for another number."
            )
        if self.extras is not None and len(self.extras) != m:
            raise ValueError(f"the schedule runs {m} microbatches but got {len(self.extras)} extras. Give one each.")
        if last in stages and (self.training or self.targets is not None):
            if self.targets is None or len(self.targets) != m:
                given = "none" if self.targets is None else str(len(self.targets))
                raise ValueError(
                    f"rank {self.executor.rank} holds the last stage and needs {m} targets, got {given}. "
                    "Give one a microbatch."
                )
            if self._given is None:
                count = self.executor._count
                self.denominator = float(m if count is None else sum(count(t) for t in self.targets))
                if not self.denominator > 0:
                    raise ValueError("the batch holds no tokens to average the loss over. Skip it, or mask less.")

    def execute(self) -> None:
        """Walk the program."""
        executor, program, transport = self.executor, self.program, self.executor.transport
        stages, targets, training = executor.stages, self.targets, self.training
        place, last, local = program.place, program.num_stages - 1, program.local
        forward: dict[tuple[int, int], Any] = {}  # results that wait for their send, or for the next stage here
        backward: dict[tuple[int, int], Any] = {}
        loss_parts: dict[int, Any] = {}
        seed = (1.0 / self.denominator,)
        nothing: Mapping[str, Any] = {}
        extras = self.extras
        aux: list[Any] = []
        for stage in stages.values():
            stage.begin(training, self.aux_weight)
        clock = executor._clock
        executor._began = time.time()
        begin = time.perf_counter()
        started = 0.0
        for position, (kind, s, mb) in enumerate(program.actions):
            self.position = position
            if transport.failed() is not None:
                raise PipelineAborted(cast(Failure, transport.failed()))
            if kind is Kind.F:
                if s == 0:
                    value = cast(Sequence[Any], self.inputs)[mb]
                    given = value if isinstance(value, tuple) else (value,)
                elif local[s - 1]:
                    given = forward.pop((s - 1, mb))
                else:
                    given = self._receive(place[s - 1], (0, s, mb))
                if self.executor._trace:
                    started = clock()
                target = targets[mb] if s == last and targets is not None else None
                extra = nothing if extras is None else extras[mb]
                outputs = stages[s].forward(mb, given, target, extra, training)
                if s < last:
                    forward[s, mb] = outputs
                elif target is not None:
                    loss_parts[mb] = outputs[0]
                else:
                    self.outputs[mb] = outputs[0] if len(outputs) == 1 else outputs
            elif kind is Kind.W:
                if self.executor._trace:
                    started = clock()
                stages[s].backward_weight(mb)
            elif kind is Kind.SEND_F:
                transport.send(place[s + 1], (0, s + 1, mb), forward.pop((s, mb)))
                continue
            elif kind is Kind.SEND_B:
                transport.send(place[s - 1], (1, s - 1, mb), backward.pop((s, mb)))
                continue
            elif kind is None:
                aux.append(stages[s].finish(training))
                continue
            else:
                if s == last:
                    grads: Any = seed
                elif local[s]:
                    grads = backward.pop((s + 1, mb))
                else:
                    grads = self._receive(place[s + 1], (1, s, mb))
                if self.executor._trace:
                    started = clock()
                result = stages[s].backward(mb, grads, kind is Kind.I)
                if s:
                    backward[s, mb] = result
            if self.executor._trace:
                self.spans.append(Slot(Action(kind, s, mb), started - begin, clock() - begin))
        self.position = -1
        self.losses = [loss_parts[mb] for mb in sorted(loss_parts)]
        self.loss_sum = float(sum(float(x) for x in self.losses))
        self.aux_sum = self.aux_weight * sum(float(x) for x in aux if x is not None)

    def _receive(self, source: int, key: Key) -> Any:
        got = self.executor.transport.receive(source, key)
        if isinstance(got, Failure):
            raise PipelineAborted(got)
        return got


def _synchronized(synchronize: Callable[[], None]) -> Callable[[], float]:
    def clock() -> float:
        synchronize()
        return time.perf_counter()

    return clock
