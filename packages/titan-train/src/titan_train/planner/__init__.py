"""Foresight: estimate, plan and explain a run before any device is rented. Pure Python and numpy; no torch, no ranks.

- `hardware/` machines as TOML files, and their reader
- `shapes.py` the shapes of models by name; `titan_train.models.shape` is their vocabulary
- `setup.py` one way to run: degrees, schedule, batch, recomputation, precision, software stack
- `cost/` seconds of compute by operator, and the step by term
- `comm/` seconds of collectives; counts and bytes by axis
- `memory/` bytes by use at the fullest instant
- `estimate.py` all of it for one setup
- `search/` enumerate setups, rank them, say why; refuse what cannot fit
- `calibrate/` few constants fitted to measured rows; the spread of what was not fitted
- `view/` tables, SVG, the static page
- `data/` the published measurements that the constants were fitted and scored on
"""

from titan_train.models.shape import ModelShape
from titan_train.planner.estimate import StepEstimate, estimate
from titan_train.planner.hardware.machine import Machine, list_machines, load_machine
from titan_train.planner.setup import Setup
from titan_train.planner.shapes import find_shape

__all__ = [
    "Machine",
    "ModelShape",
    "Setup",
    "StepEstimate",
    "estimate",
    "find_shape",
    "list_machines",
    "load_machine",
]
