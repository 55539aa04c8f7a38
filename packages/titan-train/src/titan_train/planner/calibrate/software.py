"""How fast a software stack runs what the cost model describes: one factor for dense models, one for routed ones.

The same layout runs 26 % faster half a year later from software alone, and a page that prints a layout prints few of the
settings behind it. So nothing is fitted for a stack, a release, a precision, a machine or a model: such sets fit the rows
that they saw and nothing else. A factor is the mean logarithm of measured over estimated speed, pulled to 1 by a prior that
weighs as much as `_PRIOR_ROWS` rows. Its error has a standard deviation for each kind, which grows where the machine has no
row, and where a setting is not known: the estimate is then the mean over what it can be.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from titan_train.planner.calibrate.rows import MeasuredRow

_PRIOR_ROWS = 20.0
"""Rows that the prior weighs: a factor of 1, with a deviation of 0.03."""
_SPREAD = {False: 0.11, True: 0.17}
"""Standard deviation of the logarithm of measured over estimated: dense, routed."""
_NEW_MACHINE = 0.10
"""The same for a machine without a row."""

Estimate = Callable[[MeasuredRow], float]


LEFT_OUT: dict[str, Callable[[MeasuredRow], Hashable]] = {
    "model": lambda row: row.shape.name,
    "release": lambda row: (row.collection, row.release),
    "stack": lambda row: "bridge" if row.collection == "skills" else row.collection,  # pages of one repository
}
"""What rows have in common that `leave_out` hides together."""


@dataclass(frozen=True)
class SoftwareModel:
    """The two factors, and the machines that they were seen on."""

    speed: dict[bool, float]
    """Measured over estimated speed, by whether the model is routed."""
    machines: frozenset[tuple[bool, str]]

    @classmethod
    def fit(cls, rows: Sequence[MeasuredRow], estimate: Estimate) -> "SoftwareModel":
        """The factors of ``rows``; ``estimate`` gives tokens per second without one."""
        speed: dict[bool, float] = {}
        for routed in (False, True):
            errors = [math.log(r.tokens_per_s) - blurred(r, estimate)[0] for r in rows if r.shape.moe is routed]
            speed[routed] = math.exp(sum(errors) / (len(errors) + _PRIOR_ROWS))
        return cls(speed, frozenset((r.shape.moe, r.machine.name) for r in rows))

    def factor(self, machine: str, *, routed: bool, unknown: float = 0.0) -> tuple[float, float]:
        """Measured over estimated speed, and the standard deviation of its logarithm.

        Args:
            machine: The machine's name.
            routed: Whether the model has routed experts.
            unknown: Standard deviation of the estimate over what unknown settings can be.
        """
        new = 0.0 if (routed, machine) in self.machines else _NEW_MACHINE
        return self.speed[routed], math.hypot(_SPREAD[routed], new, unknown)

    def predict(self, row: MeasuredRow, estimate: Estimate) -> tuple[float, float]:
        """Tokens per second of a row, and the standard deviation of the logarithm."""
        log_speed, unknown = blurred(row, estimate)
        speed, spread = self.factor(row.machine.name, routed=row.shape.moe, unknown=unknown)
        return speed * math.exp(log_speed), spread


def blurred(row: MeasuredRow, estimate: Estimate) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm of the estimated speed over what the row's unknown settings can be."""
    logs = [math.log(estimate(replace(row, setup=setup))) for setup in row.alternatives or (row.setup,)]
    return statistics.fmean(logs), statistics.pstdev(logs)


def leave_out(
    rows: Sequence[MeasuredRow], estimate: Estimate, key: Callable[[MeasuredRow], Hashable]
) -> list[tuple[float, float]]:
    """Tokens per second and spread of each row, by factors that saw no row of the same ``key``: a model, a release, a stack."""
    fits = {
        left: SoftwareModel.fit([row for row in rows if key(row) != left], estimate)
        for left in {key(row) for row in rows}
    }
    return [fits[key(row)].predict(row, estimate) for row in rows]
