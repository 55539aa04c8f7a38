"""V-shaped schedules with controllable memory: V-Half, V-Min and 1F1B-V.

Idea (Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362): draw the actions of *one*
microbatch on a V placement, the building block, and repeat it every six time units (F, I, W for each of two chunks).
If no two actions of a rank fall on the same unit modulo 6, the repetition never collides. Memory is how long a block
keeps an activation alive, so its shape sets the memory:

========  ===========================  =========================================  ========
schedule  peak, microbatches per rank    bubble for equal times, in units of T/6    backward
========  ===========================  =========================================  ========
v_half    floor((p+2)/2)               3(p-1) for even p, 3p-4 for odd p          split
v_min     floor((p+4)/3)               4p-5, or 4p-3 where 3 divides p            split
1f1b_v    floor(2p/3) + 1              6(p-1) + (p-1) mod 3                       whole
========  ===========================  =========================================  ========

T = T_F + T_B + T_W of a rank; 1F1B has 6(p-1). (Memory counts an activation until its weight gradient, the paper's
convention; costs with a small ``weight_context`` only lower it.)

The repetition leaves holes at both ends of a step. For the split schedules they are closed by playing the block's
order against a clock: each rank keeps the order of its forwards and the order of its gradients, but takes whichever of
the two is ready and fits the block's memory, earliest nominal time first; weight gradients fill what is left. This
cannot get stuck: the globally earliest action that has not run has all its inputs, and everything that the repetition
would hold at that point has been given back. 1f1b_v runs the block's order as it is: moving its two-unit backwards
would break the pattern and cost time in every repetition.
"""

import heapq
from dataclasses import dataclass

from titan_pipeline.families.registry import register_family
from titan_pipeline.ir.placement import v_placement
from titan_pipeline.ir.schedule import Kind, Schedule, schedule_from_programs

PERIOD = 6


