"""Foresight: estimate, plan and explain a run before any device is rented. Pure Python and numpy; no ranks, and
torch only where a real model is counted (`memory.ranks`, `memory.folder`).

- `hardware/` machines as TOML files, and their reader
- `shapes.py` the shapes of models by name; `titan_train.models.shape` is their vocabulary
- `setup.py` one way to run: degrees, schedule, batch, recomputation, precision, software stack
- `cost/` seconds by operator and collective, the step by term; counts and bytes of transfers by axis
- `memory/` the account of bytes, by use at the fullest instant
- `estimate.py` all of it for one setup
- `search/` enumerate setups, rank them, say why; refuse what cannot fit
- `calibrate/` few constants fitted to measured rows; the spread of what was not fitted
- `view/` tables, SVG, the page with sliders
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
