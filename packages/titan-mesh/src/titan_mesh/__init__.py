"""Parallel degrees to named DeviceMesh axes and rank groups, with an explanation.

The core is plain Python: `MeshSpec` (how many ranks each parallelism gets), `Layout` (which rank sits where, which
ranks form a group, and why) and `Topology` (nodes, NVLink domains). Importing this package does not import torch;
only `build`, which turns a layout into process groups and `torch.distributed.DeviceMesh` objects, does.
"""

from typing import TYPE_CHECKING, Any

from titan_mesh._build import build
from titan_mesh._diff import LayoutDiff
from titan_mesh._explain import AxisRow
from titan_mesh._grid import Grid
from titan_mesh._layout import Layout
from titan_mesh._spec import DEFAULT_ORDER, MeshSpec, megatron
from titan_mesh._svg import draw_svg
from titan_mesh._topology import Topology
from titan_mesh._validate import Issue

if TYPE_CHECKING:
    from titan_mesh._mesh import Mesh

__all__ = [
    "DEFAULT_ORDER",
    "AxisRow",
    "Grid",
    "Issue",
    "Layout",
    "LayoutDiff",
    "Mesh",
    "MeshSpec",
    "Topology",
    "build",
    "draw_svg",
    "megatron",
]


def __getattr__(name: str) -> Any:
    if name == "Mesh":  # the only public name that needs torch
        from titan_mesh._mesh import Mesh

        return Mesh
    raise AttributeError(f"module 'titan_mesh' has no attribute {name!r}")
