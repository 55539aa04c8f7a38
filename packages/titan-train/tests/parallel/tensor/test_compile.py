"""Compiled blocks under tensor parallelism. Checked on torch 2.11 and 2.15.

They lean on two private modules of torch: ``torch.distributed._functional_collectives`` (the collectives in a graph) and
``torch._compile._disable_dynamo`` (the asynchronous products, which stay outside).
"""

import pytest
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from titan_train.models import GPT, GPTArgs, Llama, LlamaArgs
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.collectives import gather_parts, scatter_sum, share, sum_partials
from titan_train.parallel.tensor.styles import table_for
from torch import Tensor, nn
from torch._dynamo.utils import counters

SEQ = 16
COLLECTIVES = {"gather": gather_parts, "scatter": scatter_sum, "sum": sum_partials, "share": share}


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "llama":
        return Llama(LlamaArgs(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=96))
    return GPT(GPTArgs(dim=32, num_layers=2, num_heads=4, vocab_size=96, max_seq_len=SEQ))


def compiled(family: str, options: dict, backend: str, fullgraph: bool) -> tuple[float, int, int, int]:
    """Largest error against the same model eagerly, graphs after the first step, graphs after the fifth, breaks."""
    group = dist.group.WORLD
    eager = make(family)
    apply_tensor_parallel(eager, group, table=table_for(eager), **options)
    model = make(family)
    apply_tensor_parallel(model, group, table=table_for(model), **options)
    for block in model.layers.values():
        block.compile(fullgraph=fullgraph, backend=backend)
    torch.manual_seed(1)
    inputs = torch.randint(0, 96, (2, SEQ))
    counters.clear()
    graphs, errors = [], []
    for _ in range(5):
        logits: list[Tensor] = []
        for m in (eager, model):
            m.zero_grad()
            logits.append(m(inputs))
            logits[-1].square().sum().backward()
        errors.append(float((logits[0] - logits[1]).detach().abs().max()))
        pairs = zip(eager.named_parameters(), model.named_parameters(), strict=True)
        errors += [float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for (_, a), (_, b) in pairs]
        graphs.append(counters["stats"]["unique_graphs"])
    return max(errors), graphs[0], graphs[-1], len(counters["graph_break"])


# float32, fused and reordered: a few ulps of values of order one, as a share of the largest
TOLERANCE = 1e-5


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    [("llama", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("llama", False), ("gpt", True)])],
)
def test_blocks_trace_into_one_graph_and_stay_compiled(family, sequence_parallel):
    results = run_ranks(compiled, 2, family, {"sequence_parallel": sequence_parallel}, "aot_eager", True, timeout_s=350)
    for error, first, last, breaks in results:
        assert error <= TOLERANCE
        assert first == last
        assert breaks == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_blocks_compile_with_inductor():
    for error, first, last, breaks in run_ranks(
        compiled, 2, "llama", {"sequence_parallel": True}, "inductor", True, timeout_s=550
    ):
        assert error <= TOLERANCE
        assert first == last
        assert breaks == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_asynchronous_products_stay_outside_of_the_graphs():
    options = {"sequence_parallel": True, "async_tp": True}
    for error, first, last, breaks in run_ranks(compiled, 2, "llama", options, "aot_eager", False, timeout_s=350):
        assert error <= TOLERANCE
        assert first == last
        assert breaks > 0


def gradient_through(name: str, backend: str) -> tuple[float, float]:
    """Of a collective alone in its graph: how far the gradient is from the eager one at most, and its largest value."""
    group = dist.group.WORLD
    dims = (0,) if name in ("gather", "scatter") else ()
    grads = []
    for compiled_too in (False, True):
        collective = lambda x: COLLECTIVES[name](x, *dims, group)  # noqa: E731
        fn = torch.compile(collective, fullgraph=True, backend=backend) if compiled_too else collective
        x = (torch.arange(8.0).reshape(4, 2) + dist.get_rank()).requires_grad_()
        fn(x).square().sum().backward()
        grads.append(x.grad)
    return float((grads[0] - grads[1]).abs().max()), float(grads[0].abs().max())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_alone_in_a_compiled_graph_has_its_gradient(name: str, backend: str) -> None:
    for difference, largest in run_ranks(gradient_through, 2, name, backend, timeout_s=150):
        assert difference == 0
        assert largest > 0
