"""Blocks that torch.compile cannot capture as one graph are compiled in pieces, also where they are recomputed."""

import pytest
import torch
from titan_train.config import ActivationsConfig, CompileConfig
from titan_train.parallel.activations.recompute import apply_activation_checkpointing
from titan_train.parallel.compiled import compile_blocks, compile_pieces
from torch import Tensor, nn
from torch._functorch import config as functorch_config

ROWS, WIDTH = 64, 32


@torch.compiler.disable
def exchanged(x: Tensor) -> Tensor:
    """Stands for a transfer that torch does not trace."""
    return x * 1


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(exchanged(torch.sin(self.before(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.up, self.down = Mixer(), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(torch.cos(x))
        return x + self.down(torch.exp(torch.sin(self.up(torch.sin(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(activations: ActivationsConfig, *, compiled: bool) -> tuple[list[Tensor], int, int]:
    """Gradients, bytes that forward leaves for backward, and products in compiled graphs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Model(), torch.randn(ROWS, WIDTH, requires_grad=True)
    products = 0
    if compiled:
        seen = torch._dynamo.utils.counters["stats"]
        seen.clear()
        activations = compile_pieces(model, list(model.layers), CompileConfig(backend="aot_eager"), activations)
    apply_activation_checkpointing(model, list(model.layers), activations)
    ours = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in ours:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    out.square().sum().backward()
    if compiled:
        products = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert x.grad is not None
    return [x.grad, *(parameter.grad for parameter in model.parameters())], size, products


HOW = {
    "none": ActivationsConfig(),
    "selective": ActivationsConfig(checkpoint="selective"),
    "full": ActivationsConfig(checkpoint="full"),
    "every": ActivationsConfig(checkpoint="every", every=2),
    "a module that breaks": ActivationsConfig(checkpoint="pattern", patterns=("layers.*.mixer",)),
    "a module that does not": ActivationsConfig(checkpoint="pattern", patterns=("layers.*.up",)),
}


@pytest.mark.parametrize("how", HOW)
def test_pieces_of_a_recomputed_block_are_compiled_and_its_gradients_are_the_same(how: str) -> None:
    expected, _, _ = step(HOW[how], compiled=False)
    got, _, graphs = step(HOW[how], compiled=True)
    assert graphs == 4, "a region that is recomputed ran in Python as a whole"
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_policy_keeps_less_in_each_piece() -> None:
    kept = {how: step(HOW[how], compiled=True)[1] for how in ("none", "selective")}
    assert kept["selective"] < kept["none"]


def test_a_memory_budget_ends_with_the_run_that_asked_for_it() -> None:
    for activations, budget in ((ActivationsConfig(checkpoint="budget", budget=0.3), 0.3), (ActivationsConfig(), 1.0)):
        compile_blocks([nn.Linear(2, 2)], CompileConfig(backend="aot_eager"), activations, whole_graph=True)
        assert functorch_config.activation_memory_budget == budget


def test_a_process_trains_more_models_than_torch_compiles_one_function_for() -> None:
    """All blocks are compiled through one function of torch's, of which it keeps eight versions by default."""
    torch._dynamo.reset()
    for width in range(1, 11):
        block = nn.Linear(width, width)
        compile_blocks([block], CompileConfig(backend="eager"), ActivationsConfig(), whole_graph=True)
        assert block(torch.ones(1, width)).shape == (1, width)
