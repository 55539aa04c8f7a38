"""The search space of the solver: per rank, an order of forwards and input gradients; the rest follows.

Weight gradients need no search of their own: `decode` puts them where a rank would wait, where memory asks for room,
and at the end. What is searched is small enough that pure Python tries thousands of orders a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.placement import Placement
from titan_pipeline.ir.schedule import Kind, Schedule, schedule_from_programs

Order = list[int]
"""Node numbers: the forward of stage s and microbatch k is ``s*m + k``, its input gradient ``(S + s)*m + k``."""


@dataclass(slots=True)
class Decoded:
    """What an order becomes."""

    makespan: float
    span: float
    programs: list[list[tuple[Kind, int, int]]]


class Problem:
    """Costs, placement and limits in the form that decoding reads fast."""

    def __init__(self, costs: Costs, placement: Placement, num_microbatches: int, limits: Sequence[float]) -> None:
        self.costs = costs
        self.placement = placement
        self.m = m = num_microbatches
        self.num_stages = stages = len(placement)
        self.num_ranks = max(placement) + 1
        self.limits = [x * (1 + 1e-9) for x in limits]
        self.time = [costs.forward[s] for s in range(stages) for _ in range(m)]
        self.time += [costs.input_grad[s] for s in range(stages) for _ in range(m)]
        self.stage = [s for _ in range(2) for s in range(stages) for _ in range(m)]
        # the producer on another stage and the way from it; for a gradient also its own forward
        self.source: list[int] = []
        self.hop: list[float] = []
        for s in range(stages):
            self.source += [(s - 1) * m + k if s else -1 for k in range(m)]
            self.hop += [costs.hop(s - 1, placement[s - 1], placement[s]) if s else 0.0] * m
        for s in range(stages):
            above = s + 1 < stages
            self.source += [(stages + s + 1) * m + k if above else -1 for k in range(m)]
            self.hop += [costs.hop(s, placement[s + 1], placement[s]) if above else 0.0] * m

    def decode(self, orders: Sequence[Order], patience: Sequence[float], record: bool = False) -> Decoded | None:  # noqa: C901 (see below)
        """Play the orders; None if they wait for each other or break a limit.

        One long function on purpose: the search calls it thousands of times per second, and a call per action would
        halve that.

        Args:
            orders: One per rank.
            patience: Per rank, how much of a weight gradient may stick out of the gap it is put into (0: none).
            record: Also return the programs.
        """
        first_gradient = self.num_stages * self.m
        m, time, source, hop, stage = self.m, self.time, self.source, self.hop, self.stage
        weight, activation, context = self.costs.weight_grad, self.costs.activation, self.costs.weight_context
        end = [-1.0] * (2 * first_gradient)
        programs: list[list[tuple[Kind, int, int]]] = [[] for _ in orders]
        position = [0] * len(orders)
        clock = [0.0] * len(orders)
        begin = [-1.0] * len(orders)
        memory = [0.0] * len(orders)
        waiting: list[list[int]] = [[] for _ in orders]
        taken = [0] * len(orders)
        moved = True
        while moved:
            moved = False
            for r, order in enumerate(orders):
                i, now, queue = position[r], clock[r], waiting[r]
                while i < len(order):
                    node = order[i]
                    ready = 0.0
                    if source[node] >= 0:
                        ready = end[source[node]]
                        if ready < 0:
                            break
                        ready += hop[node]
                    s = stage[node]
                    gradient = node >= first_gradient
                    if gradient and end[node - first_gradient] < 0:
                        break
                    while taken[r] < len(queue):
                        w = queue[taken[r]]
                        cost = weight[stage[w]]
                        crowded = not gradient and memory[r] + activation[s] > self.limits[r]
                        if not crowded and now + cost * (1 - patience[r]) > ready:
                            break
                        now += cost
                        memory[r] -= context[stage[w]]
                        taken[r] += 1
                        if record:
                            programs[r].append((Kind.W, stage[w], w % m))
                    if gradient:
                        memory[r] += context[s] - activation[s]
                        queue.append(node)
                    else:
                        memory[r] += activation[s]
                    if memory[r] > self.limits[r]:
                        return None
                    if ready > now:
                        now = ready
                    if begin[r] < 0:
                        begin[r] = now
                    now += time[node]
                    end[node] = now
                    if record:
                        programs[r].append((Kind.I if gradient else Kind.F, s, node % m))
                    i += 1
                    moved = True
                position[r], clock[r] = i, now
        for r, order in enumerate(orders):
            if position[r] < len(order):
                return None
            for w in waiting[r][taken[r] :]:
                clock[r] += weight[stage[w]]
                if record:
                    programs[r].append((Kind.W, stage[w], w % m))
        return Decoded(max(clock), max(c - b for c, b in zip(clock, begin, strict=True)), programs)

    def schedule(self, name: str, decoded: Decoded) -> Schedule:
        """The decoded programs as a schedule."""
        return schedule_from_programs(name, self.m, self.placement, decoded.programs)

    def orders_of(self, schedule: Schedule) -> list[Order]:
        """The orders that a schedule of this placement has."""
        orders: list[Order] = []
        for program in schedule.ranks:
            orders.append(
                [
                    (s if kind is Kind.F else self.num_stages + s) * self.m + k
                    for kind, s, k in program
                    if kind in (Kind.F, Kind.I, Kind.B)
                ]
            )
        return orders

    def throttled(self, in_flight: int, charge: float = 1.0) -> list[Order]:
        """A greedy order with at most ``in_flight`` microbatches between their first forward and last gradient.

        It cannot deadlock and needs ``in_flight`` times the activations of one microbatch.

        Args:
            in_flight: At least 1.
            charge: Share of a weight gradient that a rank is thought to run right after the input gradient, so that ranks
                keep a fair pace.
        """
        stages, m = self.num_stages, self.m
        orders: list[Order] = [[] for _ in range(self.num_ranks)]
        end: dict[int, float] = {}
        clock = [0.0] * self.num_ranks
        following = [0] * (2 * stages)  # next microbatch of each stage and direction
        rows_of = [
            [row for row in range(2 * stages) if self.placement[row % stages] == r] for r in range(self.num_ranks)
        ]
        never: tuple[float, int] = (float("inf"), 0)
        candidates: list[tuple[float, int]] = [never] * (2 * stages)
        changed = list(range(2 * stages))
        for _ in range(2 * stages * m):
            for row in changed:
                start = self._start_of(row, following, end, clock, in_flight)
                candidates[row] = never if start is None else (start, -row)  # gradients first, late stages first
            start, row = min(candidates)
            assert start < float("inf")
            row = -row
            node = row * m + following[row]
            rank = self.placement[self.stage[node]]
            orders[rank].append(node)
            end[node] = start + self.time[node]
            clock[rank] = end[node] + (charge * self.costs.weight_grad[self.stage[node]] if row >= stages else 0.0)
            following[row] += 1
            # who may start earlier or later now: the rank's rows, the next stage's, the gradient of a forward, and the
            # first forward, which waits for the last gradient
            near = (row + 1, row - 1, row + stages) if row < stages else (row - 1, row + 1)
            changed = [*rows_of[rank], *(r for r in (*near, 0) if 0 <= r < 2 * stages)]
        return orders

    def _start_of(
        self, row: int, following: list[int], end: dict[int, float], clock: list[float], in_flight: int
    ) -> float | None:
        """When the next microbatch of a row could start, or None."""
        stages, m = self.num_stages, self.m
        k = following[row]
        node = row * m + k
        if k == m or (row == 0 and k - following[stages] >= in_flight):
            return None
        if row >= stages and (node - stages * m) not in end:
            return None
        source = self.source[node]
        ready = 0.0
        if source >= 0:
            if source not in end:
                return None
            ready = end[source] + self.hop[node]
        start = max(ready, clock[self.placement[row % stages]])
        if row == 0 and k >= in_flight:
            start = max(start, end[stages * m + k - in_flight])
        return start
