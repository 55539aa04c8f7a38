"""Find a good schedule for measured, unequal costs under a memory limit, and say how good it can be at most.

1. Candidates: every family of the placement that fits, as published, and throttled greedy orders for any limit.
2. Simulated annealing on the orders of forwards and input gradients (`titan_pipeline.solver.orders`), from the best start:
   move one action of one rank a few places, decode, keep it if better, or a little worse while it is warm.
3. On request (``method="exact"``, extra ``titan-pipeline[solve]``) a constraint solver continues from there: it
   improves, or proves that nothing is better (`titan_pipeline.solver.exact`).
4. `titan_pipeline.lower_bound`, or the constraint solver's sharper one, certifies the result: no schedule is better
   than the bound, so ``gap`` is the most that is still on the table.

The result is never worse than the best family that fits, since those are candidates (those that were built and played in
a quarter of the time limit: all of them take two seconds at 64 ranks and 256 microbatches). With one seed and
``max_tries`` the search is repeatable; the time limit alone depends on the machine.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from titan_pipeline.analysis.bounds import Objective, expand_limits, lower_bound
from titan_pipeline.analysis.simulate import simulate
from titan_pipeline.analysis.verify import verify
from titan_pipeline.errors import ScheduleError
from titan_pipeline.families import FAMILIES, build_schedule, load_installed_families
from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.placement import Placement, placement_from
from titan_pipeline.ir.schedule import Schedule
from titan_pipeline.solver.annealing import Annealing, SolveProgress
from titan_pipeline.solver.orders import Order, Problem
from titan_pipeline.solver.scoring import score

_PROOF = 10
"""Time to decode and verify a schedule, relative to playing it, at most."""

_SECONDS_PER_ACTION = 2e-4
"""Of writing a constraint program down and presolving it, at least."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best schedule found, and its certificate."""

    schedule: Schedule
    value: float
    """Its makespan or stage span, in the unit of the costs."""
    bound: float
    """No schedule of this placement within this limit is shorter."""
    peak: tuple[float, ...]
    """Verified peak memory per rank."""
    origin: str
    """Family it came from, or ``search``, or ``exact``."""
    tries: int
    """Orders decoded."""

    @property
    def gap(self) -> float:
        """``value / bound - 1``: the most that any other schedule could still save, relative to the bound."""
        return self.value / self.bound - 1

    @property
    def proven(self) -> bool:
        """Whether the bound proves it optimal, to a part in a million (times are integers in the proof)."""
        return self.gap <= 1e-6


def solve(
    costs: Costs,
    num_microbatches: int,
    *,
    placement: str | Sequence[int] = "loop",
    num_ranks: int | None = None,
    mem_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    time_limit: float = 10.0,
    max_tries: int | None = None,
    seed: int = 0,
    method: Literal["search", "exact"] = "search",
    workers: int = 1,
    progress: Callable[[SolveProgress], None] | None = None,
) -> Solution:
    """The best schedule found for these costs.

    Args:
        costs: One entry per stage.
        num_microbatches: Microbatches per step.
        placement: ``"loop"``, ``"v"``, or the rank of each stage.
        num_ranks: For a named placement; by default as many as stages for a loop, half for a V.
        mem_limit: In the unit of the costs; one number or one per rank.
        objective: ``"makespan"`` when steps end with a synchronization (a clip), else ``"stage_span"``.
        time_limit: Seconds, wall clock, for everything; kept within a tenth unless one family alone takes longer. 0 takes
            the best candidate.
        max_tries: Also stop after so many orders.
        seed: Of the search.
        method: ``"exact"`` gives the search a quarter of the time and a constraint solver the rest.
        workers: Threads of the constraint solver.
        progress: Called when the search starts, then about once a second.

    Raises:
        ValueError: If nothing fits the limit, the numbers do not fit each other, or ``"exact"`` lacks its extra.
    """
    if method not in ("search", "exact"):
        raise ValueError(f"method={method!r} is unknown. Use 'search' or 'exact'.")
    started = time.monotonic()
    solver = _Solver(costs, num_microbatches, _placement(costs, placement, num_ranks), mem_limit, objective, progress)
    known, played_s = solver.candidates(started + 0.25 * time_limit if time_limit > 0 else math.inf)
    # what is found is decoded, played and proven once more; this belongs to the limit
    deadline = started + (time_limit if method == "search" else 0.25 * time_limit) - _PROOF * played_s
    best = solver.search(known, deadline, max_tries, seed)
    return solver.exactly(best, started + time_limit - time.monotonic(), workers, seed) if method == "exact" else best


