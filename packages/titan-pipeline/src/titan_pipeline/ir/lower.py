"""Write out the communication of a schedule: who sends and receives what, in which order.

Problem: point-to-point messages between two ranks match in order (tags are ignored by NCCL, and by torch's own
runtime). A receive posted in another order than the sends either deadlocks or, worse, silently swaps two
microbatches. And two ranks that both send first deadlock when the transport has no buffer.

Idea: play the schedule against a clock. When a result that another rank needs is ready, put its send into the
producer's program and its receive into the consumer's *in the same instant*. All transfers of all ranks then follow
one global order, so every pair of ranks agrees on its messages, and the programs run even if every send blocks until
its receive is reached. The clock only shapes the order (early receives, late waits); correctness does not depend on
its costs.
"""

import heapq
from dataclasses import replace

from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.schedule import Action, Schedule, consumers, producers


def lower(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The schedule with SEND and RECV actions in every program.

    Args:
        schedule: With or without communication; existing communication is replaced.
        costs: What the clock uses; equal stages by default.

    Returns:
        A schedule that verifies for both transports whenever the input is acyclic. Overlap marks are kept for pairs
        that no communication separates.

    Raises:
        ValueError: If the computation itself can never finish. `verify` names the cycle.
    """
    schedule = schedule.compute_only()
    costs = costs or Costs.uniform(schedule.num_stages)
    costs.check(schedule.num_stages)
    place = schedule.placement
    programs: list[list[Action]] = [[] for _ in schedule.ranks]
    sources: list[list[int]] = [[] for _ in schedule.ranks]
    done: set[Action] = set()
    position = [0] * schedule.num_ranks
    running: list[bool] = [False] * schedule.num_ranks
    # (end time, order of start, rank, action); ends before starts at the same instant
    events: list[tuple[float, int, int, Action]] = []
    counter = 0

    def start(rank: int, now: float) -> None:
        nonlocal counter
        program = schedule.ranks[rank]
        if running[rank] or position[rank] == len(program):
            return
        action = program[position[rank]]
        if any(not any(a in done for a in options) for options in producers(action, schedule.num_stages)):
            return
        sources[rank].append(position[rank])
        programs[rank].append(action)
        position[rank] += 1
        running[rank] = True
        counter += 1
        heapq.heappush(events, (now + costs.time_of(action), counter, rank, action))

    for rank in range(schedule.num_ranks):
        start(rank, 0.0)
    while events:
        now = events[0][0]
        woken: set[int] = set()
        while events and events[0][0] <= now:
            _, _, rank, action = heapq.heappop(events)
            running[rank] = False
            done.add(action)
            woken.add(rank)
            for consumer_stage, send, recv in consumers(action, schedule.num_stages):
                target = place[consumer_stage]
                woken.add(target)
                if target != rank:
                    programs[rank].append(Action(send, action.stage, action.microbatch))
                    sources[rank].append(-1)
                    programs[target].append(Action(recv, consumer_stage, action.microbatch))
                    sources[target].append(-1)
        for rank in sorted(woken):
            start(rank, now)
    if any(position[r] != len(schedule.ranks[r]) for r in range(schedule.num_ranks)):
        raise ValueError(
            f"schedule {schedule.name!r} can never finish: its actions wait for each other. verify() names the cycle."
        )
    overlaps = _move_overlaps(schedule, programs, sources)
    return replace(schedule, ranks=tuple(tuple(p) for p in programs), overlaps=overlaps)


def _move_overlaps(
    schedule: Schedule, programs: list[list[Action]], sources: list[list[int]]
) -> tuple[tuple[int, ...], ...]:
    """New positions of overlapped pairs. A pair that waits for a message between its halves loses its mark."""
    if not schedule.overlaps:
        return ()
    moved: list[tuple[int, ...]] = []
    for rank in range(len(programs)):
        marks = set(schedule.overlaps[rank])
        where = sources[rank]
        moved.append(tuple(i for i in range(len(where) - 1) if where[i] in marks and where[i + 1] == where[i] + 1))
    return tuple(moved)
