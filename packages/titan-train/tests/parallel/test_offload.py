"""Activation offload: the same bits, what moves follows from size, and copies start before they are waited for."""

import functools

import pytest
import titan_fp8
import torch
from titan_testing import run_ranks
from titan_testing.held_bytes import held_bytes
from titan_train.config import ActivationsConfig
from titan_train.models import Llama, LlamaArgs
from titan_train.parallel.activations import offload
from titan_train.parallel.activations.offload import StreamCopies, offload_activations
from titan_train.parallel.activations.recompute import apply_activation_checkpointing
from titan_train.parallel.structure import blocks_of
from torch.distributed.fsdp import fully_shard

ARGS = LlamaArgs(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=64)


class NumpyCopies:
    """Host memory of numpy, so that torch's own holds only what was not moved; notes what happens."""

    def __init__(self):
        self.events, self.shapes = [], []

    def away(self, tensor):
        self.events.append("away")
        self.shapes.append(tensor.shape)
        of_numpy = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # which has no float8
        return of_numpy.detach().numpy().copy(), tensor.dtype

    def back(self, held):
        self.events.append("back")
        return torch.from_numpy(held[0]).view(held[1])

    def ready(self, arriving):
        self.events.append("ready")
        return arriving


def run(checkpoint, copies=None):
    torch.manual_seed(0)
    model = Llama(ARGS)
    blocks = blocks_of(model)
    apply_activation_checkpointing(model, blocks, ActivationsConfig(checkpoint=checkpoint))
    if copies is not None:
        offload_activations(blocks[:-1], lambda tensor: copies)
    rows = [torch.randint(64, (2, 64)) for _ in range(2)]
    # as a pipeline has them, forward after forward
    losses, held = held_bytes(lambda: [model(row).square().sum() for row in rows])
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach() for loss in losses], {n: p.grad for n, p in model.named_parameters()}, held


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
def test_offload_gives_the_same_bits(checkpoint, monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 1024)
    copies = NumpyCopies()
    losses, gradients, held = run(checkpoint, copies)
    expected_losses, expected, held_without = run(checkpoint)
    assert all(map(torch.equal, losses, expected_losses))
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert copies.events.count("away") == copies.events.count("back") > 0
    if checkpoint == "none":
        assert held < held_without / 2  # of three blocks and the head's logits, one block and they stay


class Expert(torch.nn.Module):
    """A block with a unit of its own, which is gathered after the block is entered."""

    def __init__(self):
        super().__init__()
        self.first, self.experts = (torch.nn.Linear(128, 128, bias=False) for _ in range(2))

    def forward(self, x):
        return x + self.experts(self.first(x).relu())


def gathered_late(recipe):
    """Output and gradients with and without offload, of blocks under FSDP; and the shapes that moved."""
    offload.LEAST_BYTES, found = 1024, []
    for copies in (None, NumpyCopies()):
        torch.manual_seed(0)
        model = torch.nn.ModuleList(Expert() for _ in range(3))
        if recipe:
            titan_fp8.convert_to_float8(model, recipe, min_speedup=0, tokens=128)
        if copies is not None:
            offload_activations(list(model)[:-1], functools.partial(moving, copies))
        if recipe:
            titan_fp8.apply_float8_all_gather(model)
        for block in model:
            fully_shard(block.experts)
            fully_shard(block)
        x = torch.randn(2, 128, 128)
        for block in model:
            x = block(x)
        x.square().sum().backward()
        found.append((x.detach(), [p.grad.full_tensor() for p in model.parameters()]))
    return *found, copies.shapes


def moving(copies, tensor):
    return copies


@pytest.mark.parametrize("recipe", ["", "tensorwise"])
def test_weights_that_are_gathered_late_or_in_float8_stay(recipe):
    (plain, gradients), (moved, others), shapes = run_ranks(gathered_late, 1, recipe)[0]
    assert torch.equal(plain, moved)
    assert all(map(torch.equal, gradients, others))
    assert shapes
    assert torch.Size((128, 128)) not in shapes


def test_small_tensors_stay(monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 1 << 30)
    copies = NumpyCopies()
    run("none", copies)
    assert copies.events == []


def test_what_several_operators_save_moves_once_and_a_block_is_fetched_while_the_one_after_computes(monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 64 * 64 * 4)
    torch.manual_seed(0)
    first, second = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))

    class Twice(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x) * self.linear(x).sin()

    copies = NumpyCopies()
    blocks = [Twice(first), Twice(second)]
    offload_activations(blocks, lambda tensor: copies)
    x = torch.randn(64, 64, requires_grad=True)
    y = blocks[0](x)
    # the input of both products once, and what the product and sin save: its two operands, one of them sin's result
    away = copies.events.count("away")
    assert away == 4
    blocks[1](y).sum().backward()
    later = copies.events[copies.events.index("back") :]
    assert later[: 2 * away] == ["back"] * (2 * away)  # both blocks' before the first tensor is waited for
    assert set(later[2 * away :]) == {"ready"}


def test_copies_wait_for_the_computation_and_buffers_are_reused(monkeypatch):
    order = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            order.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            order.append(f"{self.name} waits for {event.name}")

        def __enter__(self):
            order.append(f"on {self.name}")

        def __exit__(self, *_):
            order.append("end")

    class Event:
        name = "arrived"

        def record(self, stream):
            order.append(f"record on {stream.name}")

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: order.append(f"used by {stream.name}"))
    monkeypatch.setattr(
        torch, "empty", lambda shape, dtype, pin_memory: order.append("pin") or empty(shape, dtype=dtype)
    )
    copies = StreamCopies(torch.device("cpu"))
    x = torch.randn(3)
    held = copies.away(x)
    assert order == ["pin", "copies waits for main", "on copies", "end", "used by copies"]
    order.clear()
    arriving = copies.back(held)
    assert torch.equal(copies.ready(arriving), x)
    assert order == ["on copies", "record on copies", "end", "main waits for arrived", "used by main"]
    order.clear()
    assert copies.away(torch.randn(3)) is held
    assert "pin" not in order
    assert copies.away(torch.randn(3)) is not held
