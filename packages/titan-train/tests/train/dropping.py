"""A user's model with dropout: of its embeddings, and of what a block adds."""

import torch
import torch.nn.functional as F
from titan_train.models import CausalAttention, SequenceContext
from torch import nn

TABLE = {
    "words": "embedding",
    "blocks.*.norm": "replicated",
    "blocks.*.wide": "colwise",
    "blocks.*.narrow": "rowwise",
    "unembed": "head",
}


class Block(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.norm, self.added = nn.LayerNorm(width), nn.Dropout(rate)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.added(self.narrow(F.gelu(self.wide(self.norm(x)))))


class Dropping(nn.Module):
    def __init__(self, vocab_size, width=32, rate=0.25, layerdrop=0.0):
        super().__init__()
        self.layerdrop = layerdrop
        self.words, self.embedded = nn.Embedding(vocab_size, width), nn.Dropout(rate)
        self.blocks = nn.ModuleList(Block(width, rate) for _ in range(2))
        self.unembed = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embedded(self.words(tokens))
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)


class ByFunction(nn.Module):
    """Calls the function."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return nn.functional.dropout(x, self.rate, self.training)


class Ending(nn.Module):
    """Drops out what its feed-forward returns, inside of it: by a module, or by a function."""

    def __init__(self, vocab_size, width=32, rate=0.25, function=False):
        super().__init__()
        self.words, self.unembed = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        last = ByFunction(rate) if function else nn.Dropout(rate)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width, bias=False), last)

    def forward(self, tokens):
        x = self.words(tokens)
        return self.unembed(x + self.mlp(x))


class Attending(nn.Module):
    """Has an attention that context parallelism can replace."""

    def __init__(self, vocab_size, width=32, rate=0.25):
        super().__init__()
        self.words, self.embedded = nn.Embedding(vocab_size, width), nn.Dropout(rate)
        self.qkv, self.attention = nn.Linear(width, 3 * width), CausalAttention(4, 4, width // 4)
        self.unembed = nn.Linear(width, vocab_size)

    def forward(self, tokens, positions=None, cu_seqlens=None, attention_plan=None):
        x = self.embedded(self.words(tokens))
        q, k, v = (y.unflatten(-1, (4, -1)) for y in self.qkv(x).chunk(3, -1))
        positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
        context = SequenceContext(positions=positions, cu_seqlens=cu_seqlens, attention_plan=attention_plan)
        return self.unembed(x + self.attention(q, k, v, context).flatten(-2))
