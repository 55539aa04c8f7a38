"""The documents of a run's first steps, from the prepared corpus: how much attention they ask for, and how evenly.

Rows hold whole documents or parts of them, and attention stays inside each. So it does less than a row of one document would;
and ranks wait, in every micro-batch, for those whose rows hold the longest document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from titan_train.config import Config
from titan_train.planner.setup import Setup

_ROWS = 2048
"""Of which the documents are read, at least one step."""
_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentWork:
    """Attention of the documents of some steps; counted in query-key pairs of a causal layer without a window."""

    rows: int
    count: int
    longest: int
    """Tokens."""
    share: float
    """Pairs of all documents over those of rows of one document each."""
    static: float
    """The busiest group's pairs in each micro-batch over the mean: how long ranks take that wait for each other."""
    dynamic: float | None
    """The same with ``context.dynamic``, of the busiest rank; None where ranks cannot share documents."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], setup: Setup) -> Self:
        """Of the documents' lengths in each row of some steps, as ``setup`` deals the rows out."""
        pairs = np.array([sum(float(n) * n for n in row) for row in rows])
        steps = pairs.reshape(-1, setup.dp, setup.microbatches, setup.microbatch).sum(axis=3)
        dynamic = None
        if setup.cp > 1 and setup.microbatch * setup.seq_len % setup.cp == 0:
            from titan_cp import plan_step

            batch = _rows_of_step(setup)
            plans = [
                plan_step(rows[first : first + batch], dp=setup.dp, cp=setup.cp, microbatch=setup.microbatch)
                for first in range(0, len(rows), batch)
            ]
            dynamic = sum(plan.makespan for plan in plans) / sum(plan.bound for plan in plans)
        return cls(
            rows=len(rows),
            count=sum(map(len, rows)),
            longest=max(map(max, rows)),
            share=float(pairs.sum()) / (len(rows) * float(setup.seq_len) ** 2),
            static=float(steps.max(axis=1).sum() * setup.dp / steps.sum()),
            dynamic=dynamic,
        )

    def attention_share(self, *, dynamic: bool) -> float:
        """What the busiest ranks compute over what they would of rows of one document, as `Setup.attention_share`."""
        return self.share * (self.dynamic if dynamic and self.dynamic is not None else self.static)

    def describe(self) -> str:
        """Two lines or three, to stand behind the word *documents*."""
        whole = f"{self.share:.0%} of the attention of rows of one document"
        lines = [
            f"{self.count:,} in {self.rows:,} rows, the longest of {self.longest:,} tokens: {whole}",
            f"the busiest ranks compute {self.static:.2f} times the mean of it, and the others wait",
        ]
        if self.dynamic is not None:
            lines.append(f"with context.dynamic = true: {self.dynamic:.2f} times")
        return "\n".join(lines)


def document_work(config: Config, setup: Setup) -> DocumentWork | None:
    """Of the first steps of a run; None where its documents are not known yet, or attention does not keep them apart."""
    from titan_train.inputs import prepared_rows

    batch = _rows_of_step(setup)
    rows = prepared_rows(config, batch * max(1, min(_STEPS, config.train.steps, _ROWS // batch)))
    return None if rows is None else DocumentWork.of(rows, setup)


def _rows_of_step(setup: Setup) -> int:
    return setup.dp * setup.microbatches * setup.microbatch
