"""The compiler's fusion of collectives with products, without GPUs: torch's pass on the graphs of a block.

The fused operations have no CPU kernel, so their own fallbacks stand in. Checked on torch 2.11 and 2.15.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from titan_testing import run_ranks
from titan_train.models import Llama, LlamaArgs
from titan_train.parallel.tensor import apply_tensor_parallel
from titan_train.parallel.tensor.micro_pipeline import FusedProducts, can_micro_pipeline, micro_pipeline_options
from titan_train.parallel.tensor.tables import table_for
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
