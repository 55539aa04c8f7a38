"""Parallel degrees to named DeviceMesh axes and rank groups, with an explanation.

The core is plain Python: `MeshSpec` (how many ranks each parallelism gets), `Layout` (which rank sits where, which
ranks form a group, and why) and `Topology` (nodes, NVLink domains). Importing this package does not import torch;
only `build`, which turns a layout into process groups and `torch.distributed.DeviceMesh` objects, does.
"""

from typing import TYPE_CHECKING, Any

from titan_mesh.groups.build import build
from titan_mesh.layout.diff import LayoutDiff
from titan_mesh.layout.explain import AxisRow
from titan_mesh.layout.grid import Grid
from titan_mesh.layout.layout import Layout
from titan_mesh.layout.spec import DEFAULT_ORDER, MeshSpec, megatron, megatron_experts
from titan_mesh.layout.svg import draw_svg
from titan_mesh.layout.topology import Topology
from titan_mesh.layout.validate import Issue

if TYPE_CHECKING:
    from titan_mesh.groups.mesh import Mesh
    from titan_mesh.groups.torch_private import timeout_of

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
    "megatron_experts",
    "timeout_of",
]


def __getattr__(name: str) -> Any:
    if name == "Mesh":  # it and `timeout_of` need torch
        from titan_mesh.groups.mesh import Mesh

        return Mesh
    if name == "timeout_of":
        from titan_mesh.groups.torch_private import timeout_of

        return timeout_of
    raise AttributeError(f"module 'titan_mesh' has no attribute {name!r}")
