"""The constants that `estimate` and `plan` use: fitted to the published tables, with the rows they were fitted on.

- torch stacks (eager, compile): four rows of torchtitan's table;
- other stacks: their priors, and nothing fitted. The same layout runs 26 % faster half a year later from software alone, and a
  page that prints a layout prints few of the settings behind it: sets for a stack, a release or a model fitted the rows that they
  saw and nothing else. So did one factor for dense and one for routed models: 8.9 % off where the stack was new, none 7.3 %.
"""

import math
import statistics
from dataclasses import dataclass, replace
from functools import cache

from titan_train.planner.calibrate.fit import fit_constants
from titan_train.planner.calibrate.rows import MeasuredRow, load_rows
from titan_train.planner.cost.constants import Constants, prior
from titan_train.planner.estimate import estimate
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.setup import Setup

TORCH_FIT_ROWS = (0, 1, 2, 4)
"""Rows of published_throughput.csv: 8B over 8 GPUs in bf16, float8 and at 32k tokens; 128 GPUs without compile."""
TORCH_CONSTANTS = ("matmul", "matmul8", "attention", "pointwise")
SIMUMAX_FIT_ROWS = (98, 100, 101, 102, 105, 108)
SIMUMAX_CONSTANTS = ("matmul", "attention", "local", "expert_scale", "exchange", "pointwise")
_DENSE_SPREAD = 0.09
_ROUTED_SPREAD = 0.25
_OTHER_SPREAD = {False: 0.11, True: 0.17}
"""Other stacks: standard deviation of the logarithm of measured over estimated speed; dense, routed."""
_NEW_MACHINE = 0.10
"""The same for a machine without a row."""


@dataclass(frozen=True, slots=True)
class TorchSet:
    """Constants of the torch stacks: one fit, whose eager factor applies to eager runs alone."""

    compiled: Constants
    eager: Constants

    def of(self, setup: Setup) -> Constants:
        """The constants of a run."""
        return self.eager if setup.stack == "eager" else self.compiled


def fit_torch(rows: list[MeasuredRow], spread: float = _DENSE_SPREAD) -> TorchSet:
    """Fit the torch set to ``rows``."""

    def split(c: Constants) -> TorchSet:
        return TorchSet(replace(c, pointwise=1.0), replace(c, kernels=prior("eager").kernels))

    def predict(row: MeasuredRow, c: Constants) -> float:
        return estimate(row.shape, row.machine, row.setup, split(c).of(row.setup)).tokens_per_s

    start = replace(prior("compile"), pointwise=prior("eager").pointwise, spread=spread)
    source = f"fitted to rows {', '.join(str(r.number) for r in rows)} of published_throughput.csv"
    return split(fit_constants(rows, TORCH_CONSTANTS, start, pull=0.005, source=source, predict=predict))


@cache
def torch_set() -> TorchSet:
    """The shipped fit."""
    return fit_torch([row for row in load_rows("published_throughput.csv") if row.number in TORCH_FIT_ROWS])


@cache
def simumax_set() -> Constants:
    """Six constants on six of SimuMax's rows, whose collectives do not overlap."""
    rows = [row for row in load_rows("measured_rows.csv") if row.number in SIMUMAX_FIT_ROWS]
    return fit_constants(rows, SIMUMAX_CONSTANTS, prior("te"), pull=0.02)


def by_prior(row: MeasuredRow) -> float:
    """Tokens per second of a row by its stack's prior."""
    return estimate(row.shape, row.machine, row.setup, prior(row.setup.stack)).tokens_per_s


def measured_machines(rows: list[MeasuredRow]) -> frozenset[tuple[bool, str]]:
    """Machines that have rows, with whether the rows' models are routed."""
    return frozenset((row.shape.moe, row.machine.name) for row in rows)


@cache
def _shipped_machines() -> frozenset[tuple[bool, str]]:
    return measured_machines([row for row in load_rows("measured_rows.csv") if row.collection != "simumax"])


def other_spread(machine: str, *, routed: bool, measured: frozenset[tuple[bool, str]] | None = None) -> float:
    """Standard deviation of the logarithm of measured over estimated speed, of other stacks than torch's.

    Args:
        machine: The machine's name.
        routed: Whether the model has routed experts.
        measured: Machines that have rows; those of the shipped tables if left out.
    """
    new = (routed, machine) not in (_shipped_machines() if measured is None else measured)
    return math.hypot(_OTHER_SPREAD[routed], _NEW_MACHINE if new else 0.0)


def predict_other(row: MeasuredRow, measured: frozenset[tuple[bool, str]] | None = None) -> tuple[float, float]:
    """Tokens per second of a row of another stack, and the deviation of the logarithm. Where settings are not known it is the
    mean over what they can be, and the deviation grows by theirs.
    """
    logs = [math.log(by_prior(replace(row, setup=setup))) for setup in row.alternatives or (row.setup,)]
    spread = other_spread(row.machine.name, routed=row.shape.moe, measured=measured)
    return math.exp(statistics.fmean(logs)), math.hypot(spread, statistics.pstdev(logs))


def constants_for(machine: Machine, setup: Setup, *, routed: bool) -> Constants:
    """Constants for a run on a machine, with the spread of their error."""
    if setup.stack in ("eager", "compile"):
        known = machine.name in ("h100_500w", "h100", "h200")
        spread = _ROUTED_SPREAD if routed else _DENSE_SPREAD if known else 0.16
        return replace(torch_set().of(setup), spread=spread)
    return replace(
        prior(setup.stack), spread=other_spread(machine.name, routed=routed), source=f"prior of {setup.stack}"
    )
