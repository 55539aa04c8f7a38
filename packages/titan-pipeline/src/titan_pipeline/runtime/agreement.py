"""What all ranks must agree on before a schedule runs: the schedule itself; and what a split backward will gain.

Ranks that run different schedules wait for messages that never come. So every rank sends the digest of its schedule when
an executor is built or a schedule is swapped in, and all of them refuse a difference.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titan_pipeline.analysis.simulate import simulate
from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.schedule import Schedule
from titan_pipeline.runtime.transport.base import Transport
from titan_pipeline.runtime.transport.messages import PeerFailure, PipelineAborted
from titan_pipeline.solver.search import solve

LOW_SHARE = 0.9
"""Below this share of deferred weight gradients a split schedule is worth a warning."""

_PARTS = 8
"""Numbers of a report that hold the digest."""
_WIDTH = 64
"""Stages per rank that fit a report; the rest count as 1."""
_logger = logging.getLogger("titan_pipeline")


@dataclass(frozen=True, slots=True)
class DeferredWork:
    """How much of the weight gradients waits for W actions, and what that makes of the bubble.

    A stage's share is counted by the elements of its weights. The bubbles are those of equal stages with equal times for
    F, I and W and instant links: what does not wait moves from W to I.
    """

    shares: tuple[float, ...]
    """The deferred share of each stage, from 0 to 1."""
    planned_bubble: float
    """Makespan bubble if everything waits."""
    expected_bubble: float
    """Makespan bubble with these shares."""

    def __str__(self) -> str:
        low = min(self.shares)
        where = [s for s, share in enumerate(self.shares) if share == low]
        return (
            f"stages defer at least {low:.0%} of their weight gradients (stages {where}); expected bubble "
            f"{self.expected_bubble:.1%}, {self.planned_bubble:.1%} if all of them waited"
        )


def agree(schedule: Schedule, stages: Mapping[int, Any], transport: Transport) -> DeferredWork | None:
    """Check that all ranks have this schedule. Collective over the pipeline's ranks.

    Returns:
        What a split backward gains; None for a schedule that does not split.

    Raises:
        ValueError: The ranks have different schedules; raised on every rank.
        PipelineAborted: Another rank could not run its schedule; see `refuse`.
    """
    digest = schedule.digest
    own = [float(int(digest[8 * k : 8 * k + 8], 16)) for k in range(_PARTS)]
    held = schedule.stages_of(transport.rank)
    shares = [float(getattr(stages[s], "deferred_share", 1.0)) for s in held]
    report = [*own, *shares[:_WIDTH], *[1.0] * (_WIDTH - len(shares[:_WIDTH]))]
    failure, rows = transport.close_step(None, report)
    if failure is not None:
        raise PipelineAborted(failure)
    by_digest: dict[tuple[float, ...], list[int]] = {}
    for rank, row in enumerate(rows):
        by_digest.setdefault(tuple(row[:_PARTS]), []).append(rank)
    if len(by_digest) > 1:
        groups = "; ".join(f"ranks {ranks}: digest {int(key[0]):08x}" for key, ranks in by_digest.items())
        raise ValueError(
            f"the ranks have different schedules ({groups}). Rank {transport.rank} has {schedule.name!r} with "
            f"{schedule.num_microbatches} microbatches. Give every rank the same one: load one file, or use "
            "solve_on_rank0, since a search with a time limit ends differently on every rank."
        )
    if not schedule.splits_backward:
        return None
    known: dict[int, float] = {}
    for rank, row in enumerate(rows):
        known |= dict(zip(schedule.stages_of(rank), row[_PARTS:], strict=False))
    return expected_gain(schedule, tuple(known.get(s, 1.0) for s in range(schedule.num_stages)))


def refuse(transport: Transport, error: ValueError) -> None:
    """In place of `agree`, on a rank that cannot run its schedule: the others get the error from theirs."""
    failure = PeerFailure(transport.rank, -1, "", f"{type(error).__name__}: {error}")
    transport.close_step(failure, [0.0] * (_PARTS + _WIDTH))


def expected_gain(schedule: Schedule, shares: Sequence[float]) -> DeferredWork:
    """The bubble of a schedule whose stages defer these shares."""
    equal = Costs.uniform(schedule.num_stages, num_chunks=schedule.num_chunks)
    planned = simulate(schedule, equal).makespan_bubble
    if min(shares) == 1:
        return DeferredWork(tuple(shares), planned, planned)
    costs = Costs(
        forward=equal.forward,
        input_grad=tuple(i + (1 - s) * w for i, w, s in zip(equal.input_grad, equal.weight_grad, shares, strict=True)),
        weight_grad=tuple(s * w for w, s in zip(equal.weight_grad, shares, strict=True)),
        activation=equal.activation,
        weight_context=equal.weight_context,
    )
    return DeferredWork(tuple(shares), planned, simulate(schedule, costs).makespan_bubble)


def warn_of_low_shares(schedule: Schedule, work: DeferredWork, stages: Mapping[int, Any]) -> None:
    """Log a warning for each stage of this rank that defers less than `LOW_SHARE`."""
    for s in sorted(stages):
        if work.shares[s] >= LOW_SHARE:
            continue
        reasons = sorted(set(getattr(stages[s], "not_deferred", {}).values()))
        expected, planned = (f"{100 * bubble:.1f} %" for bubble in (work.expected_bubble, work.planned_bubble))
        _logger.warning(
            "stage %d defers %.0f %% of its weight gradients: the rest comes with the input gradients. With schedule %s, "
            "expect a bubble of %s%s. Reasons: %s. Give TorchStage rules for these layers, or take "
            "a schedule without split backwards.",
            s, 100 * work.shares[s], schedule.name, expected,
            ", as planned" if expected == planned else f" instead of {planned}", "; ".join(reasons) or "unknown",
        )  # fmt: skip


def solve_on_rank0(transport: Transport, costs: Costs | None, num_microbatches: int, **options: Any) -> Schedule:
    """Search a schedule on rank 0 and give it to all ranks. Call on every rank of the pipeline, between steps.

    A search with a time limit ends differently on every machine, so ranks that search for themselves disagree.

    Args:
        transport: The pipeline's.
        costs: Needed on rank 0 only.
        num_microbatches: Microbatches per step.
        options: More arguments of `titan_pipeline.solve`, for rank 0.

    Raises:
        ValueError: On rank 0, if the search refuses its arguments; the others raise `PipelineAborted` with its message.
    """
    others = range(1, transport.num_ranks)
    key = (4, 0, 0)
    if transport.rank:
        transport.begin({0: [key]}, {})
    else:
        transport.begin({}, dict.fromkeys(others, 1))
    error: BaseException | None = None
    failure: PeerFailure | None = None
    schedule: Schedule | None = None
    try:
        if transport.rank:
            got = transport.receive(0, key)
            if isinstance(got, PeerFailure):
                raise PipelineAborted(got)
            assert got[0] is not None
            schedule = Schedule.from_json(bytes(got[0].tolist()).decode())
        else:
            if costs is None:
                raise ValueError("costs=None on rank 0, which searches. Give the costs there.")
            schedule = solve(costs, num_microbatches, **options).schedule
            text = torch.tensor(list(schedule.to_json().encode()), dtype=torch.uint8)
            for target in others:
                transport.send(target, key, (text,))
    except BaseException as err:
        error = err
        failure = (
            err.failure if isinstance(err, PipelineAborted)
            else PeerFailure(transport.rank, -1, "", f"{type(err).__name__}: {err}")
        )  # fmt: skip
        transport.announce(failure)
    first, _ = transport.close_step(failure, ())
    if error is not None:
        raise error
    if first is not None:
        raise PipelineAborted(first)
    assert schedule is not None
    return schedule
