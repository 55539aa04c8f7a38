"""`compile.cudagraphs`: a run by replayed graphs has the bits of a run in eager mode, and what cannot be captured is refused."""

import functools
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recorded_graph import Captures
from tiny_run import tiny_run, write_text
from titan_train.config import parse_config
from titan_train.data.loader.batch import row_boundaries
from titan_train.data.loader.source import TensorBatch
from titan_train.models import build_model
from titan_train.models.common.moe.routed import RoutedExperts
from titan_train.parallel.check import check_model
from titan_train.parallel.compiled import check_cudagraphs
from titan_train.parallel.layout.run import plan_run
from titan_train.train import Trainer, graphs
from titan_train.train.graphs import MOST_SHAPES, StepGraphs, capture_cuda_graph
from torch import nn
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def captures(monkeypatch):
    """Graphs of the CPU in place of CUDA's."""
    found = Captures()
    monkeypatch.setattr(graphs, "StepGraphs", functools.partial(StepGraphs, capture=found))
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


def train(folder, name, *, until=None, cudagraphs, **sections):
    """Losses of a run, and its weights."""
    sections = {"compile": {"cudagraphs": cudagraphs}, "launch": {"device": "auto"}, **sections}
    config = tiny_run(folder, name, **sections)
    with Trainer(config) as trainer:
        trainer.fit(until)
        weights = {n: whole(p).clone() for part in trainer.model.parts for n, p in part.named_parameters()}
        return trainer.losses, weights


def whole(parameter):
    """Its values; one rank has all of a sharded one."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


KINDS = {
    "z-loss": {"train": {"steps": 5, "global_batch": 8, "microbatch": 4, "z_loss": 1e-4}},
    "one-document-a-row": {"train": {"steps": 3, "global_batch": 4}, "data": {"document_mask": False}},
    "bf16-fsdp": {"train": {"steps": 4, "global_batch": 4, "microbatch": 2, "dtype": "bf16"}},
    "float8": {
        "train": {"steps": 3, "global_batch": 4, "microbatch": 2}, "float8": {"recipe": "blockwise", "min_speedup": 0},
        "model": {"name": "llama3_debug", "seq_len": 128},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_have_the_bits_of_eager_ones(text, tmp_path, captures, kind):
    runs = {"run": {"dir": str(tmp_path)}, **KINDS[kind]}
    losses, weights = train(text, "eager", cudagraphs=False, **runs)
    assert captures.captures == 0
    again, weights_again = train(text, "graphs", cudagraphs=True, **runs)
    assert again == losses
    assert len(set(losses)) == len(losses)
    assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())
    assert captures.captures < captures.replays == len(losses)


def test_validation_saves_and_a_resumed_run_change_no_bit(text, tmp_path, captures):
    held_out = {"name": "same", "kind": "text", "paths": [str(text / "text.txt")]}
    sections = {
        "run": {"dir": str(tmp_path)}, "checkpoint": {"every": 3}, "validation": {"every": 2, "steps": 1},
        "data": {"validation_sources": [held_out]}, "train": {"steps": 7, "global_batch": 4},
    }  # fmt: skip
    losses, weights = train(text, "eager", cudagraphs=False, **sections)
    first, _ = train(text, "graphs", until=3, cudagraphs=True, **sections)
    rest, resumed = train(text, "graphs", cudagraphs=True, **sections)
    assert first + rest == losses
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())
    assert captures.captures == 2


class Noisy(nn.Module):
    """Draws random numbers and counts its forwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(self.linear(x), 0.5)


def graphs_of(model, capture, waits=False):
    def run(batches, number):
        total = torch.zeros(())
        for batch in batches:
            loss = model(*batch.inputs).square().sum() / number
            if waits:
                loss = loss * float(loss.detach())
            loss.backward()
            total += loss.detach()
        return total

    def forget():
        for parameter in model.parameters():
            parameter.grad = None

    return StepGraphs(run, [model], CPU, forget=forget, capture=capture)


def boundaries(starts):
    return torch.from_numpy(row_boundaries(starts, 64))


def batch(rows=2, target=None):
    x = torch.randn(rows, 4)
    return TensorBatch((x,), {}, x if target is None else target, 0)


