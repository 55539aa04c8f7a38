"""The constants that `estimate` and `plan` use. The published rows that they were fitted to, and the fit itself, are beside the
benchmark `planner_accuracy.py`.

- torch stacks (eager, compile): four rows of torchtitan's table;
- other stacks: their priors, and nothing fitted. The same layout runs 26 % faster half a year later from software alone, and a
  page that prints a layout prints few of the settings behind it: sets for a stack, a release or a model fitted the rows that they
  saw and nothing else. So did one factor for dense and one for routed models: 8.9 % off where the stack was new, none 7.3 %.
"""

import math
from dataclasses import replace

from titan_train.planner.cost.constants import Constants, prior
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.setup import Setup

_COMPILED = replace(
    prior("compile"),
    matmul=0.6643224987151417,
    matmul8=0.5813947941205626,
    attention=0.3307542080557398,
    source="fitted to rows 0, 1, 2, 4 of published_throughput.csv",
)
TORCH = {
    "compile": _COMPILED,
    "eager": replace(_COMPILED, kernels=prior("eager").kernels, pointwise=3.6735854056470316),
}
"""Of the torch stacks: one fit, whose pointwise factor applies to eager runs alone. A test repeats it."""
MACHINES = frozenset(
    {(routed, name) for routed in (False, True) for name in ("h100", "b200", "gb200", "gb300")} | {(True, "b300")}
)
"""Machines that have published rows of other stacks, with whether the rows' models are routed."""
_DENSE_SPREAD = 0.09
_ROUTED_SPREAD = 0.25
_OTHER_SPREAD = {False: 0.11, True: 0.17}
"""Other stacks: standard deviation of the logarithm of measured over estimated speed; dense, routed."""
_NEW_MACHINE = 0.10
"""The same for a machine without a row."""


def other_spread(machine: str, *, routed: bool, measured: frozenset[tuple[bool, str]] = MACHINES) -> float:
    """Standard deviation of the logarithm of measured over estimated speed, of other stacks than torch's.

    Args:
        machine: The machine's name.
        routed: Whether the model has routed experts.
        measured: Machines that have rows.
    """
    return math.hypot(_OTHER_SPREAD[routed], 0.0 if (routed, machine) in measured else _NEW_MACHINE)


def constants_for(machine: Machine, setup: Setup, *, routed: bool) -> Constants:
    """Constants for a run on a machine, with the spread of their error."""
    if (fitted := TORCH.get(setup.stack)) is not None:
        known = machine.name in ("h100_500w", "h100", "h200")
        spread = _ROUTED_SPREAD if routed else _DENSE_SPREAD if known else 0.16
        return replace(fitted, spread=spread)
    return replace(
        prior(setup.stack), spread=other_spread(machine.name, routed=routed), source=f"prior of {setup.stack}"
    )
