"""torch.compile splits the graph at attention, cleanly; checked on torch 2.11 and 2.15."""

import subprocess
import sys

import pytest
import torch
from titan_cp import attention, plan
from titan_testing import assert_close


def block(x, p):
    y = torch.sin(x) * 2
    return torch.cos(attention(y, y, y, plan=p) + 1)


def test_a_compiled_block_has_two_graphs_and_the_eager_result():
    p = plan(16, size=1, rank=0, num_heads=2)
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    out = torch.compile(block, backend=count)(x, p)
    grad = torch.autograd.grad(out.sum(), x)
    assert len(graphs) == 2
    want = block(x, p)
    assert torch.equal(out, want)
    assert_close(grad, torch.autograd.grad(want.sum(), x))


def test_fullgraph_is_refused_by_torch_and_not_silently_wrong():
    p = plan(16, size=1, rank=0, num_heads=2)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(block, backend="eager", fullgraph=True)(torch.randn(1, 2, 16, 8), p)


def test_import_loads_neither_the_compiler_nor_triton():
    code = "import sys, titan_cp; print([m for m in ('torch._dynamo', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
