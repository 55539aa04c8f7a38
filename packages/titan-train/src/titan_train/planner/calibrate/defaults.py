"""The constants that `estimate` and `plan` use: fitted to the published tables, with the rows they were fitted on.

- torch stacks (eager, compile): four rows of torchtitan's table;
- other stacks: their priors, and one factor for dense and one for routed models over all published rows.
"""

from dataclasses import dataclass, replace
from functools import cache

from titan_train.planner.calibrate.fit import fit_constants
from titan_train.planner.calibrate.rows import MeasuredRow, load_rows
from titan_train.planner.calibrate.software import SoftwareModel
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


def without_factor(row: MeasuredRow) -> float:
    """Tokens per second of a row by its stack's prior."""
    return estimate(row.shape, row.machine, row.setup, prior(row.setup.stack)).tokens_per_s


@cache
def software_model() -> SoftwareModel:
    """The shipped factors of the other stacks."""
    rows = [row for row in load_rows("measured_rows.csv") if row.collection != "simumax"]
    return SoftwareModel.fit(rows, without_factor)


def constants_for(machine: Machine, setup: Setup, *, routed: bool) -> Constants:
    """Constants for a run on a machine, with the spread of their error."""
    if setup.stack in ("eager", "compile"):
        known = machine.name in ("h100_500w", "h100", "h200")
        spread = _ROUTED_SPREAD if routed else _DENSE_SPREAD if known else 0.16
        return replace(torch_set().of(setup), spread=spread)
    speed, spread = software_model().factor(machine.name, routed=routed)
    kind = "routed" if routed else "dense"
    return replace(
        prior(setup.stack),
        software=1 / speed,
        spread=spread,
        source=f"{setup.stack} prior x {1 / speed:.2f}, one factor for all {kind} models",
    )
