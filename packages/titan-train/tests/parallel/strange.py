"""A user's model for Muon: vectors, a stack, a convolution, matrices with one row, a frozen group, a tied table."""

import torch
from torch import nn


class Mixing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3)
        self.stack = nn.Parameter(torch.randn(3, width, width) * 0.05)
        self.wide, self.one, self.back = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, 1),
            nn.Linear(2 * width, width),
        )
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x + self.conv(nn.functional.pad(x.mT, (2, 0))).mT
        x = x + torch.einsum("bti,eij->btj", x, self.stack)
        hidden = torch.relu(self.wide(x))
        return x + self.back(hidden) * self.scale + self.one(hidden)


class Strange(nn.Module):
    def __init__(self, vocab_size, width=24):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.row = nn.Parameter(torch.randn(1, width) * 0.05)
        self.blocks = nn.ModuleList(Mixing(width) for _ in range(2))
        self.frozen = nn.Linear(width, width)
        self.unembed = nn.Linear(width, vocab_size, bias=False)
        self.unembed.weight = self.words.weight

    def init_weights(self, name, tensor, generator):
        nn.init.ones_(tensor) if name.endswith("scale") else nn.init.normal_(tensor, std=0.1, generator=generator)

    def forward(self, tokens):
        x = self.words(tokens) + self.row
        for block in self.blocks:
            x = block(x)
        return self.unembed(x + self.frozen(x))
