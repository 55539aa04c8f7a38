"""Automatic zero-bubble schedules for one chunk a rank, any costs, any memory limit.

ZB-1p is this with a limit of p microbatches, ZB-2p with 2p (Qi et al., arXiv 2401.10241, section 3 and appendix B).
The heuristic, in the paper's words:

1. Warm-up: within the memory limit, run as many forwards as fit before the first gradient arrives. One switch decides
   whether a forward that would delay that gradient still runs.
2. Then alternate F and I. When a rank would wait for an input, put weight gradients into the gap: always those that
   fit, and one that does not fit if waiting would make this rank's bubble the largest of all (a second switch decides
   whether to do it even when there is slack). When memory is full, weight gradients make room.
3. A third switch skips a forward if the next rank is two behind and would rather see the gradient first.

All eight settings of the switches are tried; the one with the shortest longest span wins. Time: linear in actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from titan_pipeline.analysis.bounds import expand_limits
from titan_pipeline.families.registry import register_family
from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.placement import loop_placement
from titan_pipeline.ir.schedule import Kind, Schedule, schedule_from_programs


def zb_auto(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    mem_limit: float | Sequence[float] | None = None,
) -> Schedule:
    """The best of the heuristic's eight orders for these costs under this limit.

    Args:
        num_ranks: One stage each.
        num_microbatches: Microbatches per step.
        costs: One entry per rank; equal ranks by default.
        mem_limit: In the unit of ``costs``; one number or one per rank. None means no limit.

    Raises:
        ValueError: If a rank cannot hold one microbatch within the limit.
    """
    costs = costs or Costs.uniform(num_ranks)
    costs.check(num_ranks)
    placement = loop_placement(num_ranks)
    limits = expand_limits(mem_limit, placement)
    for r, limit in enumerate(limits):
        if costs.activation[r] > limit:
            raise ValueError(
                f"mem_limit={limit:.6g} on rank {r} is less than one microbatch ({costs.activation[r]:.6g}). Raise it."
            )
    best: _Builder | None = None
    for fill, gradient_first, greedy in product((True, False), repeat=3):
        builder = _Builder(costs, limits, num_microbatches, fill, gradient_first, greedy)
        builder.build()
        if best is None or builder.span < best.span:
            best = builder
    assert best is not None
    return schedule_from_programs("zb_auto", num_microbatches, placement, best.programs)


@dataclass
class _Builder:
    """One setting of the switches; state of all ranks while their programs grow."""

    costs: Costs
    limits: list[float]
    m: int
    fill: bool
    gradient_first: bool
    greedy: bool
    programs: list[list[tuple[Kind, int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        p = self.costs.num_stages
        self.programs = [[] for _ in range(p)]
        self.count = {kind: [0] * p for kind in (Kind.F, Kind.I, Kind.W)}
        self.clock = [0.0] * p
        self.memory = [0.0] * p
        self.bubble = [0.0] * p
        self.first_end = [0.0] * p
        self.ends: dict[tuple[Kind, int, int], float] = {}

    @property
    def span(self) -> float:
        """Longest time from a rank's first start to its last end."""
        c = self.costs
        return max(self.clock[r] - self.first_end[r] + c.forward[r] for r in range(c.num_stages))

    def build(self) -> None:
        """Run all phases."""
        p = self.costs.num_stages
        self._warm_up()
        for mb in range(1, self.m):
            wanted = [self._wants_forward(r) for r in range(p)]
            for r in range(p - 2, -1, -1):
                wanted[r] = wanted[r] and wanted[r + 1]
            for r in range(p):
                ahead = r == 0 or self.count[Kind.F][r - 1] > self.count[Kind.F][r]
                if wanted[r] and ahead and self._make_room(r):
                    self._fill_gap(r, self._arrival(Kind.F, r, self.count[Kind.F][r]))
                    self._put(Kind.F, r)
            for r in reversed(range(p)):
                self._fill_gap(r, self._arrival(Kind.I, r, mb))
                if r == 0 and self.count[Kind.F][r] == self.m:
                    while self._pending(r):
                        self._put(Kind.W, r)
                self._put(Kind.I, r)
        for r in range(p):
            while self.count[Kind.W][r] < self.m:
                self._put(Kind.W, r)

    def _warm_up(self) -> None:
        c, p = self.costs, self.costs.num_stages
        for r in range(p):
            self._put(Kind.F, r)
        extra = [0] * p
        gradient = self.clock[p - 1] + c.input_grad[p - 1]
        for r in range(p - 2, -1, -1):
            arrives = gradient + c.hop(r, r + 1, r)
            memory, time = self.memory[r], self.clock[r]
            while 1 + extra[r] < self.m and memory + c.activation[r] <= self.limits[r]:
                late = time + c.forward[r] > arrives if self.fill else time >= arrives
                if late:
                    break
                memory += c.activation[r]
                time += c.forward[r]
                extra[r] += 1
            gradient = max(time, arrives) + c.input_grad[r]
        for r in range(1, p):  # a rank cannot be ahead of the one that feeds it
            while extra[r] > 0 and extra[r] >= extra[r - 1] and 1 + extra[r] < self.m:
                extra[r] -= 1
            extra[r] = min(extra[r], extra[r - 1])
        for r in range(p):
            for _ in range(extra[r]):
                self._put(Kind.F, r)
        for r in reversed(range(p)):
            self._put(Kind.I, r)

    def _wants_forward(self, r: int) -> bool:
        """Whether rank r runs a forward in this round; see switch 3."""
        forwards, c = self.count[Kind.F], self.costs
        if forwards[r] >= self.m:
            return False
        if not self.gradient_first or r + 1 == c.num_stages or forwards[r] < forwards[r + 1] + 2:
            return True
        next_gradient = self.clock[r + 1] + c.forward[r + 1] + c.input_grad[r + 1] + c.hop(r, r + 1, r)
        if self.clock[r] >= next_gradient:
            return False
        needed, freed, room = 0.0, 0, self.memory[r] + c.activation[r]
        while room > self.limits[r] and freed < self._pending(r):
            needed += c.weight_grad[r]
            room -= c.weight_context[r]
            freed += 1
        if self.clock[r] + c.forward[r] + needed <= next_gradient:
            return True
        return next_gradient - self.clock[r] > max(self.bubble) - self.bubble[r]

    def _make_room(self, r: int) -> bool:
        """Run weight gradients until a forward fits; False if it cannot (a gradient must come first)."""

        def fits() -> bool:
            return self.memory[r] + self.costs.activation[r] <= self.limits[r] * (1 + 1e-12)

        while not fits() and self._pending(r):
            self._put(Kind.W, r)
        return fits()

    def _fill_gap(self, r: int, arrives: float) -> None:
        """Weight gradients while rank r would wait until ``arrives``."""
        while self._pending(r) and self.clock[r] + self.costs.weight_grad[r] <= arrives:
            self._put(Kind.W, r)
        gap = arrives - self.clock[r]
        if self._pending(r) and gap > 0 and (self.greedy or gap > max(self.bubble) - self.bubble[r]):
            self._put(Kind.W, r)

    def _pending(self, r: int) -> int:
        return self.count[Kind.I][r] - self.count[Kind.W][r]

    def _arrival(self, kind: Kind, r: int, mb: int) -> float:
        """When the input of rank r's next F or I arrives; 0 where it comes from nobody."""
        source = r - 1 if kind is Kind.F else r + 1
        if not 0 <= source < self.costs.num_stages:
            return 0.0
        return self.ends[kind, source, mb] + self.costs.hop(min(r, source), source, r)

    def _put(self, kind: Kind, r: int) -> None:
        c = self.costs
        mb = self.count[kind][r]
        self.count[kind][r] += 1
        time = {Kind.F: c.forward, Kind.I: c.input_grad, Kind.W: c.weight_grad}[kind][r]
        end = self.clock[r] + time
        if kind is not Kind.W:
            late = max(end, self._arrival(kind, r, mb) + time)
            if self.count[Kind.F][r] > (1 if kind is Kind.F else 0):
                self.bubble[r] += late - end
            end = late
        if kind is Kind.F:
            self.memory[r] += c.activation[r]
            if mb == 0:
                self.first_end[r] = end
        elif kind is Kind.I:
            self.memory[r] += c.weight_context[r] - c.activation[r]
        else:
            self.memory[r] -= c.weight_context[r]
        self.clock[r] = end
        self.ends[kind, r, mb] = end
        self.programs[r].append((kind, r, mb))


register_family(
    "zb_auto", zb_auto, splits_backward=True, takes_costs=True, summary="zero bubble for given costs and memory limit"
)
