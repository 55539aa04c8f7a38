"""Where the time of a step goes, on every rank and every mesh axis.

`clock` divides a rank's time over phases, without overlap. `collectives` takes the time in which a rank waits for others
out of them, by mesh axis; `device` does both by events on a GPU's streams. `split` puts the ranks' figures together; `causes`
names what holds the run up; `traces` reads the ranks' traces, `clocks` puts them on one clock. Only
`collectives`, `device` and `clocks` import torch.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.observe.timing.causes import Cause, find_causes
    from titan_train.observe.timing.clock import PHASES, AxisTotals, StepTimer, Window
    from titan_train.observe.timing.split import AxisSplit, Place, Spread, StepSplit, combine, split_line

__all__ = [
    "PHASES",
    "AxisSplit",
    "AxisTotals",
    "Cause",
    "Place",
    "Spread",
    "StepSplit",
    "StepTimer",
    "Window",
    "combine",
    "find_causes",
    "split_line",
]

__getattr__ = first_use(__name__)
