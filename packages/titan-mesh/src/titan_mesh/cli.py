"""``python -m titan_mesh explain "pp3 dp4 tp8" --gpus-per-node 8``: a layout's table, or its drawing."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan_mesh.layout.layout import Layout
from titan_mesh.layout.spec import DEFAULT_ORDER, MeshSpec, megatron, megatron_experts
from titan_mesh.layout.svg import draw_svg
from titan_mesh.layout.topology import Topology


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 2 where the input is at fault, with its error on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        layout = _layout(arguments)
        text = layout.explain(arguments.rank)
        svg = draw_svg(layout, rank=arguments.rank or 0) if arguments.svg else None
    except ValueError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    print(text)
    for issue in layout.validate():
        print(issue)
    if svg is not None:
        arguments.svg.write_text(svg, encoding="utf-8")
        print(f"drawn: {arguments.svg}")
    return 0


def _layout(arguments: argparse.Namespace) -> Layout:
    spec = MeshSpec.parse(arguments.spec)
    if arguments.order is not None:
        spec = replace(spec, order=arguments.order)
    if arguments.megatron_order is not None:
        order = arguments.megatron_order
        spec = replace(spec, order=megatron(order), expert_order=megatron_experts(order))
    topology = Topology(gpus_per_node=arguments.gpus_per_node, nvlink_domain=arguments.nvlink_domain)
    return Layout(spec, world_size=arguments.world_size, topology=topology)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m titan_mesh", description="Parallel degrees to rank groups.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="print the table of axes and groups; draw the grid")
    explain.add_argument("spec", help="degrees, such as 'pp3 dp4 tp8' or 'dp-1 tp8' with --world-size")
    explain.add_argument("--world-size", type=int, help="number of ranks (default: the product of the degrees)")
    explain.add_argument("--gpus-per-node", type=int, default=8, help="ranks on one machine (default: 8)")
    explain.add_argument("--nvlink-domain", type=int, help="ranks joined by NVLink (default: one machine)")
    order = explain.add_mutually_exclusive_group()
    order.add_argument("--order", help=f"axes, outer to inner (default: {DEFAULT_ORDER})")
    order.add_argument("--megatron-order", help="Megatron's order string, inner to outer, such as tp-cp-ep-dp-pp")
    explain.add_argument("--rank", type=int, help="explain this rank: its place, and the ranks it meets")
    explain.add_argument("--svg", type=Path, help="also draw nodes and GPUs, coloured by group, into this file")
    return parser