def test_warm_up_leaves_no_trace_and_replays_draw_new_numbers(captures):
    torch.manual_seed(0)
    model, number = Noisy(), torch.tensor(3)
    batches = [[batch()] for _ in range(3)]
    torch.manual_seed(1)
    expected = []
    for step_batches in batches:
        loss = model(*step_batches[0].inputs).square().sum() / number
        expected.append((float(loss.detach()), torch.autograd.grad(loss, [model.linear.weight])[0]))
    model.calls.zero_()
    torch.manual_seed(1)
    replayed = graphs_of(model, captures)
    for step_batches, (loss, gradient) in zip(batches, expected, strict=True):
        assert float(replayed(step_batches, number)) == loss
        assert torch.equal(model.linear.weight.grad, gradient)
    assert float(model.calls) == 3
    assert (captures.captures, captures.replays) == (1, 3)


def test_each_shape_has_its_graph_and_beyond_their_bound_steps_run_eagerly(captures, caplog):
    model = nn.Linear(4, 4)
    replayed = graphs_of(model, captures)
    for rows in (1, 2, 1, 2):
        one = batch(rows)
        assert float(replayed([one], torch.tensor(1))) == float(model(one.inputs[0]).detach().square().sum())
    assert captures.captures == 2
    for rows in range(3, 1 + MOST_SHAPES):
        replayed([batch(rows)], torch.tensor(1))
    for rows in (1 + MOST_SHAPES, 2 + MOST_SHAPES):
        model.zero_grad(set_to_none=True)
        one = batch(rows)
        assert float(replayed([one], torch.tensor(1))) == float(model(one.inputs[0]).detach().square().sum())
        assert model.weight.grad is not None
    assert captures.captures == MOST_SHAPES
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert f"more than {MOST_SHAPES} shapes: steps of further shapes run in eager mode" in told[0]


def test_packed_documents_of_any_number_share_one_graph(captures):
    """Four micro-batches whose boundaries have 8, 16 or 32 columns, in 40 steps: up to 81 shapes of a step."""
    model = nn.Linear(4, 4)
    rng = random.Random(0)

    def run(batches, number):
        total = torch.zeros(())
        for one in batches:
            lengths = one.keywords["cu_seqlens"].diff().float()
            loss = (model(*one.inputs).sum(1) * lengths.square().sum()).sum() / number
            loss.backward()
            total += loss.detach()
        return total

    def forget():
        model.weight.grad = model.bias.grad = None

    replayed = StepGraphs(run, [model], CPU, forget=forget, capture=captures)
    for _ in range(40):
        step_batches = []
        for _ in range(4):
            inside = sorted(rng.sample(range(1, 64), rng.choice((2, 9, 20))))
            starts = [np.array(inside, dtype=np.int64)]
            step_batches.append(
                TensorBatch((torch.randn(2, 4),), {"cu_seqlens": boundaries(starts)}, torch.zeros(1), 0)
            )
        forget()
        expected, gradients = run(step_batches, torch.tensor(3)), [model.weight.grad, model.bias.grad]
        assert torch.equal(replayed(step_batches, torch.tensor(3)), expected)
        assert torch.equal(model.weight.grad, gradients[0])
        assert torch.equal(model.bias.grad, gradients[1])
    assert captures.captures <= 3
    assert captures.replays == 40


def documents(number, device="cpu"):
    """A batch of one row of 64 tokens in so many documents."""
    ends = boundaries([np.arange(1, number, dtype=np.int64)]).to(device)
    return TensorBatch((torch.randn(1, 4, device=device),), {"cu_seqlens": ends}, torch.zeros(1, device=device), 0)


def test_graphs_after_more_documents_are_captured_into_a_pool_of_their_own(monkeypatch):
    handles, pools = iter("abc"), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))

    def capture(run, device, pool):
        pools.append(pool)
        run()
        return lambda: None

    model = nn.Linear(4, 4)
    monkeypatch.setattr(graphs, "RandomState", lambda device: SimpleNamespace(restore=lambda: None))
    replayed = StepGraphs(
        lambda batches, number: model(*batches[0].inputs).sum(), [model], torch.device("cuda"),
        forget=lambda: None, capture=capture,
    )  # fmt: skip
    for number in (6, 7, 10):
        replayed([documents(number)], torch.tensor(1))
    assert pools == ["b", "c"]  # 6 and 7 have 8 columns, 10 has 16; no graph is in the first pool


