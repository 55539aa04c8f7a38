"""The scheduling problem as a constraint program, for OR-tools' CP-SAT: the optimum, or a certified gap to it.

Every forward, input gradient and weight gradient is an interval; the intervals of a rank do not overlap; results
travel as they do in the simulator's uncontended links; activations and weight contexts are demands on the rank's
memory from the start of a forward to the end of its gradients. Microbatches are alike, so every stage may see them in
order (exchange two that do not, and nothing gets later): that removes all permutations of microbatches.

Times become integers. Where the costs are not multiples of a common unit they are rounded *down*, so that the solver's
bound stays a bound for the true costs; the schedule it finds is judged by the simulator with the true costs. A whole
backward cheaper than its halves enters the bound with that cheaper time.

The solver starts from the schedule that the search found, so it can only improve it. Proofs are quick for makespan on
up to 8 ranks with one chunk and 16 microbatches, and rare beyond that; the bound is certified either way.

Needs the extra ``titan-pipeline[solve]``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from titan_pipeline.analysis.bounds import Objective
from titan_pipeline.analysis.simulate import Simulation
from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.placement import Placement
from titan_pipeline.ir.schedule import Kind, Schedule, schedule_from_programs

_LARGEST = 2_000_000  # of a rounded total; larger integers slow the solver down


@dataclass(frozen=True, slots=True)
class Exact:
    """What the constraint solver says."""

    schedule: Schedule | None
    """The best it found; None if it found none in time."""
    bound: float
    """No schedule within the limits is shorter, in the unit of the costs."""


def solve_exactly(
    costs: Costs,
    num_microbatches: int,
    placement: Placement,
    limits: Sequence[float],
    *,
    objective: Objective,
    start: Simulation,
    floor: float,
    time_limit: float,
    workers: int,
    seed: int,
    progress: Callable[[float, float], None] | None = None,
) -> Exact:
    """Search and prove, from a timeline that is known to fit.

    Args:
        costs: One entry per stage.
        num_microbatches: Microbatches per step.
        placement: Rank of each stage.
        limits: Memory of each rank; infinity for none.
        objective: As in `titan_pipeline.solve`.
        start: A timeline of a schedule of this placement within the limits.
        floor: A known lower bound; it spares the solver from proving it again.
        time_limit: Seconds.
        workers: Threads of the solver.
        seed: Of the solver.
        progress: Called with the best value and the bound at every improvement.

    Raises:
        ValueError: If OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model  # pyright: ignore[reportMissingImports]
    except ImportError as err:
        raise ValueError(
            "method='exact' needs OR-tools. Install it with: pip install \"titan-pipeline[solve]\", or use "
            "method='search'."
        ) from err
    began = monotonic()
    # no makespan need be longer than the known one; a shorter span of a rank may come with a longer makespan
    horizon = start.makespan if objective == "makespan" else 2 * start.makespan
    program = _Program(cp_model, costs, num_microbatches, placement, limits, objective, horizon)
    program.model.add(program.goal >= int(floor * program.unit * (1 - 1e-9)))
    program.hint(start)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit - (monotonic() - began), 0.01)
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    listener = None if progress is None else _listener(cp_model, program.unit, progress)
    status = solver.solve(program.model, listener)
    bound = solver.best_objective_bound / program.unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(None, max(bound, 0.0))
    return Exact(program.schedule(solver), bound)


