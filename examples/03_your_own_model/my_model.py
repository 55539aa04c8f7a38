"""A model that knows nothing of titan: a plain module from tokens to logits."""

import torch
from torch import Tensor, nn


class Recurrent(nn.Module):
    """A small GRU language model."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList([Cell(width) for _ in range(2)])
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, S, V]`` of tokens ``[B, S]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Cell(nn.Module):
    """One residual recurrent layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``[B, S, width]`` in and out."""
        out: tuple[Tensor, Tensor] = self.gru(torch.as_tensor(x))
        return self.norm(x + out[0])
