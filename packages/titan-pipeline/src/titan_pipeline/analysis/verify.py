"""Prove that a schedule runs: complete, in order, free of deadlock, and within memory.

The proof is a graph. Nodes are actions. Edges say "happens before": the order of each rank's program, the data an
action needs, and the matching of sends with receives. Messages between two ranks match first-in-first-out per
direction, as NCCL and gloo do; the k-th send must therefore carry what the k-th receive expects. The schedule runs if
and only if the graph has no cycle.

Two transports bound what real ones do. *buffered*: a send completes at once, a receive waits only where its data is
used. *rendezvous*: each send blocks its rank until the receiver reaches the matching receive, and the other way round;
the pair is one node. A program that passes rendezvous runs on any transport that keeps the order.

Memory is exact and needs no clock: a rank runs its actions one after another, so what it holds follows from its program
alone. Cost: linear in the number of actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from titan_pipeline.analysis.simulate import memory_levels
from titan_pipeline.errors import ScheduleError
from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.lower import lower
from titan_pipeline.ir.schedule import COMPUTE, SENDS, Action, Kind, Schedule, consumers, producers, transfer_of

Delivery = Literal["buffered", "rendezvous"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What `verify` proved."""

    digest: str
    """Of the schedule as given."""
    transport: Delivery
    """The weaker guarantee (rendezvous) covers the other."""
    peak: tuple[float, ...]
    """Largest memory per rank, in the unit of the costs."""
    num_actions: int
    """Actions checked, communication included."""
    num_messages: int
    """Messages between ranks."""


def verify(
    schedule: Schedule,
    *,
    transport: Delivery = "rendezvous",
    mem_limit: float | Sequence[float] | None = None,
    costs: Costs | None = None,
    forward_only: bool = False,
    in_order: bool = False,
) -> Certificate:
    """Prove that ``schedule`` runs.

    A schedule without communication is first given one (`titan_pipeline.lower`); one with it is judged as written.

    Args:
        schedule: What to check.
        transport: ``"rendezvous"`` (default, the strictest) or ``"buffered"``.
        mem_limit: Largest memory per rank, or one limit for each, in the unit of ``costs``.
        costs: Memory of each stage; by default every rank keeps 1 a microbatch until its input gradient, 0.43 then.
        forward_only: The schedule is for evaluation: no backward is expected.
        in_order: Each stage's gradients are summed in the order of the microbatches, as in one process.

    Raises:
        ScheduleError: With ``code``, ``rank``, ``index``, ``action`` and, for a deadlock, ``cycle``.
        ValueError: If ``costs`` describe another number of stages, or ``transport`` is unknown.
    """
    if transport not in ("buffered", "rendezvous"):
        raise ValueError(f"transport={transport!r} is unknown. Use 'buffered' or 'rendezvous'.")
    costs = costs or Costs.uniform(schedule.num_stages, num_chunks=schedule.num_chunks)
    costs.check(schedule.num_stages)
    where = _check_contents(schedule, forward_only)
    _check_overlaps(schedule)
    if in_order:
        _check_sums(schedule)
    if schedule.communicates:
        lowered = schedule
        match = _match_messages(schedule)
        _check_acyclic(schedule, where, match, transport)
    else:
        _check_acyclic(schedule, where, {}, transport)
        lowered = lower(schedule)
    levels = [memory_levels(schedule, rank, costs) for rank in range(schedule.num_ranks)]
    peak = tuple(max(level) for level in levels)
    if mem_limit is not None:
        _check_memory(schedule, levels, peak, mem_limit)
    counts = [sum(a.kind in SENDS for a in program) for program in lowered.ranks]
    return Certificate(schedule.digest, transport, peak, sum(map(len, lowered.ranks)), sum(counts))


