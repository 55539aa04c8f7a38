"""The batch size of a step, as a pure function of the sequences consumed before it.

Small batches early learn as much per token as large ones, and large ones later keep more devices busy (GPT-3, arXiv:2005.14165,
appendix B). Samples keep their order: a ramp only says how many of them the next step takes. As nothing but the count of
consumed samples decides that, a run that resumes, on any layout, takes the same steps.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BatchRamp:
    """Batch sizes that follow each other, each for the same number of tokens; the last one stays."""

    sizes: tuple[int, ...]
    """Sequences of a step, rising."""
    samples: float = 0.0
    """Sequences consumed when the last size begins; a step takes the size that its first sequence falls into."""

    def at(self, consumed: int) -> int:
        """Sequences of the step that begins after ``consumed`` of them."""
        if consumed >= self.samples:
            return self.sizes[-1]
        return self.sizes[int(consumed * (len(self.sizes) - 1) / self.samples)]

    def consumed_after(self, steps: int, start: int = 0) -> int:
        """Sequences consumed after ``steps`` further steps, where ``start`` were consumed before them."""
        if start:
            while steps and start < self.samples:
                start, steps = start + self.at(start), steps - 1
            return start + steps * self.sizes[-1]
        rising = self._rising
        if steps < len(rising):
            return rising[steps]
        return rising[-1] + (steps - len(rising) + 1) * self.sizes[-1]

    @cached_property
    def _rising(self) -> list[int]:
        """Sequences consumed before each step that is smaller than the last size, and before the first that is not."""
        consumed = [0]
        while consumed[-1] < self.samples:
            consumed.append(consumed[-1] + self.at(consumed[-1]))
        return consumed


def plan_ramp(global_batch: int, *, start: int, step: int, tokens: int, seq_len: int) -> BatchRamp:
    """The ramp that the settings ``train.global_batch`` and ``train.ramp_*`` mean.

    Args:
        global_batch: Sequences of a step at the end.
        start: Sequences of the first step; 0 is no ramp.
        step: What a rise adds; 0 doubles.
        tokens: Tokens until ``global_batch`` is reached.
        seq_len: Tokens of a sequence.

    Raises:
        ValueError: The sizes do not lead from ``start`` to ``global_batch``.
    """
    if not start:
        return BatchRamp((global_batch,))
    sizes = [start]
    while sizes[-1] < global_batch:
        sizes.append(sizes[-1] + step if step else sizes[-1] * 2)
    if sizes[-1] != global_batch or len(sizes) == 1:
        how = f"adding train.ramp_by={step}" if step else "doubling"
        raise ValueError(
            f"train.ramp_from={start} does not lead to train.global_batch={global_batch} by {how}: the sizes are "
            f"{', '.join(map(str, sizes[:8]))}. Set a ramp_from below global_batch and a ramp_by that divides their difference."
        )
    return BatchRamp(tuple(sizes), tokens / seq_len)
