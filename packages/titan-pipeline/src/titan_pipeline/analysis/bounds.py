"""What no schedule can beat: lower bounds on the time of a step.

Three facts, each a proof by itself; the bound is the largest.

1. A rank cannot start before its first stage is reached, and must then do all of its work. If its last action may be a
   weight gradient (split backward), nothing needs to follow it; if not, the gradients still have to walk back to
   stage 0.
2. A microbatch takes its whole way up and down.
3. Until the first gradient comes back to a rank, the rank can only run forwards, and only as many as fit into its
   memory. What it then still has to do comes after. This is the bound that makes "less memory costs time" certain.

With p equal ranks, v chunks and unlimited memory, fact 1 is the known ``(p-1)(T_F/v + T_c) + m (T_F+T_B+T_W)``.
"""

import math
from collections.abc import Sequence
from typing import Literal

from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.placement import Placement, check_placement

Objective = Literal["makespan", "stage_span"]


def lower_bound(
    costs: Costs,
    *,
    num_microbatches: int,
    placement: Placement,
    mem_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    split_backward: bool = True,
) -> float:
    """A time that no schedule of this placement finishes before, in the unit of the costs.

    Args:
        costs: One entry per stage.
        num_microbatches: Microbatches per step.
        placement: Rank of each stage.
        mem_limit: Largest memory of every rank, or one per rank; None for no limit.
        objective: ``"makespan"`` (end of the last action) or ``"stage_span"`` (longest span of a rank).
        split_backward: Whether backwards may be split; without, weight gradients delay input gradients.

    Raises:
        ValueError: If no schedule fits ``mem_limit``, or the costs do not match the placement.
    """
    check_placement(placement)
    costs.check(len(placement))
    if objective not in ("makespan", "stage_span"):
        raise ValueError(f"objective={objective!r} is unknown. Use 'makespan' or 'stage_span'.")
    reach, back = _first_arrivals(costs, placement, split_backward)
    num_stages = len(placement)
    limits = expand_limits(mem_limit, placement)
    best = 0.0
    for rank in range(max(placement) + 1):
        stages = [s for s in range(num_stages) if placement[s] == rank]
        work = num_microbatches * sum(_stage_work(costs, s, split_backward) for s in stages)
        head = min(reach[s] for s in stages)
        tail = 0.0 if split_backward else _walk_down(costs, placement, min(stages))
        first_gradient = min(back[s] for s in stages)
        forward = forwards_before_gradient(costs, stages, num_microbatches, limits[rank])
        if objective == "makespan":
            best = max(best, head + work + tail, first_gradient + work - forward)
        else:
            best = max(best, work, _round_trip(reach, back, stages) + work - forward)
    if objective == "makespan":
        best = max(best, back[0] + _gradient_time(costs, 0, split_backward))
    return best


def expand_limits(mem_limit: float | Sequence[float] | None, placement: Placement) -> list[float]:
    """One limit per rank; infinity for none."""
    num_ranks = max(placement) + 1
    if mem_limit is None:
        return [math.inf] * num_ranks
    if isinstance(mem_limit, int | float):
        return [float(mem_limit)] * num_ranks
    if len(mem_limit) != num_ranks:
        raise ValueError(f"mem_limit has {len(mem_limit)} entries for {num_ranks} ranks.")
    return [float(x) for x in mem_limit]


def forwards_before_gradient(costs: Costs, stages: Sequence[int], num_microbatches: int, limit: float) -> float:
    """Most forward time that fits into ``limit`` before any gradient arrives (an upper bound on it).

    The fractional knapsack: take the stages with most time per memory first. One microbatch of every stage must fit
    for the first gradient to come back at all.
    """
    needed = sum(costs.activation[s] for s in stages)
    if needed > limit * (1 + 1e-9):
        raise ValueError(
            f"mem_limit={limit:.6g} is less than one microbatch on stages {tuple(stages)} of a rank ({needed:.6g}): "
            "no schedule exists. Raise it, use smaller microbatches, or recompute activations."
        )
    # what every schedule holds first: one microbatch of each stage
    time = sum(costs.forward[s] for s in stages)
    room = limit * (1 + 1e-9) - needed
    for s in sorted(stages, key=lambda s: _density(costs, s), reverse=True):
        available = (num_microbatches - 1) * costs.activation[s]
        if available <= room or costs.activation[s] == 0:
            time += (num_microbatches - 1) * costs.forward[s]
            room -= available
        else:
            time += room * _density(costs, s)
            break
    return time


def _density(costs: Costs, stage: int) -> float:
    return costs.forward[stage] / costs.activation[stage] if costs.activation[stage] else math.inf


def _first_arrivals(costs: Costs, placement: Placement, split: bool) -> tuple[list[float], list[float]]:
    """Earliest time that stage s can start its first forward, and its first gradient action."""
    n = len(placement)
    reach = [0.0] * n
    for s in range(1, n):
        reach[s] = reach[s - 1] + costs.forward[s - 1] + costs.hop(s - 1, placement[s - 1], placement[s])
    back = [0.0] * n
    back[n - 1] = reach[n - 1] + costs.forward[n - 1]
    for s in range(n - 2, -1, -1):
        back[s] = back[s + 1] + _gradient_time(costs, s + 1, split) + costs.hop(s, placement[s + 1], placement[s])
    return reach, back


def _round_trip(reach: list[float], back: list[float], stages: list[int]) -> float:
    """Least time from the rank's first forward to its first gradient action."""
    return min(back[s] for s in stages) - min(reach[s] for s in stages)


def _gradient_time(costs: Costs, stage: int, split: bool) -> float:
    whole = costs.backward_of(stage)
    return min(costs.input_grad[stage], whole) if split else whole


def _stage_work(costs: Costs, stage: int, split: bool) -> float:
    whole = costs.backward_of(stage)
    halves = costs.input_grad[stage] + costs.weight_grad[stage]
    return costs.forward[stage] + (min(halves, whole) if split else whole)


def _walk_down(costs: Costs, placement: Placement, stage: int) -> float:
    """Least time from the end of a backward of ``stage`` to the end of the one of stage 0."""
    return sum(costs.backward_of(s) + costs.hop(s, placement[s + 1], placement[s]) for s in range(stage))