def _check_contents(schedule: Schedule, forward_only: bool) -> dict[Action, tuple[int, int]]:
    """Every action legal and unique, every microbatch complete on every stage, halves in order."""
    where: dict[Action, tuple[int, int]] = {}
    for rank, program in enumerate(schedule.ranks):
        for index, action in enumerate(program):
            kind, stage, mb = action
            if not (0 <= stage < schedule.num_stages and 0 <= mb < schedule.num_microbatches):
                raise ScheduleError(
                    "out_of_range",
                    f"the schedule has stages 0..{schedule.num_stages - 1} and microbatches "
                    f"0..{schedule.num_microbatches - 1}.",
                    rank=rank, index=index, action=action,
                )  # fmt: skip
            if schedule.placement[stage] != rank:
                raise ScheduleError(
                    "wrong_rank",
                    f"stage {stage} is placed on rank {schedule.placement[stage]}. Move the action there.",
                    rank=rank, index=index, action=action,
                )  # fmt: skip
            if action in where:
                raise ScheduleError(
                    "duplicate",
                    f"it already runs at position {where[action][1]}. Remove one.",
                    rank=rank, index=index, action=action,
                )  # fmt: skip
            if kind in (Kind.B, Kind.I, Kind.W):
                other = [Action(k, stage, mb) for k in ((Kind.I, Kind.W) if kind is Kind.B else (Kind.B,))]
                clash = next((a for a in other if a in where), None)
                if clash is not None:
                    raise ScheduleError(
                        "duplicate",
                        f"{clash} at position {where[clash][1]} computes this gradient. Use B alone, or I and W.",
                        rank=rank, index=index, action=action,
                    )  # fmt: skip
            where[action] = (rank, index)
    _check_complete(schedule, where, forward_only)
    return where


def _check_sums(schedule: Schedule) -> None:
    """Every stage computes its gradients in the order of the microbatches."""
    for rank, program in enumerate(schedule.ranks):
        seen: dict[tuple[bool, int], int] = {}
        for index, action in enumerate(program):
            kind, stage, mb = action
            # Some gradients come with the input gradients, in I or B, and the deferred ones in W or B.
            for deferred in (False, True):
                if kind is not Kind.B and kind is not (Kind.W if deferred else Kind.I):
                    continue
                before = seen.get((deferred, stage), -1)
                if before > mb:
                    raise ScheduleError(
                        "order",
                        f"it runs after microbatch {before}, so the gradients of the stage are summed in another order than "
                        "in one process, which deterministic=True refuses. Use a family, whose microbatches stay in order, or "
                        "deterministic=False.",
                        rank=rank, index=index, action=action,
                    )  # fmt: skip
                seen[deferred, stage] = mb


def _check_complete(schedule: Schedule, where: dict[Action, tuple[int, int]], forward_only: bool) -> None:
    for stage, rank in enumerate(schedule.placement):
        for mb in range(schedule.num_microbatches):
            forward = Action(Kind.F, stage, mb)
            if forward not in where:
                raise ScheduleError("missing", f"{forward} never runs. Add it.", rank=rank, action=forward)
            if forward_only:
                continue
            whole, first, second = (Action(k, stage, mb) for k in (Kind.B, Kind.I, Kind.W))
            chain = [forward, whole] if whole in where else [forward, first, second]
            for action in chain:
                if action not in where:
                    raise ScheduleError(
                        "missing", f"{action} never runs. Add it, or {whole} for both halves.", rank=rank, action=action
                    )
            for before, after in pairwise(chain):
                if where[before][1] > where[after][1]:
                    raise ScheduleError(
                        "order",
                        f"it needs {before}, which this rank runs later, at position {where[before][1]}.",
                        rank=rank, index=where[after][1], action=after,
                    )  # fmt: skip


def _check_overlaps(schedule: Schedule) -> None:
    for rank, marks in enumerate(schedule.overlaps):
        program = schedule.ranks[rank]
        for i in marks:
            pair = program[i : i + 2]
            kinds = {a.kind for a in pair}
            if len(pair) < 2 or Kind.F not in kinds or not kinds & {Kind.B, Kind.I} or len({a[1:] for a in pair}) < 2:
                raise ScheduleError(
                    "format",
                    "an overlap mark needs an F and a B or I of different work at this position and the next.",
                    rank=rank, index=i,
                )  # fmt: skip


