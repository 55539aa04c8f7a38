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
    """1F1B with several chunks per rank, microbatches in groups of ``num_ranks`` (Narayanan et al. 2021).

    Raises:
        ValueError: If ``num_microbatches`` is no multiple of ``num_ranks``: the groups would not close.
    """
    check_groups("interleaved_1f1b", num_ranks, num_microbatches)
    p, v = num_ranks, num_chunks
    programs: list[Program] = []
    for r in range(p):
        forwards, backwards = grouped_orders(r, p, num_microbatches, v, Kind.B)
        warm_up = min(2 * (p - 1 - r) + (v - 1) * p, len(forwards)) if v > 1 else min(p - 1 - r, len(forwards))
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


def grouped_orders(rank: int, p: int, m: int, v: int, backward: Kind) -> tuple[Program, Program]:
    """Forward and backward orders of an interleaved rank: groups of p microbatches, chunk by chunk."""
    forwards: Program = []
    backwards: Program = []
    for first in range(0, m, p):
        group = range(first, min(first + p, m))
        forwards += [(Kind.F, c * p + rank, mb) for c in range(v) for mb in group]
        backwards += [(backward, c * p + rank, mb) for c in reversed(range(v)) for mb in group]
    return forwards, backwards


def alternate(forwards: Program, backwards: Program, warm_up: int) -> Program:
    """``warm_up`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    program = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        program += [forward, backward]
    return program + backwards[len(forwards) - warm_up :]


def check_groups(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raise unless microbatches come in whole groups of ``num_ranks``."""
    if num_microbatches % num_ranks:
        lower = num_microbatches // num_ranks * num_ranks
        options = [str(n) for n in (lower, lower + num_ranks) if n]
        raise ValueError(
            f"{name} runs microbatches in groups of num_ranks={num_ranks}, and num_microbatches={num_microbatches} "
            f"leaves a part of one. Use {' or '.join(options)} microbatches, or zb_h1, zbv or looped_bfs, which take "
            "any number."
        )


register_family("gpipe", gpipe, summary="all forwards, then all backwards")
register_family("1f1b", one_f_one_b, summary="one forward, one backward")
register_family("interleaved_1f1b", interleaved_1f1b, chunks=(1, None), summary="1F1B over several chunks per rank")
register_family("looped_bfs", looped_bfs, chunks=(1, None), summary="breadth-first over several chunks per rank")