class _Candidate(NamedTuple):
    """A schedule that ends within the limits, not proven yet."""

    value: float
    origin: str
    schedule: Schedule


class _Solver:
    """The steps of `solve` for one problem: candidates, annealing from the best of them, then the constraint solver."""

    def __init__(
        self,
        costs: Costs,
        num_microbatches: int,
        place: Placement,
        mem_limit: float | Sequence[float] | None,
        objective: Objective,
        progress: Callable[[SolveProgress], None] | None,
    ) -> None:
        self.costs, self.progress = costs, progress
        self.objective: Objective = objective
        self.bound = lower_bound(
            costs, num_microbatches=num_microbatches, placement=place, mem_limit=mem_limit, objective=objective
        )
        self.limits = expand_limits(mem_limit, place)
        self.problem = Problem(costs, place, num_microbatches, self.limits)

    def candidates(self, until: float) -> tuple[list[_Candidate], float]:
        """Families that fit, the best first, one microbatch at a time if none does; and the longest time to play one.

        Families are tried in turn; after ``until`` those found so far are taken.
        """
        costs, problem = self.costs, self.problem
        found: list[_Candidate] = []
        longest = 0.0
        load_installed_families()
        # the best ones first: split backwards in a fixed order
        for name, family in sorted(FAMILIES.items(), key=lambda x: (not x[1].splits_backward, x[1].takes_costs)):
            if found and time.monotonic() > until:
                break
            try:
                made = build_schedule(
                    name, problem.num_ranks, problem.m, num_chunks=problem.num_stages // problem.num_ranks,
                    costs=costs if family.takes_costs else None, mem_limit=problem.limits if family.takes_costs else None,
                )  # fmt: skip
            except ValueError:
                continue  # not for this number of ranks, chunks or microbatches
            if made.placement == problem.placement:
                began = time.monotonic()
                candidate = self._played(name, made)
                longest = max(longest, time.monotonic() - began)
                found += [candidate] if candidate.value < math.inf else []
        if not found:
            decoded = problem.decode(problem.throttled(1), [0.0] * problem.num_ranks, record=True)
            if decoded is not None:
                found.append(self._played("one microbatch at a time", problem.schedule("one_at_a_time", decoded)))
        if not found:
            self._first_proven([], 0)
        return sorted(found, key=lambda c: c.value), longest

    def search(self, known: list[_Candidate], deadline: float, max_tries: int | None, seed: int) -> Solution:
        """Anneal until the deadline; the best schedule that verifies, of what was found and ``known``."""
        annealing = Annealing(self.problem, self.objective, random.Random(seed))
        if time.monotonic() < deadline:
            starts = self._starts(known[0].schedule)
            found = annealing.run(starts, deadline, max_tries, self.bound, self.progress)
            if found is not None:
                value = found.makespan if self.objective == "makespan" else found.span
                if value < known[0].value * (1 - 1e-12):
                    known.append(self._played("search", self.problem.schedule("solved", found)))
        return self._first_proven(sorted(known, key=lambda c: c.value), annealing.tries)

    def exactly(self, known: Solution, time_limit: float, workers: int, seed: int) -> Solution:
        """Continue with the constraint solver; keep the better schedule and the sharper bound."""
        from titan_pipeline.solver.exact import solve_exactly  # the extra is imported only where it is asked for

        schedule = known.schedule
        if 3 * schedule.num_stages * schedule.num_microbatches * _SECONDS_PER_ACTION > time_limit:
            return known  # the limit would pass while the program is written
        began = time.monotonic()

        def report(best: float, bound: float) -> None:
            if self.progress is not None:
                elapsed = time.monotonic() - began
                self.progress(SolveProgress(elapsed, known.tries, best, max(bound, known.bound)))

        exact = solve_exactly(
            self.costs, schedule.num_microbatches, schedule.placement, self.limits, objective=self.objective,
            start=simulate(schedule, self.costs), floor=known.bound, time_limit=time_limit, workers=workers, seed=seed,
            progress=report,
        )  # fmt: skip
        bound = min(max(known.bound, exact.bound), known.value)
        best = replace(known, bound=bound)
        if exact.schedule is None:
            return best
        try:
            proof = verify(exact.schedule, costs=self.costs, mem_limit=self.limits)
        except ScheduleError:
            return best  # rounding let it exceed the limit by a hair
        result = simulate(exact.schedule, self.costs)
        value = result.makespan if self.objective == "makespan" else result.span
        if value < known.value:
            return Solution(exact.schedule, value, min(bound, value), proof.peak, "exact", known.tries)
        return best

    def _starts(self, known: Schedule) -> Iterator[list[Order]]:
        """Orders to search from: the best family's, and greedy ones, the most promising first."""
        problem = self.problem
        yield problem.orders_of(known)
        m = problem.m
        fits = m
        if min(problem.limits) < math.inf:
            held = _held(self.costs, problem.placement)
            fits = min(math.floor(x / h) if h else m for x, h in zip(problem.limits, held, strict=True))
        fits = max(1, min(fits, m))
        yield problem.throttled(fits)
        stages = problem.num_stages
        for in_flight in dict.fromkeys(
            max(1, min(fits, x)) for x in (stages, stages // 2, 3 * stages // 4, 3 * stages // 2)
        ):
            for charge in (1.0, 0.5, 0.0):
                yield problem.throttled(in_flight, charge)

    def _first_proven(self, known: Sequence[_Candidate], tries: int) -> Solution:
        """The best that verifies. Playing a schedule shows that it ends; families of other packages may still be wrong."""
        for value, origin, schedule in known:
            try:
                proof = verify(schedule, costs=self.costs, mem_limit=self.limits)
            except ScheduleError:
                continue
            return Solution(schedule, value, self.bound, proof.peak, origin, tries)
        raise ValueError(
            f"no schedule fits mem_limit={self.limits}: the weight gradients' context of one microbatch does not. Raise it."
        )

    def _played(self, origin: str, schedule: Schedule) -> _Candidate:
        """The schedule's value; infinity if it never ends or does not fit."""
        played = score(schedule.compute_only(), self.costs)
        if played is None or any(x > limit for x, limit in zip(played.peak, self.problem.limits, strict=True)):
            return _Candidate(math.inf, origin, schedule)
        return _Candidate(played.value(self.objective), origin, schedule)


def pareto(
    costs: Costs,
    num_microbatches: int,
    budgets: Sequence[float],
    *,
    placement: str | Sequence[int] = "loop",
    num_ranks: int | None = None,
    objective: Objective = "makespan",
    time_limit: float = 10.0,
    seed: int = 0,
) -> list[tuple[float, Solution]]:
    """The best schedule for each memory budget; budgets below one microbatch are left out.

    A larger budget never gives a longer schedule: what fits a smaller one is a candidate for it.

    Args:
        budgets: Memory limits of a rank, in the unit of the costs. The rest as in `solve`; ``time_limit`` is for each.
    """
    place = _placement(costs, placement, num_ranks)
    front: list[tuple[float, Solution]] = []
    for budget in sorted(budgets):
        if budget < max(_held(costs, place)):
            continue
        solution = solve(
            costs, num_microbatches, placement=place, num_ranks=max(place) + 1, mem_limit=budget,
            objective=objective, time_limit=time_limit, seed=seed,
        )  # fmt: skip
        if front and front[-1][1].value < solution.value:
            before = front[-1][1]
            solution = replace(before, bound=solution.bound, tries=solution.tries)
        front.append((budget, solution))
    return front


def _placement(costs: Costs, placement: str | Sequence[int], num_ranks: int | None) -> Placement:
    stages = costs.num_stages
    if not isinstance(placement, str):
        return placement_from(placement, max(placement) + 1, 1)
    if num_ranks is None:
        num_ranks = stages // 2 if placement == "v" else stages
    if num_ranks < 1 or stages % num_ranks:
        raise ValueError(f"costs of {stages} stages do not spread evenly over num_ranks={num_ranks}. Give a placement.")
    return placement_from(placement, num_ranks, stages // num_ranks)


def _held(costs: Costs, place: Placement) -> list[float]:
    """Memory of one microbatch on each rank."""
    return [sum(a for a, r in zip(costs.activation, place, strict=True) if r == rank) for rank in range(max(place) + 1)]
