"""How long does a mesh take to build, and how many process groups does it make?

Question: `titan_mesh.build` makes the groups of five axes and three flattens, and shares those with equal ranks.
Torch's `init_device_mesh` with the same axes, flattened the same way, makes one group for each. What do both cost? And
how long do laying out and explaining take at 16384 ranks?

Method: gloo ranks on this machine (``--ranks``). A repeat builds both, in alternating order, each between barriers, on
rank 0's clock, and counts the groups torch registers on rank 0. Medians. Explaining: best of five in one process.

Limits: gloo over loopback; connecting dominates, as it does with NCCL, but its price is another. Few cores run many
ranks: compare the two, do not read the milliseconds.

Example: ``python benchmarks/build_groups.py --ranks 8 --repeats 5``
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from typing import Any

import torch
import torch.distributed as dist
from titan_mesh import Layout, MeshSpec, build
from titan_testing import run_ranks
from torch.distributed.device_mesh import init_device_mesh

FLATTENS = {"dp": ("dp_replicate", "dp_shard"), "fsdp": ("dp_shard", "cp"), "loss": ("dp_replicate", "dp_shard", "cp")}


def main() -> None:
    """Run the benchmark; the last line printed is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--specs", nargs="+", default=["dp-1", "dp-1 tp2", "pp2 dp-1 tp2"])
    arguments = parser.parse_args()
    rows = [run_ranks(measure, arguments.ranks, text, arguments.repeats, timeout_s=300)[0] for text in arguments.specs]
    for row in rows:
        print(
            f"{row['spec']:<16} titan-mesh {row['titan_groups']:>2} groups {row['titan_ms']:7.1f} ms   "
            f"init_device_mesh {row['torch_groups']:>2} groups {row['torch_ms']:7.1f} ms"
        )
    explained_ms = explain_ms("pp8 dp_replicate2 dp32 cp4 tp8 ep16")
    print(f"layout and explain, 16384 ranks: {explained_ms:.0f} ms")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit, "device": "cpu"}
    config = {"ranks": arguments.ranks, "repeats": arguments.repeats, "backend": "gloo"}
    print(json.dumps({"build": rows, "explain_16384_ms": explained_ms, **about, **config}))


def measure(text: str, repeats: int) -> dict[str, Any]:
    """Median milliseconds and number of groups of both, on this rank."""
    layout = Layout(MeshSpec.parse(text), world_size=dist.get_world_size())
    times: dict[str, list[float]] = {"titan": [], "torch": []}
    groups: dict[str, int] = {}
    for repeat in range(repeats):
        for which in ("titan", "torch") if repeat % 2 == 0 else ("torch", "titan"):
            before = _registered()
            dist.barrier()
            start = time.perf_counter()
            made = build(layout) if which == "titan" else _with_torch(layout)
            dist.barrier()
            times[which].append(1000 * (time.perf_counter() - start))
            after = _registered()
            groups[which] = len(after - before)
            if not isinstance(made, list):
                made.close()
            for group in _registered() - before:
                dist.destroy_process_group(group)
    return {
        "spec": str(layout.spec),
        "titan_groups": groups["titan"],
        "torch_groups": groups["torch"],
        "titan_ms": statistics.median(times["titan"]),
        "torch_ms": statistics.median(times["torch"]),
    }


def explain_ms(text: str) -> float:
    """Best of five: spec to table and one rank's table."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        layout = Layout(MeshSpec.parse(text))
        layout.explain()
        layout.explain(rank=layout.num_ranks // 2)
        best = min(best, 1000 * (time.perf_counter() - start))
    return best


def _with_torch(layout: Layout) -> list[Any]:
    degrees = layout.spec.degrees
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    return [mesh, *(mesh[axes]._flatten(name) for name, axes in FLATTENS.items())]


def _registered() -> set[Any]:
    return set(dist.distributed_c10d._world.pg_map)


if __name__ == "__main__":
    main()
