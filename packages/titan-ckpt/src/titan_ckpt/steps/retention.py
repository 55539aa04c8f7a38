"""Which steps to keep."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for the steps to keep after each commit. A step is kept if any rule keeps it.

    Without a rule, every step is kept. The newest step is always kept. "Newest" refers to the order of the commits: after a
    return from step 200 to 50, a new step 60 is newer than 200. Only valid steps are counted and deleted.
    """

    last: int | None = None
    """Keep this many of the newest steps. With 1, the old step is deleted after the new one is committed."""
    every: int | None = None
    """Keep steps divisible by this number."""
    best: str | None = None
    """Keep the best step by this metric, among those saved with it (``save(..., metrics={...})``)."""
    best_is: str = "min"
    """Whether the lowest ("min") or the highest ("max") metric is best."""

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise ValueError(f"keep_{name}={value!r} is not a whole number. Give a number of steps, or None.")
            if value is not None and value < 1:
                raise ValueError(
                    f"keep_{name}={value} would keep nothing. Use 1 or more, or None to disable this rule."
                )
        if self.best_is not in ("min", "max"):
            raise ValueError(f"best_is={self.best_is!r} is neither 'min' nor 'max'.")

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self.last is None and self.every is None and self.best is None

    def surplus(
        self, steps: Mapping[int, Mapping[str, float]], is_valid: Callable[[int], bool] = lambda step: True
    ) -> list[int]:
        """The steps to delete.

        Args:
            steps: Every step with its metrics, in the order of the commits, oldest first.
            is_valid: Called only for the steps to delete and the steps that replace them.
        """
        left, asked = dict(steps), dict[int, bool]()
        while left and not self.keeps_all:
            ordered = list(left)
            decide = {*ordered[-(self.last or 1) :], *self._best(ordered, left)}
            drop = [step for step in ordered if step not in decide and not (self.every and step % self.every == 0)]
            if not drop:
                break
            asked |= {step: is_valid(step) for step in [*drop, *decide] if step not in asked}
            if all(asked[step] for step in [*drop, *decide]):
                return drop
            left = {step: metrics for step, metrics in left.items() if asked.get(step, True)}
        return []

    def _best(self, ordered: Sequence[int], steps: Mapping[int, Mapping[str, float]]) -> list[int]:
        name = self.best or ""
        rated = [(steps[step][name], step) for step in ordered if math.isfinite(steps[step].get(name, math.nan))]
        if not rated:
            return []
        pick = min(rated) if self.best_is == "min" else max(rated)
        return [pick[1]]