@dataclass(frozen=True, slots=True)
class _Block:
    """Nominal start of the four actions of microbatch 0, a rank: F of chunk 0, F of 1, gradient of 1, gradient of 0."""

    starts: tuple[tuple[int, int, int, int], ...]
    limit: int
    """Chunk activations a rank may hold."""


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half of 1F1B's memory: ``floor((p+2)/2)`` microbatches."""
    p = num_ranks
    gap = 3 if p % 2 == 0 else 0
    starts = tuple((2 * i, 3 * p - i - 2, 3 * p + gap + 2 * i - 1, 6 * p + gap - i - 2) for i in range(p))
    return _from_block("v_half", num_microbatches, _Block(starts, 2 * ((p + 2) // 2)))


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of 1F1B's memory: ``floor((p+4)/3)`` microbatches; sensitive to unequal times."""
    p = num_ranks
    gap = 2 if p % 3 == 0 else 0
    starts = tuple((i, 2 * p - i - 1, 2 * p + gap + i, 4 * p + gap - i - 1) for i in range(p))
    return _from_block("v_min", num_microbatches, _Block(starts, 2 * ((p + 4) // 3)))


def one_f_one_b_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Whole backwards on a V: two thirds of 1F1B's memory without splitting."""
    p = num_ranks
    programs: list[list[tuple[Kind, int, int]]] = []
    for r, (f0, f1, b1, b0) in enumerate(_whole_backward_block(p)):
        low, high = r, 2 * p - 1 - r
        block = ((f0, Kind.F, low), (f1, Kind.F, high), (b1, Kind.B, high), (b0, Kind.B, low))
        order = sorted((t + PERIOD * mb, kind, stage, mb) for mb in range(num_microbatches) for t, kind, stage in block)
        programs.append([(kind, stage, mb) for _, kind, stage, mb in order])
    return schedule_from_programs("1f1b_v", num_microbatches, v_placement(p), programs)


def _whole_backward_block(p: int) -> tuple[tuple[int, int, int, int], ...]:
    """Forwards straight up and down the V; each backward (2 units) at the first time its rank's six units allow."""
    first = list(range(p))
    second = [2 * p - 1 - i for i in range(p)]
    free = [set(range(PERIOD)) - {first[i] % PERIOD, second[i] % PERIOD} for i in range(p)]
    now = 2 * p
    upper: list[int] = []
    for i in range(p):
        while not _pair_fits(now, free[i]) or not any(_pair_fits(t, free[i] - _pair(now)) for t in range(PERIOD)):
            now += 1
        free[i] -= _pair(now)
        upper.append(now)
        now += 2
    lower = [0] * p
    for i in reversed(range(p)):
        while not _pair_fits(now, free[i]):
            now += 1
        lower[i] = now
        now += 2
    return tuple(zip(first, second, upper, lower, strict=True))


def _pair(start: int) -> set[int]:
    return {start % PERIOD, (start + 1) % PERIOD}


def _pair_fits(start: int, free: set[int]) -> bool:
    return _pair(start) <= free


def _from_block(name: str, m: int, block: _Block) -> Schedule:
    p = len(block.starts)
    programs = _Squeezer(m, block).run()
    return schedule_from_programs(name, m, v_placement(p), programs)


class _Squeezer:
    """Plays the repeated block against a clock of unit times, as described in the module docstring."""

    def __init__(self, m: int, block: _Block) -> None:
        self.block = block
        p = len(block.starts)
        self.p = p
        # each rank's forwards and gradients in the order of their nominal times: (nominal, stage, microbatch)
        self.forwards: list[list[tuple[int, int, int]]] = []
        self.gradients: list[list[tuple[int, int, int]]] = []
        for r, (f0, f1, b1, b0) in enumerate(block.starts):
            low, high = r, 2 * p - 1 - r
            shift = [PERIOD * mb for mb in range(m)]
            self.forwards.append(sorted((t + x, s, k) for t, s in ((f0, low), (f1, high)) for k, x in enumerate(shift)))
            self.gradients.append(
                sorted((t + x, s, k) for t, s in ((b1, high), (b0, low)) for k, x in enumerate(shift))
            )
        self.programs: list[list[tuple[Kind, int, int]]] = [[] for _ in range(p)]
        self.next_forward = [0] * p
        self.next_gradient = [0] * p
        self.pending: list[list[tuple[int, int]]] = [[] for _ in range(p)]
        self.held = [0] * p
        self.free_at = [0] * p
        self.ends: dict[tuple[str, int, int], int] = {}

    def run(self) -> list[list[tuple[Kind, int, int]]]:
        """Visit the ranks whenever something can have changed, in time order."""
        times = [0]
        seen = {0}
        while times:
            now = heapq.heappop(times)
            for r in range(self.p):
                if self.free_at[r] <= now and self._step(r, now) and self.free_at[r] not in seen:
                    seen.add(self.free_at[r])
                    heapq.heappush(times, self.free_at[r])
        assert all(n == len(self.gradients[r]) for r, n in enumerate(self.next_gradient))
        return self.programs

    def _step(self, r: int, now: int) -> bool:
        forward = self._ready(self.forwards[r], self.next_forward[r], "F", now)
        gradient = self._ready(self.gradients[r], self.next_gradient[r], "B", now)
        fits = self.held[r] < self.block.limit
        if gradient is not None and (forward is None or not fits or gradient < forward):
            self._put(r, now, Kind.I, gradient)
        elif forward is not None and fits:
            self._put(r, now, Kind.F, forward)
        elif self.pending[r]:
            stage, mb = self.pending[r].pop(0)
            self._put(r, now, Kind.W, (0, stage, mb))
        else:
            return False
        return True

    def _ready(self, order: list[tuple[int, int, int]], k: int, what: str, now: int) -> tuple[int, int, int] | None:
        """The next action of ``order`` if its inputs exist."""
        if k == len(order):
            return None
        _, s, mb = order[k]
        last = 2 * self.p - 1
        if what == "F":
            needs = [("F", s - 1, mb)] if s > 0 else []
        else:
            needs = [("F", s, mb)] + ([("B", s + 1, mb)] if s < last else [])
        return order[k] if all(self.ends.get(n, now + 1) <= now for n in needs) else None

    def _put(self, r: int, now: int, kind: Kind, item: tuple[int, int, int]) -> None:
        _, stage, mb = item
        end = now + 1
        self.free_at[r] = end
        self.programs[r].append((kind, stage, mb))
        if kind is Kind.F:
            self.next_forward[r] += 1
            self.held[r] += 1
            self.ends["F", stage, mb] = end
        elif kind is Kind.W:
            self.held[r] -= 1
        else:
            self.next_gradient[r] += 1
            self.ends["B", stage, mb] = end
            self.pending[r].append((stage, mb))


register_family("v_half", v_half, chunks=(2, 2), splits_backward=True, summary="half the memory of 1F1B, on a V")
register_family("v_min", v_min, chunks=(2, 2), splits_backward=True, summary="a third of the memory of 1F1B, on a V")
register_family("1f1b_v", one_f_one_b_v, chunks=(2, 2), summary="whole backwards on a V")
