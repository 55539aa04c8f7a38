"""A small decoder-shaped model, its data, and the single-process gradients that every test compares with."""

import torch
from torch import Tensor, nn

VOCAB, DIM, LAYERS, TOKENS = 11, 6, 2, 5


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = Norm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TinyLM(nn.Module):
    def __init__(self, layers: int = LAYERS, tied: bool = False, dim: int = DIM) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = Norm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Weights of the tests: small, and around one for norms."""
    tensor.normal_(0.0, 0.3, generator=generator)
    if "norm" in name:
        tensor.add_(1.0)


def batches(ranks: int, microbatches: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, shape ``[microbatches, ranks, 2, TOKENS]``."""
    generator = torch.Generator().manual_seed(7)
    shape = (microbatches, ranks, 2, TOKENS)
    return torch.randint(VOCAB, shape, generator=generator), torch.randint(VOCAB, shape, generator=generator)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
