"""Play a schedule against costs: when does everything run, and where does the idle time come from?

A rank runs its actions in order; an action starts when the previous one has ended and its inputs have arrived. A
result leaves when its producer ends and travels at once: messages of one directed link queue for its bandwidth, and
their latencies overlap. Communication does not occupy the ranks.

Two bubbles are reported, because papers quote the first and training pays the second:

- stage bubble: 1 - work / longest span, a rank's span reaching from its first forward to its last action. Zero-bubble
  schedules bring it to zero by letting ranks start the next step early, which needs an optimizer step without any
  synchronization between stages.
- makespan bubble: 1 - work / (end of the last action of all ranks), the time of a step that ends with a gradient-norm
  clip over all stages.

``work`` is the mean busy time of a rank, so that imbalance between stages counts as bubble.
"""

from dataclasses import dataclass

from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.schedule import Action, Kind, Schedule, consumers, producers


@dataclass(frozen=True, slots=True)
class Slot:
    """When one action runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between ranks."""

    source: int
    target: int
    action: Action
    """The action whose result travels."""
    departure: float
    arrival: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Idle time of an average rank within the makespan, by cause, in time units. The parts add up to all of it.

    ``communication`` is what instant links would save, ``imbalance`` what equal stages would save after that (it can
    be slightly negative: an order made for unequal stages may not suit equal ones); the rest is split by phase.
    """

    warm_up: float
    """Before the rank's first backward."""
    steady: float
    """Between its first backward and its last forward."""
    drain: float
    """After its last forward."""
    communication: float
    imbalance: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A timeline and what follows from it."""

    schedule: Schedule
    """The schedule that ran, without communication actions."""
    timeline: tuple[tuple[Slot, ...], ...]
    """One slot an action and rank, in order."""
    transfers: tuple[Transfer, ...]
    makespan: float
    """End of the last action of all ranks."""
    work: float
    """Mean busy time of a rank."""
    breakdown: Breakdown
    memory: tuple[tuple[tuple[float, float], ...], ...]
    """Per rank, ``(time, memory from then on)``."""

    @property
    def span(self) -> float:
        """Longest time from a rank's first start to its last end."""
        return max(slots[-1].end - slots[0].start for slots in self.timeline)

    @property
    def stage_bubble(self) -> float:
        """``1 - work / span``: what is left idle if steps may overlap across ranks."""
        return 1 - self.work / self.span

    @property
    def makespan_bubble(self) -> float:
        """``1 - work / makespan``: what is left idle if all ranks meet at the end of a step."""
        return 1 - self.work / self.makespan

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Largest memory of each rank."""
        return tuple(max(level for _, level in curve) for curve in self.memory)


def simulate(schedule: Schedule, costs: Costs | None = None, *, overlap: float = 1.0) -> Simulation:
    """The timeline of ``schedule`` under ``costs``.

    Args:
        schedule: Communication actions are ignored: results travel as soon as they exist.
        costs: Equal stages of one time unit per rank by default.
        overlap: Duration of an overlapped forward-backward pair relative to running the two one after another: 1
            gains nothing; below 1 a pair marked in ``schedule.overlaps`` starts when both inputs are there and ends
            as one.

    Raises:
        ValueError: If the schedule can never finish (`verify` says why), costs miss the number of stages, or overlap
            is outside (0, 1].
    """
    if not 0 < overlap <= 1:
        raise ValueError(f"overlap={overlap}: give the relative duration of a pair, in (0, 1].")
    schedule = schedule.compute_only()
    costs = costs or Costs.uniform(schedule.num_stages, num_chunks=schedule.num_chunks)
    costs.check(schedule.num_stages)
    player = _played(schedule, costs, overlap)
    makespan = max(slots[-1].end for slots in player.slots)
    work = sum(s.end - s.start for slots in player.slots for s in slots) / schedule.num_ranks
    return Simulation(
        schedule,
        tuple(tuple(slots) for slots in player.slots),
        tuple(player.transfers),
        makespan,
        work,
        _break_down(player, makespan, work),
        tuple(memory_curve(schedule, r, costs, player.slots[r]) for r in range(schedule.num_ranks)),
    )


def _played(schedule: Schedule, costs: Costs, overlap: float) -> "_Player":
    player = _Player(schedule, costs, overlap)
    player.run()
    return player


class _Player:
    """The state of one run: what has ended, what has landed, how far each rank is."""

    def __init__(self, schedule: Schedule, costs: Costs, overlap: float) -> None:
        self.schedule = schedule
        self.costs = costs
        self.overlap = overlap
        self.slots: list[list[Slot]] = [[] for _ in schedule.ranks]
        self.transfers: list[Transfer] = []
        self.clock = [0.0] * schedule.num_ranks
        self.position = [0] * schedule.num_ranks
        self.done: dict[Action, float] = {}  # end of an action: its result exists on its own rank
        self.landed: dict[Action, float] = {}  # its result can be used by the neighbouring stage
        self.link_free: dict[tuple[int, int], float] = {}
        no_marks: tuple[tuple[int, ...], ...] = ((),) * schedule.num_ranks
        marks = schedule.overlaps if schedule.overlaps and overlap < 1 else no_marks
        self.marks = [set(m) for m in marks]

    def run(self) -> None:
        """Advance ranks in turn until nobody can move; the result does not depend on the turns."""
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.schedule.ranks):
                while self.position[rank] < len(program) and self._step(rank, program):
                    moved = True
        stuck = [r for r, program in enumerate(self.schedule.ranks) if self.position[r] < len(program)]
        if stuck:
            raise ValueError(
                f"schedule {self.schedule.name!r} never finishes on ranks {stuck}: verify() names the cycle."
            )

    def _step(self, rank: int, program: tuple[Action, ...]) -> bool:
        i = self.position[rank]
        pair = program[i : i + 2] if i in self.marks[rank] else program[i : i + 1]
        start = self.clock[rank]
        for action in pair:
            ready = self._ready_at(action)
            if ready is None:
                return False
            start = max(start, ready)
        factor = self.overlap if len(pair) == 2 else 1.0
        end = start
        for action in pair:  # the halves of an overlapped pair are drawn one after the other
            begin, end = end, end + self.costs.time_of(action) * factor
            self.slots[rank].append(Slot(action, begin, end))
        for action in pair:
            self._finish(rank, action, end)
        self.clock[rank] = end
        self.position[rank] += len(pair)
        return True

    def _ready_at(self, action: Action) -> float | None:
        """When all inputs are on the rank, or None while one has not been computed."""
        latest = 0.0
        for options in producers(action, self.schedule.num_stages):
            where = self.done if options[0].stage == action.stage else self.landed
            time = next((where[a] for a in options if a in where), None)
            if time is None:
                return None
            latest = max(latest, time)
        return latest

    def _finish(self, rank: int, action: Action, end: float) -> None:
        self.done[action] = end
        neighbours = consumers(action, self.schedule.num_stages)
        if not neighbours:
            return
        target = self.schedule.placement[neighbours[0][0]]
        if target == rank:
            self.landed[action] = end
            return
        link = self.costs.link_of(rank, target)
        boundary = min(action.stage, neighbours[0][0])
        free = max(end, self.link_free.get((rank, target), 0.0)) + self.costs.payload_of(boundary) / link.bandwidth
        self.link_free[rank, target] = free
        self.landed[action] = free + link.latency
        self.transfers.append(Transfer(rank, target, action, end, free + link.latency))


def _break_down(player: "_Player", makespan: float, work: float) -> Breakdown:
    schedule, costs, overlap = player.schedule, player.costs, player.overlap
    instant = costs.without_communication()
    spread = _spread(instant)
    equal = player.slots if spread == costs else _played(schedule, spread, overlap).slots
    without_comm = makespan
    if instant != costs:
        without_comm = max(s[-1].end for s in _played(schedule, instant, overlap).slots)
    equal_makespan = max(s[-1].end for s in equal)
    phases = [idle_by_phase(slots, equal_makespan) for slots in equal]
    p = len(phases)
    warm_up, steady, drain = (sum(phase[k] for phase in phases) / p for k in range(3))
    communication = makespan - without_comm
    imbalance = makespan - work - communication - warm_up - steady - drain
    return Breakdown(warm_up, steady, drain, communication, imbalance)


def _spread(costs: Costs) -> Costs:
    """Equal stages with the same total; unchanged where they are equal already (keeps the sums exact)."""
    equal = all(len(set(v)) <= 1 for v in (costs.forward, costs.input_grad, costs.weight_grad, costs.backward))
    return costs if equal else costs.balanced()


def idle_by_phase(slots: list[Slot], makespan: float) -> tuple[float, float, float]:
    """Idle time before the first backward, until the last forward ends, and after."""
    first_backward = next((s.start for s in slots if s.action.kind is not Kind.F), makespan)
    last_forward = max((s.end for s in slots if s.action.kind is Kind.F), default=0.0)
    idle = [0.0, 0.0, 0.0]
    previous = 0.0
    for start, end in [*((s.start, s.end) for s in slots), (makespan, makespan)]:
        phase = 0 if start <= first_backward else 1 if previous < last_forward else 2
        idle[phase] += start - previous
        previous = end
    return idle[0], idle[1], idle[2]


def memory_curve(schedule: Schedule, rank: int, costs: Costs, slots: list[Slot]) -> tuple[tuple[float, float], ...]:
    """Memory as steps over time; each level holds from its time to the next."""
    levels = memory_levels(schedule, rank, costs)
    curve: list[tuple[float, float]] = [(0.0, 0.0)]
    for slot, level in zip(slots, levels, strict=True):
        if level != curve[-1][1]:
            curve.append((slot.start, level))
    return tuple(curve)


def memory_levels(schedule: Schedule, rank: int, costs: Costs) -> list[float]:
    """Memory held *while* each action of the rank runs; the largest entry is the peak.

    A forward takes ``activation`` when it starts. An input gradient turns it into ``weight_context`` when it ends, a
    weight gradient or a whole backward gives everything back when it ends. A forward of an evaluation schedule
    gives its activation back when it ends.
    """
    keep = not schedule.forward_only
    level = 0.0
    levels: list[float] = []
    for kind, stage, _ in schedule.ranks[rank]:
        during, after = level, level
        if kind is Kind.F:
            during = level + costs.activation[stage]
            after = during if keep else level
        elif kind is Kind.I:
            after = level - costs.activation[stage] + costs.weight_context[stage]
            during = max(level, after)
        elif kind is Kind.W:
            after = level - costs.weight_context[stage]
        elif kind is Kind.B:
            after = level - costs.activation[stage]
        levels.append(during)
        level = after
    return levels
