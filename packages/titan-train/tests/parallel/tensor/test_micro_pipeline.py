"""The compiler's fusion of collectives with products, without GPUs: torch's pass on the graphs of a block.

The fused operations have no CPU kernel, so their own fallbacks stand in. Checked on torch 2.11 and 2.15.
"""

from collections.abc import Callable
from typing import Any

import pytest
import titan_mesh
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from titan_testing import run_ranks
from titan_train.config import ActivationsConfig, CompileConfig, ParallelConfig, parse_config
from titan_train.models import Llama, LlamaArgs
from titan_train.parallel import apply as build
from titan_train.parallel.compiled import compile_blocks
from titan_train.parallel.layout.run import plan_run
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.async_linears import overlapped_modules
from titan_train.parallel.tensor.micro_pipeline import (
    FusedProducts,
    can_micro_pipeline,
    enable_symmetric_memory,
    micro_pipeline_options,
    overlaps_by_compiler,
)
from titan_train.parallel.tensor.styles import table_for
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.fx import GraphModule


def backend_with_the_pass(fused: FusedProducts) -> Callable[..., Any]:
    """What inductor does to a graph before it writes kernels, and then the graph as it is."""
    options = micro_pipeline_options(fused)

    def compile_graph(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        with symmetric_memory._test_mode(), inductor.patch(options), V.set_fake_mode(detect_fake_mode(inputs)):
            view_to_reshape(module)
            post_grad_passes(module, False)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph, decompositions=select_decomp_table())


def fused_block() -> tuple[float, tuple[int, int, int]]:
    """Largest error against the block run eagerly, and the fused gathers, fused scatters and collectives left alone."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    group, fused = dist.group.WORLD, FusedProducts()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Llama(LlamaArgs(dim=32, num_layers=1, num_heads=4, num_kv_heads=4, ffn_dim=64, vocab_size=64))
        apply_tensor_parallel(model, group, table=table_for(model), sequence_parallel=True)
        block = model.layers["0"]
        if compiled:
            block.compile(fullgraph=True, backend=backend_with_the_pass(fused))
        context = model.sequence_context(torch.zeros(2, 16, dtype=torch.int64), None, None)
        torch.manual_seed(1 + group.rank())
        x = torch.randn(2, 8, 32, requires_grad=True)
        out = block(x, context)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in block.parameters())])
    errors = [float((eager - other).abs().max() / eager.abs().max()) for eager, other in zip(*results, strict=True)]
    return max(errors), (fused.gathers, fused.scatters, fused.left)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_gathers_and_scatters_of_a_block_are_found_and_fused():
    for error, counted in run_ranks(fused_block, 2, timeout_s=350):
        assert error <= 1e-5  # float32, fused and reordered
        assert counted == (
            4,
            2,
            2,
        )  # in the backward, what is scattered is a sum of several products: not fused by torch


def test_torch_compile_takes_the_options():
    torch.compile(lambda x: x, options=micro_pipeline_options(FusedProducts()))


def test_only_cuda_has_symmetric_memory():
    assert can_micro_pipeline(torch.device("cuda"))
    assert not can_micro_pipeline(torch.device("cpu"))


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ASYNC, COMPILED = ParallelConfig(tp=2, async_tp=True), CompileConfig(enabled=True)


@pytest.mark.parametrize(
    ("parallel", "compile", "device", "expected"),
    [
        (ASYNC, COMPILED, CUDA, True),
        (ASYNC, COMPILED, CPU, False),
        (ASYNC, CompileConfig(), CUDA, False),
        (ASYNC, CompileConfig(enabled=True, backend="aot_eager"), CUDA, False),
        (ParallelConfig(tp=2), COMPILED, CUDA, False),
        (ParallelConfig(async_tp=True), COMPILED, CUDA, False),
    ],
)
def test_the_compiler_overlaps_where_inductor_compiles_for_cuda(parallel, compile, device, expected):
    assert overlaps_by_compiler(parallel, compile, device) is expected


class Block(torch.nn.Linear):
    """Notes what it is compiled with."""

    def compile(self, **options: Any) -> None:
        self.compiled_with = options


@pytest.mark.parametrize(("mode", "more"), [("default", {}), ("max-autotune-no-cudagraphs", {"max_autotune": True})])
def test_the_options_reach_the_blocks_together_with_the_mode(mode, more):
    block, options = Block(2, 2), micro_pipeline_options(FusedProducts())
    config = CompileConfig(enabled=True, mode=mode)
    compile_blocks([block], config, ActivationsConfig(), whole_graph=True, inductor_options=options)
    assert block.compiled_with.keys() == {"backend", "fullgraph", "options"}  # torch refuses mode beside options
    assert {**block.compiled_with["options"], **options, **more} == block.compiled_with["options"]
    torch.compile(lambda x: x, **block.compiled_with)


def built(as_on_cuda: bool) -> tuple[bool, list[str], bool, bool]:
    """What a run with asynchronous tensor parallelism and inductor builds, on the CPU or as it would on a GPU."""
    config = parse_config({
        "model": {"name": "llama3_debug", "seq_len": 32},
        "parallel": {"tp": 2, "async_tp": True},
        "compile": {"enabled": True},
        "train": {"global_batch": 2},
    })  # fmt: skip
    plan = plan_run(config, 2)
    compiled: list[Any] = []
    build.compile_blocks = lambda *args, **kwargs: compiled.append(kwargs)
    build.compile_pieces = lambda *args, **kwargs: compiled.append(kwargs) or args[3]
    if as_on_cuda:
        build.overlaps_by_compiler = lambda parallel, compile, device: overlaps_by_compiler(parallel, compile, CUDA)
    mesh = titan_mesh.build(plan.layout, "cpu")
    model = build.build_parallel_model(
        config, layout=plan.layout, mode=plan.mode, mesh=mesh, schedule=None, vocab_size=64, device=CPU
    )
    options = compiled[0]["inductor_options"]
    name = mesh.group("tp").group_name
    known = name in symmetric_memory._group_name_to_store
    return model.report.fused is not None, overlapped_modules(model.parts[0]), "_micro_pipeline_tp" in options, known


@pytest.mark.parametrize("as_on_cuda", [False, True])
def test_a_run_leaves_the_overlap_to_the_compiler_or_to_the_ring(as_on_cuda):
    for counts, ring, asked, symmetric in run_ranks(built, 2, as_on_cuda, timeout_s=120):
        assert counts is asked is symmetric is as_on_cuda
        assert (ring == []) is as_on_cuda


def enabled_twice() -> None:
    for _ in range(2):
        enable_symmetric_memory(dist.group.WORLD)


def test_a_group_is_enabled_once():
    run_ranks(enabled_twice, 2)