@pytest.mark.gpu
def test_a_gpu_captures_again_after_more_documents():
    device = torch.device("cuda")
    model = nn.Linear(4, 4, device=device)

    def run(batches, number):
        loss = (model(*batches[0].inputs).square().sum() * batches[0].keywords["cu_seqlens"].sum()) / number
        loss.backward()
        return loss.detach()

    def forget():
        model.zero_grad(set_to_none=True)

    replayed = StepGraphs(run, [model], device, forget=forget)
    for number in (6, 10, 7, 40):
        one, denominator = documents(number, device), torch.tensor(3, device=device)
        forget()
        expected, gradient = run([one], denominator), model.weight.grad
        torch.testing.assert_close(replayed([one], denominator), expected)
        torch.testing.assert_close(model.weight.grad, gradient)


def test_what_waits_for_the_device_is_said():
    with pytest.raises(RuntimeError, match=r"could not be captured.*not permitted.*Set compile.cudagraphs=false"):
        graphs_of(nn.Linear(4, 4), Captures(), waits=True)([batch()], torch.tensor(1))


def test_a_batch_whose_tensors_cannot_be_found_is_refused(captures):
    @dataclass
    class Labels:
        ids: torch.Tensor

    with pytest.raises(ValueError, match="a batch holds a Labels"):
        graphs_of(nn.Linear(4, 4), captures)([batch(target=Labels(torch.zeros(1)))], torch.tensor(1))


def test_a_device_without_graphs_is_refused():
    with pytest.raises(ValueError, match="this run is on cpu: only CUDA devices have graphs"):
        StepGraphs(lambda batches, number: number, [], CPU, forget=lambda: None)


def test_the_capture_warms_up_on_a_side_stream_and_lets_other_threads_copy(monkeypatch):
    order = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            order.append(f"{self.name} waits for {other.name}")

    class Block:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            order.append(f"begin {self.name}")

        def __exit__(self, *_):
            order.append(f"end {self.name}")

    class Graph:
        def replay(self):
            order.append("replay")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Block(stream.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, pool, capture_error_mode: Block(f"{pool} {capture_error_mode}")
    )
    capture_cuda_graph(lambda: order.append("run"), torch.device("cuda"), "pool")()
    assert order == [
        "side waits for main", "begin side", *["run"] * graphs.WARM_UP_STEPS, "end side", "main waits for side",
        "begin pool thread_local", "run", "end pool thread_local", "replay",
    ]  # fmt: skip


REFUSED = {
    "2 ranks": ({}, 2),
    "launch.device='cpu'": ({"launch": {"device": "cpu"}}, 1),
    "parallel.offload='cpu'": ({"parallel": {"offload": "cpu"}}, 1),
    "activations.offload=true": ({"activations": {"offload": True}}, 1),
    "activations.checkpoint='selective'": ({"activations": {"checkpoint": "selective"}}, 1),
    "model.name='deepseek_debug'": ({"model": {"name": "deepseek_debug"}}, 1),
    "metrics.activations_every": ({"metrics": {"activations_every": 5}}, 1),
    "kernels.cross_entropy='liger'": ({"kernels": {"cross_entropy": "liger"}, "train": {"fused_loss": False}}, 1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_captured_is_refused_before_any_rank_starts(what):
    sections, ranks = REFUSED[what]
    tree = {
        "model": {"name": "llama3_debug", "seq_len": 64}, "compile": {"cudagraphs": True}, "train": {"global_batch": 8},
    }  # fmt: skip
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    config = parse_config(tree)
    plan = plan_run(config, ranks)
    model = build_model(config.model, vocab_size=None, device="meta")
    with pytest.raises(ValueError, match=rf"compile.cudagraphs=true and {what}.*Set compile.cudagraphs=false"):
        check_model(config, plan.layout, plan.batch, model)


def test_experts_and_states_of_transformers_are_no_graph():
    sections = {
        "model": {"name": "llama3_debug", "seq_len": 64},
        "compile": {"cudagraphs": True},
        "train": {"global_batch": 8},
    }
    config = parse_config(sections)
    layout = plan_run(config, 1).layout
    experts, states = nn.Module(), nn.Module()
    experts.experts = RoutedExperts(2, 4, 4, experts_per_token=1, init_std=0.02)
    states.has_state = True
    for model in (experts, states):
        with pytest.raises(ValueError, match=r"compile\.cudagraphs=true and model\.name"):
            check_cudagraphs(config, layout, model)
    whole_rows = parse_config(sections | {"data": {"document_mask": False}})
    check_cudagraphs(whole_rows, layout, states)
