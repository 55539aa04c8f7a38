"""Schedules that keep the backward whole: GPipe, 1F1B, interleaved 1F1B and breadth-first.

Write p for ranks, v for chunks per rank, m for microbatches, T_F, T_B, T_W for the times of a whole rank.

================  ==============================  ==================================
schedule          bubble (stage = makespan)       peak memory, in microbatches of a rank
================  ==============================  ==================================
gpipe             (p-1)(T_F+T_B+T_W)              m
1f1b              (p-1)(T_F+T_B+T_W)              min(p, m)
interleaved_1f1b  (p-1)(T_F+T_B+T_W)/v            ((v-1)p + 2(p-1) + 1)/v
looped_bfs        (p-1)(T_F+T_B+T_W)/v            m
================  ==============================  ==================================
"""

from titan_pipeline.families.registry import register_family
from titan_pipeline.ir.placement import loop_placement
from titan_pipeline.ir.schedule import Kind, Schedule, schedule_from_programs

Program = list[tuple[Kind, int, int]]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019)."""
    programs: list[Program] = [
        [(Kind.F, r, mb) for mb in range(num_microbatches)] + [(Kind.B, r, mb) for mb in range(num_microbatches)]
        for r in range(num_ranks)
    ]
    return schedule_from_programs("gpipe", num_microbatches, loop_placement(num_ranks), programs)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: each rank fills the pipeline below it, then alternates (PipeDream-flush; Narayanan et al. 2021).

    Any number of microbatches, fewer than ranks too.
    """
    programs: list[Program] = []
    for r in range(num_ranks):
        warm_up = min(num_ranks - 1 - r, num_microbatches)
        forwards = [(Kind.F, r, mb) for mb in range(num_microbatches)]
        backwards = [(Kind.B, r, mb) for mb in range(num_microbatches)]
        programs.append(alternate(forwards, backwards, warm_up))
    return schedule_from_programs("1f1b", num_microbatches, loop_placement(num_ranks), programs)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """1F1B with several chunks per rank, microbatches in groups of at least ``num_ranks`` (Narayanan et al. 2021).

    Any number of microbatches. Groups of more than ``num_ranks`` hold more activations: the formulas above are those of
    a multiple of ``num_ranks``.
    """
    p, v = num_ranks, num_chunks
    group = max(group_sizes(p, num_microbatches))
    programs: list[Program] = []
    for r in range(p):
        forwards, backwards = grouped_orders(r, p, num_microbatches, v, Kind.B)
        warm_up = min(2 * (p - 1 - r) + (v - 1) * group, len(forwards)) if v > 1 else min(p - 1 - r, len(forwards))
        programs.append(alternate(forwards, backwards, warm_up))
    return schedule_from_programs("interleaved_1f1b", num_microbatches, loop_placement(p, v), programs)


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Breadth-first: all microbatches through one chunk before the next (Lamy-Poirier 2022)."""
    programs: list[Program] = []
    for r in range(num_ranks):
        stages = [c * num_ranks + r for c in range(num_chunks)]
        program: Program = [(Kind.F, s, mb) for s in stages for mb in range(num_microbatches)]
        program += [(Kind.B, s, mb) for s in reversed(stages) for mb in range(num_microbatches)]
        programs.append(program)
    return schedule_from_programs("looped_bfs", num_microbatches, loop_placement(num_ranks, num_chunks), programs)


def group_sizes(p: int, m: int) -> list[int]:
    """``m`` microbatches in as many groups of at least ``p`` as there can be, as equal as possible."""
    count = max(1, m // p)
    return [m // count + (k < m % count) for k in range(count)]


def grouped_orders(rank: int, p: int, m: int, v: int, backward: Kind) -> tuple[Program, Program]:
    """Forward and backward orders of an interleaved rank: group by group, chunk by chunk."""
    forwards: Program = []
    backwards: Program = []
    first = 0
    for size in group_sizes(p, m):
        group = range(first, first + size)
        first += size
        forwards += [(Kind.F, c * p + rank, mb) for c in range(v) for mb in group]
        backwards += [(backward, c * p + rank, mb) for c in reversed(range(v)) for mb in group]
    return forwards, backwards


def alternate(forwards: Program, backwards: Program, warm_up: int) -> Program:
    """``warm_up`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    program = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        program += [forward, backward]
    return program + backwards[len(forwards) - warm_up :]


register_family("gpipe", gpipe, summary="all forwards, then all backwards")
register_family("1f1b", one_f_one_b, summary="one forward, one backward")
register_family("interleaved_1f1b", interleaved_1f1b, chunks=(1, None), summary="1F1B over several chunks per rank")
register_family("looped_bfs", looped_bfs, chunks=(1, None), summary="breadth-first over several chunks per rank")
