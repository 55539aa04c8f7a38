"""A configuration or a run as the planner sees it: its shape, its setup, and the documents of its first steps.

The documents, of the prepared corpus, tell how much attention they ask for, and how evenly.

Rows hold whole documents or parts of them, and attention stays inside each. So it does less than a row of one document would;
and ranks wait, in every micro-batch, for those whose rows hold the longest document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from titan_train.config import Config
from titan_train.models.shape import ModelShape
from titan_train.observe import read_run_info
from titan_train.planner.setup import Setup
from titan_train.planner.shapes import shape_of_config, vocabulary_of
from titan_train.planner.translate import setup_of_config
from titan_train.run_folder import read_config

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


def described(config: Config, ranks: int) -> tuple[ModelShape, Setup, DocumentWork | None]:
    """The shape and the setup of a configuration, and the work of its documents where they are prepared, which the setup counts.

    The vocabulary is the tokenizer's where it is known. A folder's shape is that of its ``config.json``: what its own module
    keeps is added by `titan_train.planner.memory.folder.of_folder`, which takes torch.

    Raises:
        ValueError: The planner does not know the model, or so many ranks cannot share its layout.
    """
    shape, setup = shape_of_config(config, vocab_size=vocabulary_of(config)), setup_of_config(config, ranks)
    if work := document_work(config, setup):
        setup = setup.changed(attention_share=work.attention_share(dynamic=config.context.dynamic))
    return shape, setup, work


def described_run(folder: Path, ranks: int = 0) -> tuple[ModelShape, Setup]:
    """The shape and the setup of a run, as `described`, with as many parameters as it had.

    Args:
        folder: The run's folder.
        ranks: Number of ranks where run.json does not state it.

    Raises:
        ValueError: The folder holds no configuration, or the planner does not know its model or its layout.
    """
    config, info = read_config(folder), read_run_info(folder)
    stated, parameters = info.get("world_size"), info.get("parameters")
    ranks = stated if isinstance(stated, int) and stated > 0 else ranks
    if ranks < 1:
        raise ValueError(f"{folder} does not say on how many ranks it ran: run.json has no world_size.")
    shape, setup, _ = described(config, ranks)
    return with_parameters(shape, parameters if isinstance(parameters, int) else 0), setup


def with_parameters(shape: ModelShape, parameters: int) -> ModelShape:
    """The shape with the vocabulary that gives ``parameters``: a run's tokenizer sets it. 0 keeps the shape."""
    if not parameters or parameters == shape.parameters():
        return shape
    rest = replace(shape, vocab=0).parameters()
    return replace(shape, vocab=(parameters - rest) // (shape.dim * (1 if shape.tied else 2)))


def document_work(config: Config, setup: Setup) -> DocumentWork | None:
    """Of the first steps of a run; None where its documents are not known yet, or attention does not keep them apart."""
    from titan_train.inputs import prepared_rows

    batch = _rows_of_step(setup)
    rows = prepared_rows(config, batch * max(1, min(_STEPS, config.train.steps, _ROWS // batch)))
    return None if rows is None else DocumentWork.of(rows, setup)


def _rows_of_step(setup: Setup) -> int:
    return setup.dp * setup.microbatches * setup.microbatch