def _match_messages(schedule: Schedule) -> dict[tuple[int, int], tuple[int, int]]:
    """Receive position → send position, by order of each directed pair. Raises unless all messages agree."""
    sends: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    recvs: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    place = schedule.placement
    for rank, program in enumerate(schedule.ranks):
        for index, action in enumerate(program):
            if action.kind in COMPUTE:
                continue
            source, target, _ = transfer_of(action)
            if not (0 <= source < schedule.num_stages and 0 <= target < schedule.num_stages):
                raise ScheduleError(
                    "needless_comm", "there is no stage on the other side.", rank=rank, index=index, action=action
                )
            if place[source] == place[target]:
                raise ScheduleError(
                    "needless_comm",
                    f"stages {source} and {target} share rank {rank}: the executor hands tensors over. Remove it.",
                    rank=rank, index=index, action=action,
                )  # fmt: skip
            pair = (place[source], place[target])
            (sends if action.kind in SENDS else recvs).setdefault(pair, []).append((index, action))
    match: dict[tuple[int, int], tuple[int, int]] = {}
    for pair in sorted(set(sends) | set(recvs)):
        out, into = sends.get(pair, []), recvs.get(pair, [])
        for k in range(max(len(out), len(into))):
            if k >= len(into):
                raise ScheduleError(
                    "fifo", f"rank {pair[1]} has no receive for it.", rank=pair[0], index=out[k][0], action=out[k][1]
                )
            if k >= len(out):
                raise ScheduleError(
                    "fifo", f"rank {pair[0]} has no send for it.", rank=pair[1], index=into[k][0], action=into[k][1]
                )
            (i, send), (j, recv) = out[k], into[k]
            if (transfer_of(send), send.microbatch) != (transfer_of(recv), recv.microbatch):
                raise ScheduleError(
                    "fifo",
                    f"message {k} from rank {pair[0]} is {send}: the receive would take the wrong data. Give both "
                    "ranks one order.",
                    rank=pair[1], index=j, action=recv,
                )  # fmt: skip
            match[pair[1], j] = (pair[0], i)
    return match


def _check_acyclic(
    schedule: Schedule,
    where: dict[Action, tuple[int, int]],
    match: dict[tuple[int, int], tuple[int, int]],
    transport: Delivery,
) -> None:
    """Kahn's algorithm over the happens-before graph; on failure, walk back to a cycle and raise it."""
    rendezvous = transport == "rendezvous"
    explicit = schedule.communicates
    successors: dict[tuple[int, int], list[tuple[int, int]]] = {}
    waits: dict[tuple[int, int], int] = {}

    def node(at: tuple[int, int]) -> tuple[int, int]:
        return match.get(at, at) if rendezvous else at  # a receive and its send are one event

    def edge(before: tuple[int, int], after: tuple[int, int]) -> None:
        before, after = node(before), node(after)
        successors.setdefault(before, []).append(after)
        waits[after] = waits.get(after, 0) + 1

    for rank, program in enumerate(schedule.ranks):
        for index, action in enumerate(program):
            at = (rank, index)
            waits.setdefault(node(at), 0)
            # A buffered receive only books a place in line, so nothing but its consumer waits for it.
            if index:
                edge((rank, index - 1), at)
            if action.kind in COMPUTE:
                for options in producers(action, schedule.num_stages):
                    source = _source_of(schedule, where, options, at)
                    if explicit and source[0] != rank:
                        source = _receive_of(schedule, where, source, at)
                        source = source if rendezvous else match[source]
                    edge(source, at)
            elif action.kind in SENDS:
                edge(_producer_of(schedule, where, action, at), at)
    ready = [at for at, n in waits.items() if n == 0]
    seen = 0
    while ready:
        at = ready.pop()
        seen += 1
        for after in successors.get(at, ()):
            waits[after] -= 1
            if waits[after] == 0:
                ready.append(after)
    if seen < len(waits):
        cycle = _find_cycle(successors, {at for at, n in waits.items() if n > 0})
        named = [(r, i, schedule.ranks[r][i]) for r, i in cycle]
        rank, index, action = named[0]
        raise ScheduleError(
            "deadlock",
            f"these actions wait for each other ({transport} transport). Move one of them behind what it waits for.",
            rank=rank, index=index, action=action, cycle=named,
        )  # fmt: skip


