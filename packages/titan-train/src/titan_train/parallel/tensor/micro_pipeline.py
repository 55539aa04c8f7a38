"""Asynchronous tensor parallelism by torch's compiler: on CUDA, plain collectives fused with the products beside them.

Inductor has a pass that finds ``all-gather → matmul`` and ``matmul → reduce-scatter`` in a graph and replaces each pair by
one operation on symmetric memory, in which the copy engines move the parts while the products run. It needs NVLink
between the ranks and does nothing, without a word, where it finds no pair or no symmetric memory; `FusedProducts` counts
what it did.

Of a region's four pairs it fuses three: the gather before the linears and the scatter after the last one, forward, and
the gather of the output's gradient. The gradient of the input is a sum of several products, whose scatter stays by itself.

The blocks are those of plain tensor parallelism with sequence parallelism (``async_tp=False``): what is in their graphs
is spelled as the pass expects it, which ``tests/parallel/tensor/test_micro_pipeline.py`` holds.

Private to torch: the setting ``_micro_pipeline_tp``, the type of a custom pass, and the list of groups with symmetric
memory, which the pass of torch 2.11 asks and nothing else fills. Checked on torch 2.11 and 2.15. Not run on GPUs by the
tests.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph

from titan_train.config import CompileConfig, ParallelConfig


class FusedProducts:
    """How many pairs the compiler fused, over all graphs compiled with `micro_pipeline_options`."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.gathers = 0
        """All-gathers fused with the product that follows."""
        self.scatters = 0
        """Reduce-scatters fused with the product before."""
        self.left = 0
        """All-gathers and reduce-scatters that stayed by themselves."""

    def count(self, graph: Graph) -> None:
        """Add one graph's."""
        for node in graph.nodes:
            name = str(node.target)
            if "fused_all_gather" in name:
                self.gathers += 1
            elif "reduce_scatter" in name and "fused" in name:
                self.scatters += 1
            elif "_c10d_functional.all_gather" in name or "_c10d_functional.reduce_scatter" in name:
                self.left += 1


def micro_pipeline_options(fused: FusedProducts) -> dict[str, Any]:
    """Options of ``torch.compile`` (or ``block.compile``) that turn the pass on, for these graphs only.

    Args:
        fused: Counts what was fused, when the graphs are compiled: at the first step. Graphs are then not taken from
            inductor's cache, since there would be nothing to count.

    Returns:
        For ``options=``.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass  # the compiler: seconds to import

    class Count(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            fused.count(graph)

        def uuid(self) -> None:
            return None

    return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": Count()}


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Let the pass fuse collectives of ``group``; local, and nothing where torch knows the group already."""
    import torch.distributed._symmetric_memory as symmetric_memory  # for CUDA alone

    if symmetric_memory.is_symm_mem_enabled_for_group(group.group_name):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "no need to call this": true of torch 2.15, not of 2.11
        symmetric_memory.enable_symm_mem_for_group(group.group_name)  # pyright: ignore[reportDeprecated]


def can_micro_pipeline(device: torch.device) -> bool:
    """Whether torch has symmetric memory for this kind of device; ranks without NVLink between them fuse nothing."""
    return device.type == "cuda"


def overlaps_by_compiler(parallel: ParallelConfig, compile: CompileConfig, device: torch.device) -> bool:
    """Whether asynchronous tensor parallelism is left to the compiler: the ring of our own takes its place elsewhere."""
    asked = parallel.tp > 1 and parallel.async_tp
    return asked and compile.enabled and compile.backend == "inductor" and can_micro_pipeline(device)
