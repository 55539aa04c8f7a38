"""How fast a software stack runs a layout: one factor per (stack, precision, machine), with its uncertainty.

The same layout runs 26 % faster half a year later from software alone, so every stack has a factor, measured over
estimated speed, fitted on at most two rows per (stack, precision, machine). A set with few rows leans on the sets that
resemble it: the logarithms of the factors are jointly normal, with a variance for what all dense (or all routed) models
share, for a stack, for a set, and for a single layout (`_SPREAD`). Routed models have two more, because their kernels are
younger: one for a model within a stack, and a random walk over the stack's releases, so that releases a month apart share
more than releases a year apart. The prediction for a new layout is the conditional mean; its standard deviation gives the
interval. A release of its own variance does not help: one is faster for some models and slower for others.

The marginal likelihood of the shipped rows is flat around these variances.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from titan_train.planner.calibrate.rows import MeasuredRow

_SPREAD = {"kind": 0.25, "stack": 0.20, "set": 0.05, "model": 0.15, "year": 0.15, "dense": 0.09, "routed": 0.18}
_CALIBRATED = 0.7
"""Standard deviation that covers as often as it says, over the one of the variances above."""
_ROWS_PER_SET = 2
_FIRST_RELEASE = 24.0
"""Year at which the walk over releases starts."""


@dataclass(frozen=True, slots=True)
class SoftwareKey:
    """What a factor depends on."""

    stack: str
    precision: str
    machine: str
    routed: bool
    model: str = ""
    """Name of a model whose own rows count; empty for none."""
    release: str = ""
    """Year and month, such as "26.04.01"; empty takes none of the releases' differences."""

    @property
    def years(self) -> float:
        """Years from the first release to this one; 0 where it is not known."""
        parts = self.release.split(".")
        if len(parts) < 2 or not all(part.isdigit() for part in parts):
            return 0.0
        point = 0.5 if len(parts) > 2 else 0.0  # a release between two months
        return max(0.0, int(parts[0]) - _FIRST_RELEASE + (int(parts[1]) + point) / 12)


def key_of(row: MeasuredRow) -> SoftwareKey:
    """The key of a measured row. Fine-tuning with adapters is its own code path in torch-native stacks."""
    stack = "bridge" if row.collection in ("bridge", "skills") else row.collection
    if row.collection == "automodel" and row.setup.task == "lora":
        stack += "-lora"
    return SoftwareKey(stack, row.setup.precision, row.machine.name, row.shape.moe, row.shape.name, row.release)


def choose_rows(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """At most two rows per (stack, precision, machine): the newest routed and dense ones, else the newest and the oldest."""
    sets: dict[tuple[str, str, str], list[MeasuredRow]] = {}
    for row in rows:
        sets.setdefault(row.set_key, []).append(row)
    chosen: list[MeasuredRow] = []
    for members in sets.values():
        newest = sorted(members, key=lambda row: row.release or "99", reverse=True)
        picks = [next((r for r in newest if r.shape.moe is routed), None) for routed in (True, False)]
        kept = [row for row in picks if row is not None]
        for row in reversed(newest):
            if len(kept) < _ROWS_PER_SET and all(row.layout != other.layout for other in kept):
                kept.append(row)
        chosen += kept[:_ROWS_PER_SET]
    return chosen


def _covariance(a: SoftwareKey, b: SoftwareKey) -> float:
    if a.routed is not b.routed:
        return 0.0
    total = _SPREAD["kind"] ** 2
    if a.stack == b.stack:
        total += _SPREAD["stack"] ** 2
        if (a.precision, a.machine) == (b.precision, b.machine):
            total += _SPREAD["set"] ** 2
        if a.routed:
            total += _SPREAD["model"] ** 2 if a.model == b.model else 0.0
            total += _SPREAD["year"] ** 2 * min(a.years, b.years)
    return total


def _single(key: SoftwareKey) -> float:
    return _SPREAD["routed" if key.routed else "dense"] ** 2


@dataclass(frozen=True)
class SoftwareModel:
    """Factors conditioned on measured rows."""

    keys: tuple[SoftwareKey, ...]
    residuals: np.ndarray
    """Logarithm of measured over estimated speed."""

    @classmethod
    def fit(cls, rows: Sequence[MeasuredRow], estimate: Callable[[MeasuredRow], float]) -> "SoftwareModel":
        """Condition on ``rows``; ``estimate`` gives tokens per second without a factor."""
        return cls(tuple(map(key_of, rows)), np.log([row.tokens_per_s / estimate(row) for row in rows]))

    @property
    def newest(self) -> str:
        """The newest release among the rows."""
        return max((key for key in self.keys), key=lambda key: key.years).release

    def factor(self, key: SoftwareKey) -> tuple[float, float]:
        """Measured over estimated speed, and the standard deviation of its logarithm."""
        own = _covariance(key, key) + _single(key)
        if not self.keys:
            return 1.0, math.sqrt(own)
        among = np.array([[_covariance(a, b) for b in self.keys] for a in self.keys])
        among += np.diag([_single(k) for k in self.keys])
        to = np.array([_covariance(key, k) for k in self.keys])
        weights = np.linalg.solve(among, to)
        variance = max(_single(key), own - float(to @ weights))
        # a log-normal's mean lies above its median: predicted speeds are right on average, not half of the time
        return math.exp(float(weights @ self.residuals) - variance / 2), _CALIBRATED * math.sqrt(variance)


def leave_layout_out(
    rows: Sequence[MeasuredRow], estimate: Callable[[MeasuredRow], float]
) -> list[tuple[float, float]]:
    """Tokens per second and spread of each row, predicted by a fit that saw no row of the same layout."""
    found: list[tuple[float, float]] = []
    for row in rows:
        model = SoftwareModel.fit(choose_rows([other for other in rows if other.layout != row.layout]), estimate)
        factor, spread = model.factor(key_of(row))
        found.append((estimate(row) * factor, spread))
    return found
