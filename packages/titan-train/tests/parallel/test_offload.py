"""Activation offload: the same bits, what moves follows from size, and copies start before they are waited for."""

import functools

import pytest
import titan_fp8
import torch
from titan_testing import run_ranks
from titan_testing.device_rules import on_device, run_on_devices
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

    def mark(self):
        self.events.append("mark")

    def wait(self, mark):
        self.events.append("wait")


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
        # of three blocks and the head's logits, twice: one block and they stay, and of the last forward what is under way
        assert held < held_without * 0.6


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
    one = ["back"] * away + ["mark"]
    assert later == [*one, *one, "wait", "wait"]  # both blocks' before the first is waited for


class Streams:
    """Stand-ins for streams and events, which note their order."""

    def __init__(self, monkeypatch):
        self.order, self.events, empty = [], 0, torch.empty
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("copies", self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("main", self))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.order.append(f"used by {stream.name}")
        )
        monkeypatch.setattr(
            torch, "empty", lambda shape, dtype, pin_memory: self.order.append("pin") or empty(shape, dtype=dtype)
        )


class FakeStream:
    def __init__(self, name, streams):
        self.name, self.streams = name, streams

    def wait_stream(self, other):
        self.streams.order.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.streams.order.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.streams.order.append(event := f"copied-{self.streams.events}")
        self.streams.events += 1
        return event

    def __enter__(self):
        self.streams.order.append(f"on {self.name}")

    def __exit__(self, *_):
        self.streams.order.append("end")


def test_copies_wait_for_the_computation_and_buffers_are_reused(monkeypatch):
    order = Streams(monkeypatch).order
    copies = StreamCopies(torch.device("cpu"))
    x = torch.randn(3)
    held = copies.away(x)
    assert order == ["pin", "copies waits for main", "on copies", "end"]
    order.clear()
    arriving = copies.back(held)
    copies.wait(copies.mark())
    assert torch.equal(arriving, x)
    assert order == ["copies waits for main", "on copies", "end", "copied-0", "main waits for copied-0"]
    order.clear()
    assert copies.away(torch.randn(3)) is held
    assert "pin" not in order
    assert copies.away(torch.randn(3)) is not held


class Exp(torch.nn.Module):
    def __init__(self, number, order):
        super().__init__()
        self.number, self.order = number, order

    def forward(self, x):
        self.order.append(f"block {self.number} begins")
        return x.exp()


def test_computation_is_never_more_than_one_block_ahead_of_the_copies(monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    order = Streams(monkeypatch).order
    copies = StreamCopies(torch.device("cpu"))
    blocks = [Exp(number, order) for number in range(4)]
    offload_activations(blocks, lambda tensor: copies)
    x = leaf = torch.zeros(3, requires_grad=True)
    for block in blocks:
        x = block(x)
    steps = [event for event in order if event.startswith(("block", "copied", "main"))]
    assert steps == [
        "block 0 begins", "copied-0",
        "block 1 begins", "main waits for copied-0", "copied-1",
        "block 2 begins", "main waits for copied-1", "copied-2",
        "block 3 begins", "main waits for copied-2", "copied-3",
    ]  # fmt: skip
    order.clear()
    x.sum().backward()
    steps = [event for event in order if event.startswith(("copied", "main"))]
    assert steps == [
        "main waits for copied-3", "copied-4", "copied-5", "main waits for copied-4",  # of block 3 and 2, and block 3 reads
        "copied-6", "main waits for copied-5", "copied-7", "main waits for copied-6", "main waits for copied-7",
    ]  # fmt: skip
    assert not [event for event in order if event.startswith("used by")]
    again = torch.zeros(3, requires_grad=True)
    again.exp().exp().exp().exp().sum().backward()
    assert torch.equal(leaf.grad, again.grad)


@pytest.mark.gpu
def test_a_gpu_holds_two_blocks_though_it_computes_faster_than_it_copies():
    blocks = [Exp(number, []) for number in range(16)]
    offload_activations(blocks[:-1])
    leaf, gradients = torch.full((2048, 2048), -1.0, device="cuda", requires_grad=True), []
    for functions, most in ((blocks, 8), ([torch.exp] * 16, 32)):  # each saves one tensor as large as its input
        torch.cuda.reset_peak_memory_stats()
        before, x = torch.cuda.memory_allocated(), leaf
        for function in functions:
            x = function(x).neg()
        gradients.append(torch.autograd.grad(x.sum(), leaf)[0])
        assert torch.cuda.max_memory_allocated() - before < most * leaf.nbytes
    assert torch.equal(*gradients)


class Beside(torch.nn.Module):
    """Saves more than backward reads: views, one tensor twice, and what belongs to a result that nobody uses."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x, beside):
        y = self.linear(x)
        halves = y.unflatten(1, (2, 32)).transpose(0, 1)
        aside = halves.sin().exp() if beside else None
        return x + (halves * halves.cos()).transpose(0, 1).flatten(1), aside


def train_on_device(moves):
    """Gradients of two forwards in flight, whose blocks' results aside are dropped early, late or not at all."""
    torch.manual_seed(0)
    blocks = on_device(torch.nn.ModuleList(Beside() for _ in range(5)))
    if moves:
        offload_activations(list(blocks)[:-1])
    for _ in range(2):
        ends, asides = [], []
        for _ in range(2):
            x = on_device(torch.randn(64, 64)).requires_grad_()
            for number, block in enumerate(blocks):
                x, aside = block(x, beside=True)
                asides.append(aside if number % 2 else None)
            ends.append(x.square().sum())
        for end in reversed(ends):
            end.backward()
        del ends, asides, x, aside
        on_device(torch.randn(64, 64)).exp()  # memory that was freed is looked at when a kernel is launched
    torch.cuda.synchronize()
    return [parameter.grad.tolist() for parameter in blocks.parameters()]


@pytest.fixture
def fetched(monkeypatch):
    """Shapes of what came back from the host; tensors of a few kilobytes move."""
    monkeypatch.setattr(offload, "LEAST_BYTES", 1024)
    found, back = [], StreamCopies.back
    monkeypatch.setattr(StreamCopies, "back", lambda copies, held: found.append(held.shape) or back(copies, held))
    return found


def test_no_memory_is_freed_or_read_before_its_copy_is_done(fetched):
    stayed = run_on_devices(train_on_device, 1, False).check().results
    assert fetched == []
    assert run_on_devices(train_on_device, 1, True).check().results == stayed
    assert len(fetched) > 2 * 2 * 4  # tensors of two steps, two forwards and four blocks


def only_part_of_backward():
    """A backward that ends at a block whose tensors were fetched and are not read."""
    blocks = on_device(torch.nn.ModuleList(Beside() for _ in range(4)))
    offload_activations(list(blocks)[:-1])
    x = on_device(torch.randn(64, 64))
    middle = blocks[1](blocks[0](x, beside=False)[0], beside=False)[0]
    blocks[3](blocks[2](middle, beside=False)[0], beside=False)[0].sum().backward(inputs=[middle])
    del middle
    for _ in range(3):
        x = on_device(torch.randn(64, 64)).exp()
    blocks[1](blocks[0](x, beside=False)[0], beside=False)[0].sum().backward()
    torch.cuda.synchronize()


def test_what_was_fetched_and_is_not_read_is_kept_until_its_copy_is_done(fetched):
    run_on_devices(only_part_of_backward, 1).check()
    assert fetched
