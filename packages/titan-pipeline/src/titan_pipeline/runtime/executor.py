"""Run a schedule: each rank walks its own program, nothing more.

The executor compiles the rank's program (with communication, see `titan_pipeline.lower`) to a list of bound calls and
runs them in order. What happens inside a stage is the stage's business, how messages move is the transport's; between
the two lies only this loop, at a few microseconds an action.

Failure: a rank that raises announces a `PeerFailure` to the ranks that still wait for it. They stop at their next action, and
all ranks meet at the end of the step, where each learns who failed first. The failing rank raises its own error, the others
`PipelineAborted` with the rank, action and error of the first. `reset` and ``zero_grad`` make the next step possible.

Loss: stages return sums over tokens; the step divides by the number of tokens of *all* microbatches, so uneven and
ragged microbatches weigh what they should.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from titan_pipeline.analysis.measure import Measurement
from titan_pipeline.analysis.simulate import Slot
from titan_pipeline.analysis.verify import verify
from titan_pipeline.ir.schedule import COMPUTE, Action, Kind, Schedule
from titan_pipeline.runtime.agreement import LOW_SHARE, DeferredWork, agree, expected_gain, refuse, warn_of_low_shares
from titan_pipeline.runtime.clock import Clock, HostClock
from titan_pipeline.runtime.program import Program, compile_program
from titan_pipeline.runtime.stage.protocol import Stage
from titan_pipeline.runtime.stage.tied import TiedWeight, check_ties, keep_one, reduce_tied
from titan_pipeline.runtime.step import StepBatch, StepRun
from titan_pipeline.runtime.transport.base import Transport
from titan_pipeline.runtime.transport.messages import PeerFailure, PipelineAborted
from titan_pipeline.runtime.transport.threads import ThreadHub
from titan_pipeline.runtime.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a step gives back, on every rank."""

    loss: float
    """Sum of all microbatches' losses over the denominator; the same on every rank."""
    denominator: float
    """What it was divided by: tokens, or microbatches."""
    losses: tuple[Any, ...]
    """Loss sums by microbatch, on the last stage's rank; empty elsewhere."""
    metrics: tuple[Any, ...] = ()
    """What the loss function returned beside the loss, by microbatch, on the last stage's rank."""
    aux_loss: float = 0.0
    """Weighted sum of all stages' auxiliary losses, the same on every rank; not part of ``loss``."""