class _Program:
    """Variables and constraints."""

    def __init__(
        self,
        cp_model: Any,
        costs: Costs,
        num_microbatches: int,
        placement: Placement,
        limits: Sequence[float],
        objective: Objective,
        horizon: float,
    ) -> None:
        self.model: Any = cp_model.CpModel()
        self.costs, self.m, self.placement = costs, num_microbatches, placement
        stages = range(len(placement))
        times = [*costs.forward, *costs.input_grad, *costs.weight_grad, *costs.backward]
        hops = [costs.hop(s, placement[s], placement[s + 1]) for s in stages[:-1]]
        hops_back = [costs.hop(s, placement[s + 1], placement[s]) for s in stages[:-1]]
        self.unit = _unit([*times, *hops, *hops_back], horizon)
        self.horizon = int(horizon * self.unit) + 1
        self.first: dict[tuple[Kind, int, int], Any] = {}  # start of each action
        self.last: dict[tuple[Kind, int, int], Any] = {}
        rows: list[list[Any]] = [[] for _ in range(max(placement) + 1)]
        for s in stages:
            for kind, time in zip((Kind.F, Kind.I, Kind.W), self._times(s), strict=True):
                for k in range(num_microbatches):
                    start = self.model.new_int_var(0, self.horizon, "")
                    rows[placement[s]].append(self.model.new_fixed_size_interval_var(start, time, ""))
                    self.first[kind, s, k], self.last[kind, s, k] = start, start + time
                    if k:
                        self.model.add(start >= self.last[kind, s, k - 1])
        for row in rows:
            self.model.add_no_overlap(row)
        for k in range(num_microbatches):
            for s in stages:
                self.model.add(self.first[Kind.I, s, k] >= self.last[Kind.F, s, k])
                self.model.add(self.first[Kind.W, s, k] >= self.last[Kind.I, s, k])
            for s, (up, down) in enumerate(zip(hops, hops_back, strict=True)):
                self.model.add(self.first[Kind.F, s + 1, k] >= self.last[Kind.F, s, k] + self._round(up))
                self.model.add(self.first[Kind.I, s, k] >= self.last[Kind.I, s + 1, k] + self._round(down))
        self._limit_memory(limits)
        self._minimize(objective)

    def _round(self, time: float) -> int:
        return int(time * self.unit + 1e-6)

    def _times(self, s: int) -> tuple[int, int, int]:
        """F, I and W of a stage; never more than a whole backward takes."""
        whole = self.costs.backward_of(s)
        gradient = min(self.costs.input_grad[s], whole)
        return (
            self._round(self.costs.forward[s]),
            self._round(gradient),
            self._round(max(0.0, min(self.costs.weight_grad[s], whole - gradient))),
        )

    def _limit_memory(self, limits: Sequence[float]) -> None:
        """A demand from F to I, another from I to W. The larger of the two counts while I itself runs."""
        for rank, limit in enumerate(limits):
            stages = [s for s, r in enumerate(self.placement) if r == rank]
            held = [x for s in stages for x in (self.costs.activation[s], self.costs.weight_context[s])]
            if limit == float("inf") or limit >= self.m * sum(map(max, held[::2], held[1::2])):
                continue
            unit = _unit(held, limit)
            intervals: list[Any] = []
            demands: list[int] = []
            for s in stages:
                grows = self.costs.weight_context[s] > self.costs.activation[s]
                for k in range(self.m):
                    turn = (self.first if grows else self.last)[Kind.I, s, k]
                    for begin, end, demand in (
                        (self.first[Kind.F, s, k], turn, self.costs.activation[s]),
                        (turn, self.last[Kind.W, s, k], self.costs.weight_context[s]),
                    ):
                        size = self.model.new_int_var(0, self.horizon, "")
                        intervals.append(self.model.new_interval_var(begin, size, end, ""))
                        demands.append(int(demand * unit + 1e-6))
            self.model.add_cumulative(intervals, demands, int(limit * unit * (1 + 1e-9) + 1e-6))

    def _minimize(self, objective: Objective) -> None:
        self.goal = goal = self.model.new_int_var(0, self.horizon, "")
        for rank in range(max(self.placement) + 1):
            stages = [s for s, r in enumerate(self.placement) if r == rank]
            begin = self.first[Kind.F, stages[0], 0] if objective == "stage_span" else 0
            for s in stages:
                self.model.add(goal - begin >= self.last[Kind.W, s, self.m - 1])
        self.model.minimize(goal)

    def hint(self, start: Simulation) -> None:
        """Begin with a known timeline; a whole backward becomes its halves."""
        for slots in start.timeline:
            for slot in slots:
                kind, s, k = slot.action
                at = int(slot.start * self.unit)
                self.model.add_hint(self.first[Kind.I if kind is Kind.B else kind, s, k], at)
                if kind is Kind.B:
                    self.model.add_hint(self.first[Kind.W, s, k], at + self._times(s)[1])

    def schedule(self, solver: Any) -> Schedule:
        """Actions by their start; of those that take no time, first what others wait for."""
        programs: list[list[tuple[Kind, int, int]]] = [[] for _ in range(max(self.placement) + 1)]
        order = {Kind.F: 0, Kind.I: 1, Kind.W: 2}
        starts = sorted(
            (solver.value(v), solver.value(self.last[a]), order[a[0]], a[2], a) for a, v in self.first.items()
        )
        for *_, action in starts:
            programs[self.placement[action[1]]].append(action)
        return schedule_from_programs("solved", self.m, self.placement, programs)


def _unit(values: Sequence[float], total: float) -> float:
    """Integers a unit: exact for decimals if that stays small, else as fine as the solver likes."""
    for digits in range(7):
        unit = 10.0**digits
        if total * unit <= _LARGEST and all(abs(x * unit - round(x * unit)) < 1e-6 for x in values):
            return unit
    return _LARGEST / max(total, 1e-30)


def _listener(cp_model: Any, unit: float, progress: Callable[[float, float], None]) -> Any:
    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            progress(self.objective_value / unit, self.best_objective_bound / unit)

    return Listener()
