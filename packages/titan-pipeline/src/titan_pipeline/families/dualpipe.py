"""DualPipeV (DeepSeek-AI): a V whose steady state pairs a forward with a backward of another microbatch."""

from titan_pipeline.families.one_f_one_b import Program
from titan_pipeline.families.registry import register_family
from titan_pipeline.ir.placement import v_placement
from titan_pipeline.ir.schedule import Kind, Schedule, schedule_from_programs


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek-AI): a V whose steady state pairs a forward with a whole backward for overlap.

    Pairs are marked in ``overlaps``; a stage that can interleave them hides its all-to-alls. Peak memory is p + 1/2.

    Raises:
        ValueError: If there are fewer microbatches than stages (2p).
    """
    p, m = num_ranks, num_microbatches
    if m < 2 * p:
        raise ValueError(
            f"dualpipe_v fills both directions of {2 * p} stages and needs num_microbatches >= {2 * p}, got {m}. "
            "Use zbv or v_half, which take any number."
        )
    programs: list[Program] = []
    overlaps: list[tuple[int, ...]] = []
    for r in range(p):
        rank = _Rank(r, p)
        rank.run(p, m)
        programs.append(rank.program)
        overlaps.append(tuple(rank.marks))
    base = schedule_from_programs("dualpipe_v", m, v_placement(p), programs)
    return Schedule(base.name, m, base.placement, base.ranks, tuple(overlaps))


class _Rank:
    """The program of one rank while it grows, and the positions of its overlapped pairs."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.program: Program = []
        self.marks: list[int] = []
        self._done: dict[tuple[str, int], int] = {}
        self._pending: list[tuple[int, int]] = []

    def run(self, p: int, m: int) -> None:
        """The eight phases."""
        r = self.rank
        for _ in range(2 * (p - r - 1)):
            self._forward(0)
        for _ in range(r + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(p - r - 1):
            self._backward(1, split=True)
            self._weight()
            self._forward(1)
        self._steady(p, m)
        for _ in range(p - r - 1):
            self._backward(1)
            self._overlapped(1, 0)
        split = False
        for i in range(r + 1):
            split = split or (i == (r + 1) // 2 and r % 2 == 1)
            self._backward(1, split)
            split = split or (i == (r + 1) // 2 and r % 2 == 0)
            self._backward(0, split)
        for _ in range(p - r - 1):
            self._weight()
            self._backward(0, split)
        while self._pending:
            self._weight()

    def _steady(self, p: int, m: int) -> None:
        for i in range(m - 2 * p + self.rank + 1):
            if i == 0 and self.rank == p - 1:
                self._forward(0)
                self._backward(1)
            else:
                self._overlapped(0, 1)
            self._overlapped(1, 0)

    def _take(self, what: str, chunk: int) -> int:
        mb = self._done.get((what, chunk), 0)
        self._done[what, chunk] = mb + 1
        return mb

    def _forward(self, chunk: int) -> None:
        self.program.append((Kind.F, self.stages[chunk], self._take("F", chunk)))

    def _backward(self, chunk: int, split: bool = False) -> None:
        mb = self._take("B", chunk)
        self.program.append((Kind.I if split else Kind.B, self.stages[chunk], mb))
        if split:
            self._pending.append((self.stages[chunk], mb))

    def _weight(self) -> None:
        if self._pending:
            self.program.append((Kind.W, *self._pending.pop(0)))

    def _overlapped(self, forward_chunk: int, backward_chunk: int) -> None:
        self.marks.append(len(self.program))
        self._forward(forward_chunk)
        self._backward(backward_chunk)


register_family(
    "dualpipe_v",
    dualpipe_v,
    chunks=(2, 2),
    splits_backward=True,
    summary="overlapped forward and backward pairs, on a V",
)