class Executor:
    """Runs the programs of one rank. Construction is collective: every rank of the pipeline builds its own.

    Args:
        schedule: Verified at construction; give the same on every rank.
        stages: The stages this rank holds, in any order.
        transport: None for a pipeline of one rank.
        count_tokens: Tokens of one target; by default each microbatch counts 1 (give losses averaged over it then).
        tied: Parameters that several stages share; their gradients are summed at the end of a step. See `TiedWeight`.
        deterministic: Refuse a schedule whose stages see their microbatches out of order, so that every gradient is
            summed in the order of one process: the result is then bit-equal to it.
        trace: Record when each action ran; see `measured`. `Executor.trace` may be set between steps, to trace one of many.
        hang_timeout_s: If no rank has made progress for so long, all of them raise `PipelineAborted`, which names the rank
            that hangs and its action. Longer than the longest action, compilation included, and than what a rank does
            alone between a step and where all meet (`clip_grad_norm`, `gather`, `swap`); None waits for ever.
        clock: The clock of traces: the host's by default. Stages on an accelerator need a `DeviceClock`, since
            their work is only queued when an action returns.

    Raises:
        ValueError: If the stages are not those of this rank, the transport has another number of ranks, or a tied
            weight names a stage or parameter that does not exist.
        ScheduleError: If the schedule cannot run.
        PipelineAborted: If it is another rank that found one of these.
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
        hang_timeout_s: float | None = 600.0,
        clock: Clock | None = None,
    ) -> None:
        self.transport: Transport = transport if transport is not None else ThreadHub(1).transport(0)
        self.rank = self.transport.rank
        self.stages = {stage.index: stage for stage in stages}
        self.spans: list[Slot] = []
        """With ``trace``: when each action of this rank ran, in seconds since the first of them began here."""
        self._count = count_tokens
        self.tied = tuple(tied)
        self._deterministic = deterministic
        self.trace = trace
        """Whether the next steps record when each action ran. Set it on all ranks alike."""
        self.around: Callable[[Action | None], AbstractContextManager[object]] | None = None
        """Gives a block to run each compute action in, to time or to label it, and with None each wait of a step for others."""
        self._clock = HostClock() if clock is None else clock
        self._began = 0.0
        self._broken = False
        self._split: set[int] = set()
        """Stages whose backwards come in two halves."""
        self._forward_program: Program | None = None
        if hang_timeout_s is not None and not hang_timeout_s > 0:
            raise ValueError(f"hang_timeout_s={hang_timeout_s}: give seconds above 0, or None to wait for ever.")
        self._watchdog = None if hang_timeout_s is None else Watchdog(self.transport, hang_timeout_s)
        self.deferred: DeferredWork | None = None
        """How much of the weight gradients waits for W actions, and the bubble that follows; None for a schedule that
        does not split backwards. A forecast, made when the schedule is set; stages report what happened."""
        self._check_or_refuse(schedule)
        self._use(schedule)

    def swap(self, schedule: Schedule) -> None:
        """Use another schedule from the next step on; the placement of stages must stay.

        Collective: call it on every rank, with the same schedule.

        Raises:
            ValueError: If the schedule does not fit the stages, or the ranks gave different ones.
            ScheduleError: If the schedule cannot run.
            PipelineAborted: If another rank's stages do not fit the schedule that was given there.
        """
        self._check_or_refuse(schedule)
        self._use(schedule)

    def _check_or_refuse(self, schedule: Schedule) -> None:
        """Raise on all ranks if this rank cannot run the schedule: the others may have found nothing wrong."""
        try:
            self._check(schedule)
        except ValueError as err:
            with self._meeting():
                refuse(self.transport, err)
            raise

    def _check(self, schedule: Schedule) -> None:
        """Raise if this rank cannot run the schedule."""
        if schedule.num_ranks != self.transport.num_ranks:
            raise ValueError(
                f"the schedule is for {schedule.num_ranks} ranks, the transport has {self.transport.num_ranks}."
            )
        mine = set(schedule.stages_of(self.rank))
        if mine != set(self.stages):
            raise ValueError(
                f"rank {self.rank} holds stages {sorted(self.stages)}, but the schedule puts {sorted(mine)} on it. "
                "Build those, or use a schedule with this placement."
            )
        verify(schedule, in_order=self._deterministic)
        check_ties(self.tied, self.stages, schedule.num_stages)

    def _use(self, schedule: Schedule) -> None:
        """Agree with the other ranks on a schedule that was checked, and take it."""
        before = self._split
        self._configure({a.stage for a in schedule.ranks[self.rank] if a.kind is Kind.I})
        try:
            with self._meeting():
                self.deferred = agree(schedule, self.stages, self.transport)
        except (ValueError, PipelineAborted):  # the schedule of before stays
            self._configure(before)
            raise
        if self.deferred is not None:
            warn_of_low_shares(schedule, self.deferred, self.stages)
        self.spans = []
        self.schedule = schedule
        self._program = compile_program(schedule, self.rank)
        self._forward_program = None

    def _configure(self, split: set[int]) -> None:
        """Have these stages run their backwards in two halves, and no others."""
        if self._split and self._split != split:  # stages that share a layer have wrapped it one over the other
            for stage in reversed(tuple(self.stages.values())):
                stage.configure(False)
        for stage in self.stages.values():
            stage.configure(stage.index in split)
        self._split = split

    def step(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        extras: Sequence[Mapping[str, Any]] | None = None,
        denominator: float | Tensor | None = None,
        aux_weight: float | None = None,
    ) -> PipelineResult:
        """Forward and backward of one batch; gradients are added to the parameters'.

        Args:
            inputs: On the rank of stage 0: one entry per microbatch, a tensor or a tuple of them. Shapes may differ.
            targets: On the rank of the last stage: one entry per microbatch.
            extras: Keyword tensors by microbatch for every stage of this rank (positions, document ids). They are not
                sent from stage to stage: every rank gives its own.
            denominator: Divide the loss by this instead of the counted tokens (with data parallelism, the tokens of
                all ranks; where the wrapper averages gradients, those over the number of replicas). Give it on every
                rank or on none. A scalar tensor on the stages' device is not read before the step has run, so that
                the host need not wait for a sum over ranks.
            aux_weight: What one microbatch's auxiliary losses weigh; ``1 / num_microbatches`` by default.

        Raises:
            PipelineAborted: Another rank failed.
            ValueError: Inputs, targets or the schedule do not fit; every other rank then raises `PipelineAborted`.
        """
        batch = StepBatch(inputs, targets, extras, denominator, aux_weight, training=True)
        result = self._run(self._program, batch)[0]
        self._check_deferred()
        return result

    def evaluate(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        extras: Sequence[Mapping[str, Any]] | None = None,
        denominator: float | Tensor | None = None,
    ) -> PipelineResult:
        """The loss of one batch without gradients; any schedule, as many microbatches as a step has."""
        return self._run(self._evaluation(), StepBatch(inputs, targets, extras, denominator, None, training=False))[0]

    def infer(
        self, inputs: Sequence[Any] | None = None, *, extras: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Any]:
        """The outputs of the last stage by microbatch, on its rank; an empty list elsewhere."""
        batch = StepBatch(inputs, None, extras, None, None, training=False, wants_loss=False)
        outputs = self._run(self._evaluation(), batch)[1]
        return [outputs[mb] for mb in sorted(outputs)]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, in rank order. Call on every rank, with as many values."""
        with self._meeting():
            failure, rows = self.transport.close_step(None, values)
        if failure is not None:
            raise PipelineAborted(failure)
        return rows

    def measured(self, ahead_s: float = 0.0) -> Measurement:
        """The last training step as all ranks ran it. Needs `trace`; call on every rank.

        Use: ``costs = fit_costs([executor.measured(), …])``, then ``executor.swap(solve(costs, …).schedule)``.

        Args:
            ahead_s: Seconds that this rank's clock is ahead of a clock that all ranks share; 0 on one machine.

        Raises:
            RuntimeError: If the last step of this rank was not traced, or was no training step.
        """
        program = self.schedule.compute_only().ranks[self.rank]
        if tuple(span.action for span in self.spans) != program:
            raise RuntimeError(
                f"rank {self.rank} has {len(self.spans)} traced actions, the schedule {len(program)}. Set "
                "trace=True on every rank and run a training step first."
            )
        longest = max(len(p) for p in self.schedule.compute_only().ranks)
        times = [t + self._began - ahead_s for span in self.spans for t in (span.start, span.end)]
        rows = self.gather([*times, *[0.0] * (2 * longest - len(times))])
        compute = self.schedule.compute_only()
        begin = min(row[0] for row in rows)
        slots = tuple(
            tuple(Slot(a, row[2 * i] - begin, row[2 * i + 1] - begin) for i, a in enumerate(p))
            for p, row in zip(compute.ranks, rows, strict=True)
        )
        return Measurement(compute, slots)

    def reset(self) -> None:
        """Forget a step that failed. Call on every rank, and ``zero_grad`` before the next step.

        Parameters may still hold gradients of the microbatches that ran before the failure.

        Raises:
            RuntimeError: A rank hangs, so that the ranks cannot meet any more.
        """
        failure = self.transport.failed()
        if failure is not None and failure.hung:
            raise RuntimeError(f"{failure}. There is no next step: restart the job.")
        self._clear()
        self._broken = False

    def _clear(self) -> None:
        """Drop activations and deferred gradients of a step that failed."""
        for stage in self.stages.values():
            stage.clear()

    @contextmanager
    def _meeting(self) -> Generator[None, None, None]:
        """Around what waits for all ranks."""
        if self._watchdog is not None:
            self._watchdog.meet()
        try:
            yield
        finally:
            if self._watchdog is not None:
                self._watchdog.rest()

    def _check_deferred(self) -> None:
        """Warn once if a stage of this rank deferred less than was forecast."""
        work = self.deferred
        if work is None:
            return
        shares = tuple(
            min(share, getattr(self.stages.get(s), "deferred_share", 1.0)) for s, share in enumerate(work.shares)
        )
        if shares == work.shares:
            return
        late = {s: self.stages[s] for s in self.stages if shares[s] < LOW_SHARE <= work.shares[s]}
        self.deferred = expected_gain(self.schedule, shares)
        warn_of_low_shares(self.schedule, self.deferred, late)

    def _evaluation(self) -> Program:
        if self._forward_program is None:
            self._forward_program = compile_program(self.schedule.for_evaluation(), self.rank)
        return self._forward_program

    def _read_marks(self, program: Program, marks: Sequence[Any]) -> None:
        """Times of the actions that ran: all ranks have met, so nothing that the device waits for is still to come."""
        times = self._clock.times(marks) if marks else [0.0]
        self._began = times[0]
        actions = (Action(kind, s, mb) for kind, s, mb in program.actions if kind is not None and kind in COMPUTE)
        self.spans = [
            Slot(action, start - times[0], end - times[0])
            for action, start, end in zip(actions, times[::2], times[1::2], strict=False)
        ]

    def _run(self, program: Program, batch: StepBatch) -> tuple[PipelineResult, dict[int, Any]]:
        if self._broken:
            raise RuntimeError(
                "the last step failed. Call reset() and the optimizer's zero_grad() on every rank before the next one."
            )
        transport, training = self.transport, batch.training
        run = StepRun(
            program, batch, self.stages, transport, self._count, self._clock if self.trace else None, self.around
        )
        error: BaseException | None = None
        failure: PeerFailure | None = None
        transport.begin(*program.traffic_with(self.tied if training else (), self.rank))
        if self._watchdog is not None:
            self._watchdog.step(run, program.where)
        try:
            run.prepare()
            if training:
                keep_one(self.tied, self.stages)
            run.execute()
            if training:
                reduce_tied(self.tied, self.stages, self.schedule.placement, transport, run.receive)
        except PipelineAborted as err:
            failure = err.failure
            transport.announce(failure)
        except BaseException as err:
            error = err
            failure = PeerFailure(self.rank, *program.where(run.position), f"{type(err).__name__}: {err}")
            transport.announce(failure)
        if failure is not None:
            with suppress(Exception):  # `reset` raises it again; here all ranks would wait for this one
                self._clear()  # to drain the channels takes memory
        with self._meeting(), nullcontext() if self.around is None else self.around(None):
            first, reports = transport.close_step(failure, (run.loss_sum, float(run.denominator), run.aux_sum))
        self._read_marks(program, run.marks if first is None else [])
        if first is not None:
            self._broken = True
            if error is not None:
                raise error
            raise PipelineAborted(first)
        loss_sum, divisor, _ = reports[self.schedule.placement[-1]]
        aux = sum(report[2] for report in reports)
        metrics = tuple(run.metrics[mb] for mb in sorted(run.metrics))
        return PipelineResult(loss_sum / divisor, divisor, tuple(run.losses), metrics, aux), run.outputs
