"""Dynamic context parallelism: the documents of a training step over all ranks that data and context parallelism have.

Problem: under ``dp × cp`` ranks each group of ``cp`` takes rows of its own. A group whose rows hold a very long document
computes long after the others are done, and they wait for it at the next collective; and ``cp`` must be as large as the longest
document needs, for the short ones too.

Idea: the ``dp`` rows that are computed at the same time are laid end to end, and the documents in them are dealt out over all
``dp · cp`` ranks, each with a degree of its own (`titan_cp.planning.documents`). Every rank holds as many tokens as before, so
that memory, shapes and the number of micro-batches stay, nothing is padded, and FSDP, pipelines and experts run as they
did. Work is balanced within each micro-batch, hence also in their sum.

Cost: the documents layout, once for each micro-batch; of the static layout nothing is planned until it is asked for.

Limits: keys travel by the ring's exchange, not by Ulysses' all-to-all. A document ends where its row ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from titan_cp.planning.checks import check_documents
from titan_cp.planning.documents import deal_documents, document_degrees, piece_pairs, work_of
from titan_cp.planning.explain import count_text
from titan_cp.planning.plan import AttentionPlan, plan


def plan_step(
    rows: Sequence[Sequence[int]],
    *,
    dp: int,
    cp: int,
    microbatch: int = 1,
    causal: bool = True,
    token_pairs: float = 0.0,
) -> "StepPlan":
    """Plan one training step: which documents are computed together, over how many ranks each, and what that saves.

    Pure, and the same on every rank that knows the lengths.

    Args:
        rows: The documents' lengths of each row of the global batch, in tokens; all rows have as many tokens.
        dp: Data-parallel ranks (replicas and shards).
        cp: Ranks that would share each row in the static layout.
        microbatch: Rows that a data-parallel rank computes at a time in the static layout.
        causal: Whether a token attends only to itself and earlier tokens.
        token_pairs: What the rest of the model costs for a token, in query-key pairs: parameters of a layer over
            ``2 · heads · head_dim``. Only for the predicted figures.

    Returns:
        The plan of the step.

    Raises:
        ValueError: If the rows differ in length or cannot be shared equally; the message names the nearest that can.
    """
    for name, value in (("dp", dp), ("cp", cp), ("microbatch", microbatch)):
        if value < 1:
            raise ValueError(f"{name}={value} is not a positive number. Use 1 or more.")
    if token_pairs < 0:
        raise ValueError(f"token_pairs={token_pairs} is negative. Use 0 to compare attention alone.")
    together = dp * microbatch
    if not rows or len(rows) % together:
        near = max(1, round(len(rows) / together)) * together
        raise ValueError(
            f"{len(rows)} rows cannot be computed {together} at a time (dp={dp}, microbatch={microbatch}). Use a multiple, such "
            f"as {near}."
        )
    bounds = [check_documents(None, (0, *accumulate(row))) for row in rows]
    seq_len = bounds[0][-1]
    for number, bound in enumerate(bounds):
        if bound[-1] != seq_len:
            raise ValueError(
                f"row {number} has {bound[-1]} tokens, but row 0 has {seq_len}. Ranks hold equal numbers of tokens, so rows must "
                "be equally long; add the missing tokens as a document of their own."
            )
    if microbatch * seq_len % cp:
        raise ValueError(
            f"cp={cp} does not divide {microbatch * seq_len} tokens (microbatch={microbatch} rows of {seq_len}): ranks would "
            f"hold different numbers of them. Nearest rows: {microbatch * seq_len // cp * cp / microbatch:g} tokens."
        )
    joined: list[tuple[int, ...]] = []
    for first in range(0, len(rows), together):
        joined.append((0, *accumulate(n for row in rows[first : first + together] for n in row)))
    return StepPlan(
        dp=dp, cp=cp, microbatch=microbatch, seq_len=seq_len, causal=causal, token_pairs=token_pairs,
        microbatches=tuple(joined), rows=tuple(bounds),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One training step over ``dp · cp`` ranks; made by `plan_step`."""

    dp: int
    """Data-parallel ranks."""
    cp: int
    """Ranks that would share each row in the static layout."""
    microbatch: int
    """Rows that a data-parallel rank computes at a time in the static layout."""
    seq_len: int
    """Tokens of a row."""
    causal: bool
    """Whether a token attends only to itself and earlier tokens."""
    token_pairs: float
    """What the rest of the model costs for a token, in query-key pairs."""
    microbatches: tuple[tuple[int, ...], ...] = field(repr=False)
    """Document boundaries of what all ranks compute at a time: ``dp · microbatch`` rows end to end."""
    rows: tuple[tuple[int, ...], ...] = field(repr=False)
    """Document boundaries of each row."""

    @property
    def size(self) -> int:
        """Ranks that share the documents."""
        return self.dp * self.cp

    @property
    def local_len(self) -> int:
        """Tokens of a rank in a micro-batch, in both layouts."""
        return self.microbatch * self.seq_len // self.cp

    def attention_plan(self, microbatch: int, *, rank: int, **attention: Any) -> AttentionPlan:
        """The plan of one micro-batch, for `titan_cp.attention` and state layers over a group of all `size` ranks.

        Args:
            microbatch: Its number.
            rank: Of this process in that group; the ranks that share a row in the static layout are neighbours.
            attention: Heads, dtype and window, as for `titan_cp.plan`.
        """
        return plan(
            cu_seqlens=self.microbatches[microbatch], size=self.size, rank=rank, causal=self.causal, method="ring",
            layout="documents", **attention,
        )  # fmt: skip

    @cached_property
    def degrees(self) -> dict[int, int]:
        """How many documents have which degree: the number of ranks that hold tokens of it."""
        found = [
            document_degrees(deal_documents(bounds, self.size, self.causal), bounds) for bounds in self.microbatches
        ]
        degrees, counts = np.unique(np.concatenate(found), return_counts=True)
        return dict(zip(degrees.tolist(), counts.tolist(), strict=True))

    @cached_property
    def makespan(self) -> float:
        """The busiest rank's cost of each micro-batch, summed over them: ranks wait for each other in each. In pairs."""
        worst = 0.0
        for bounds in self.microbatches:
            ranges = deal_documents(bounds, self.size, self.causal)
            worst += float(work_of(ranges, bounds, causal=self.causal, window=None).max())
        return worst + self._rest

    @cached_property
    def static_makespan(self) -> float:
        """The same in the static layout, if each group of ``cp`` shares its rows' work evenly."""
        work = np.array([_pairs_of(bounds, self.causal) for bounds in self.rows])
        # data-parallel rank d computes rows d·G/dp and following, some at a time
        groups = work.reshape(self.dp, len(self.microbatches), self.microbatch).sum(axis=2)
        return float(groups.max(axis=0).sum()) / self.cp + self._rest

    @cached_property
    def bound(self) -> float:
        """What no layout falls below: all work, evenly over the ranks. In pairs."""
        return sum(_pairs_of(bounds, self.causal) for bounds in self.rows) / self.size + self._rest

    @property
    def speedup(self) -> float:
        """The static layout's makespan over this one's, transfers not counted."""
        return self.static_makespan / self.makespan

    @cached_property
    def sent_rows(self) -> int:
        """Rows of keys that the busiest rank sends in each micro-batch's forward, summed over them."""
        return sum(max(self.attention_plan(m, rank=0, num_heads=1).sent_rows) for m in range(len(self.microbatches)))

    @cached_property
    def static_sent_rows(self) -> int:
        """The same of the static layout, where the ring and the layout of each group are chosen by `titan_cp.plan`."""
        total, groups = 0, len(self.microbatches)
        for m in range(groups):
            busiest = 0
            for d in range(self.dp):
                first = (d * groups + m) * self.microbatch
                rows = self.rows[first : first + self.microbatch]
                joined = [0, *(n * self.seq_len + end for n, row in enumerate(rows) for end in row[1:])]
                made = plan(
                    cu_seqlens=joined, size=self.cp, rank=0, num_heads=1, method="ring", causal=self.causal, pad=True
                )
                busiest = max(busiest, *made.sent_rows)
            total += busiest
        return total

    def explain(self) -> str:
        """Degrees, predicted makespans and what travels, against the static layout; print it."""
        documents, longest = sum(self.degrees.values()), max(int(np.diff(row).max()) for row in self.rows)
        steps = len(self.microbatches)
        by_degree = ", ".join(f"{count:,} on {degree}" for degree, count in sorted(self.degrees.items()))
        each = f"{steps} micro-batch{'es' * (steps > 1)} of {self.local_len} tokens each"
        static = f"{count_text(self.static_makespan)} pairs, {self.static_makespan / self.bound:.3f} of the bound"
        sent = f"{self.sent_rows} rows of keys from the busiest rank in a forward"
        lines = [
            f"step        {len(self.rows)} rows of {self.seq_len} tokens, {documents:,} documents, longest {longest}",
            f"ranks       {self.size} (dp {self.dp} × cp {self.cp}), {each}",
            f"degrees     documents on ranks: {by_degree}",
            f"makespan    {count_text(self.makespan)} pairs, {self.makespan / self.bound:.3f} of the bound",
            f"static      {static}: {self.speedup:.2f} × as long",
            f"sent        {sent}, {self.static_sent_rows} in the static layout",
            f"            (a pair is a query with a key; a token's other layers count as {self.token_pairs:g} of them)",
        ]
        return "\n".join(lines)

    @property
    def _rest(self) -> float:
        return self.token_pairs * self.local_len * len(self.microbatches)


def _pairs_of(cu_seqlens: Sequence[int], causal: bool) -> float:
    lengths = np.diff(np.asarray(cu_seqlens, dtype=np.int64))
    return float(piece_pairs(np.zeros_like(lengths), lengths, lengths, causal=causal, window=None).sum())
