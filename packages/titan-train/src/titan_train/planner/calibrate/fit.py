"""Fit a few constants to a few measured steps.

Least squares on the logarithms of predicted over measured tokens per second, with a pull towards the prior: a constant
that the rows do not identify stays where it was. A handful of Gauss-Newton steps with numeric derivatives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_train.models.shape import ModelShape
from titan_train.planner.cost.constants import Constants
from titan_train.planner.estimate import estimate
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.setup import Setup


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measured step."""

    source: str
    """Where it was measured: a run's folder, or a page."""
    shape: ModelShape
    machine: Machine
    setup: Setup
    tokens_per_s: float
    """Per device."""


Predict = Callable[[MeasuredRow, Constants], float]


def predicted(row: MeasuredRow, constants: Constants) -> float:
    """Tokens per second per device."""
    return estimate(row.shape, row.machine, row.setup, constants).tokens_per_s


def fit_constants(
    rows: Sequence[MeasuredRow],
    names: Sequence[str],
    start: Constants,
    *,
    pull: float = 0.1,
    spread: float = 0.3,
    source: str = "fitted",
    predict: Predict = predicted,
) -> Constants:
    """Constants that reproduce ``rows``, changed in ``names`` only.

    Args:
        rows: Measured steps; as many as constants, or fewer if the prior is to decide the rest.
        names: Fields of `Constants` to change.
        start: The prior.
        pull: Expected relative error of a measured row beside a right model; smaller trusts the rows more.
        spread: Expected relative error of the prior.
        source: Recorded in the result.
        predict: Replaces the planner's own prediction, for tests.

    Raises:
        ValueError: No rows, or an unknown constant.
    """
    if not rows:
        raise ValueError("fit_constants needs at least one measured row.")
    for name in names:
        if not isinstance(getattr(start, name, None), float) or getattr(start, name) <= 0:
            raise ValueError(f"{name!r} is not a positive constant that can be fitted.")
    base = np.log([getattr(start, name) for name in names])
    shift = np.zeros(len(names))

    def at(x: np.ndarray) -> Constants:
        values = np.exp(base + x)
        return replace(start, source=source, **dict(zip(names, map(float, values), strict=True)))

    def errors(x: np.ndarray) -> np.ndarray:
        c = at(x)
        return np.log([predict(r, c) / r.tokens_per_s for r in rows])

    for _ in range(12):
        e = errors(shift)
        slope = np.stack([(errors(shift + 1e-4 * unit) - e) / 1e-4 for unit in np.eye(len(names))], axis=1)
        left = slope.T @ slope / pull**2 + np.eye(len(names)) / spread**2
        step = np.linalg.solve(left, -slope.T @ e / pull**2 - shift / spread**2)
        shift = np.clip(shift + np.clip(step, -0.7, 0.7), -2.5, 2.5)
        if np.abs(step).max() < 1e-5:
            break
    return at(shift)