def _source_of(
    schedule: Schedule, where: dict[Action, tuple[int, int]], options: Sequence[Action], at: tuple[int, int]
) -> tuple[int, int]:
    """Position of the one of ``options`` that runs, whose result the action at ``at`` needs."""
    source = next((where[a] for a in options if a in where), None)
    if source is None:  # in an evaluation, which may lack any backward
        raise ScheduleError(
            "missing",
            f"it needs {options[0]}, which never runs. Add that, or remove this action.",
            rank=at[0], index=at[1], action=schedule.ranks[at[0]][at[1]],
        )  # fmt: skip
    return source


def _receive_of(
    schedule: Schedule, where: dict[Action, tuple[int, int]], source: tuple[int, int], at: tuple[int, int]
) -> tuple[int, int]:
    """Position of the receive that brings the result at ``source`` to the action at ``at``."""
    produced = schedule.ranks[source[0]][source[1]]
    used = schedule.ranks[at[0]][at[1]]
    stage, send, recv = next(c for c in consumers(produced, schedule.num_stages) if c[0] == used.stage)
    receive = where.get(Action(recv, stage, used.microbatch))
    if receive is None:
        raise ScheduleError(
            "missing",
            f"no {Action(recv, stage, used.microbatch)}: its input never arrives. Add it and its {send}.",
            rank=at[0], index=at[1], action=used,
        )  # fmt: skip
    if receive[1] > at[1]:
        raise ScheduleError(
            "order",
            f"its input is received later, at position {receive[1]}.",
            rank=at[0], index=at[1], action=used,
        )  # fmt: skip
    return receive


def _producer_of(
    schedule: Schedule, where: dict[Action, tuple[int, int]], send: Action, at: tuple[int, int]
) -> tuple[int, int]:
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.I, Kind.B)
    source = next((where[a] for k in kinds if (a := Action(k, send.stage, send.microbatch)) in where), None)
    if source is None or source[1] > at[1]:
        raise ScheduleError(
            "order", "it sends a result that does not exist yet. Put it after the action that computes it.",
            rank=at[0], index=at[1], action=send,
        )  # fmt: skip
    return source


def _find_cycle(
    successors: dict[tuple[int, int], list[tuple[int, int]]], stuck: set[tuple[int, int]]
) -> list[tuple[int, int]]:
    """A cycle among nodes that never became ready: each has a predecessor among them, so walking back must repeat."""
    before: dict[tuple[int, int], tuple[int, int]] = {}
    for at in stuck:
        for after in successors.get(at, ()):
            if after in stuck:
                before[after] = at
    at = min(before)
    path: list[tuple[int, int]] = []
    seen: set[tuple[int, int]] = set()
    while at not in seen:
        seen.add(at)
        path.append(at)
        at = before[at]
    loop = path[path.index(at) :][::-1]
    return [*loop, loop[0]]


def _check_memory(
    schedule: Schedule, levels: list[list[float]], peak: tuple[float, ...], mem_limit: float | Sequence[float]
) -> None:
    limits = [mem_limit] * schedule.num_ranks if isinstance(mem_limit, int | float) else list(mem_limit)
    if len(limits) != schedule.num_ranks:
        raise ValueError(f"mem_limit has {len(limits)} entries for {schedule.num_ranks} ranks.")
    for rank, limit in enumerate(limits):
        if peak[rank] > limit * (1 + 1e-9):
            index = next(i for i, level in enumerate(levels[rank]) if level > limit * (1 + 1e-9))
            raise ScheduleError(
                "memory",
                f"the rank then holds {levels[rank][index]:.6g}, limit {limit:.6g} (its peak is {peak[rank]:.6g}). "
                "Raise the limit, or take a schedule that holds less (v_half, v_min, solve with this mem_limit).",
                rank=rank, index=index, action=schedule.ranks[rank][index],
            )  # fmt: skip
