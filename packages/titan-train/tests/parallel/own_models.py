"""Models as a user writes them: nothing of titan-train in them, names of their own."""

import torch
import torch.nn.functional as F
from titan_train.models import CausalAttention, SequenceContext
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.merge = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Unit(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before_mixer, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer = Mixer(width, heads)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        x = x + self.mixer(self.before_mixer(x))
        return x + self.narrow(F.gelu(self.wide(self.before_mlp(x))))


class Plain(nn.Module):
    """Takes tokens alone; perhaps a tied output, one unit used twice, a frozen and an unused part."""

    def __init__(self, vocab_size, width=32, tied=False, repeat=False, oddments=False):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, width), nn.Embedding(64, width)
        units = [Unit(width, 4) for _ in range(2)]
        self.units = nn.ModuleList([*units, units[0]] if repeat else units)
        self.final = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.unembed.weight = self.words.weight
        if oddments:
            self.unused = nn.Linear(width, 7)
            self.places.requires_grad_(False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for unit in self.units:
            x = unit(x)
        return self.unembed(self.final(x))


class Unfilled(Plain):
    """Nothing says how one of its parameters starts."""

    def __init__(self, vocab_size, **others):
        super().__init__(vocab_size, **others)
        self.scale = nn.Parameter(torch.ones(32))


class Functional(Plain):
    """Reads the weight of a part of it outside of that part's forward, or before it."""

    def __init__(self, vocab_size, before=False):
        super().__init__(vocab_size)
        self.before = before
        del self.unembed

    def forward(self, tokens):
        places = self.places.weight[: tokens.shape[1]] if self.before else self.places(torch.arange(tokens.shape[1]))
        x = self.words(tokens) + places
        for unit in self.units:
            x = unit(x.to(self.words.weight.dtype))
        return F.linear(self.final(x), self.words.weight)


class Normed(Plain):
    """A hook of the user's computes a weight from its parameter before the forward of its module."""

    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        nn.utils.spectral_norm(self.places)


class Wrapped(nn.Module):
    """Names parts of parts as units of FSDP, and some that it does not have."""

    fsdp_units = ("inner.unembed", "inner.units.*.mixer", "inner.vision")

    def __init__(self, vocab_size):
        super().__init__()
        self.inner = Plain(vocab_size)

    def forward(self, tokens):
        return self.inner(tokens)


class ChoosingUnit(Unit):
    """Each row goes through one of two experts, chosen by what it is; nobody uses the third."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        del self.wide, self.narrow

    def forward(self, x, chosen):
        x = x + self.mixer(self.before_mixer(x))
        return x + self.experts[chosen](self.before_mlp(x))


class Choosing(Plain):
    def __init__(self, vocab_size, width=32):
        super().__init__(vocab_size, width)
        self.units = nn.ModuleList(ChoosingUnit(width, 4) for _ in range(2))

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        chosen = int(tokens.sum()) % 2
        for unit in self.units:
            x = unit(x, chosen)
        return self.unembed(self.final(x))


class Verbose(Plain):
    def forward(self, tokens):
        return {"logits": super().forward(tokens)}


class RecurrentUnit(nn.Module):
    """torch.compile does not capture a GRU."""

    def __init__(self, width):
        super().__init__()
        self.before_mix = nn.LayerNorm(width)
        self.mix = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return x + self.mix(self.before_mix(x))[0]


class Recurrent(nn.Module):
    def __init__(self, vocab_size, width=16):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.units = nn.ModuleList(RecurrentUnit(width) for _ in range(2))
        self.unembed = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        x = self.words(tokens)
        for unit in self.units:
            x = unit(x)
        return self.unembed(x)


class Staged(nn.Module):
    """Is cut into pipeline stages, with names of its own."""

    first_stage_parts, last_stage_parts = ("words", "places"), ("final", "unembed")

    def __init__(self, vocab_size, width=32, repeat=False):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, width), nn.Embedding(64, width)
        units = [Unit(width, 4) for _ in range(2 if repeat else 4)]
        self.layers = nn.ModuleDict({str(i): units[i % len(units)] for i in range(4)})
        self.final = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens):
        x = tokens
        if self.words is not None:
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.unembed is None else self.unembed(self.final(x))


class Unnamed(Staged):
    first_stage_parts, last_stage_parts = ("tok_embeddings",), ("lm_head",)


PLAIN_TABLE = {
    "words": "embedding",
    "places": "positions",
    "units.*.before_*": "replicated",
    "units.*.mixer": "region",
    "units.*.mixer.query": "heads",
    "units.*.mixer.key": "heads",
    "units.*.mixer.value": "heads",
    "units.*.mixer.merge": "rowwise",
    "units.*.wide": "colwise",
    "units.*.narrow": "rowwise",
    "final": "replicated",
    "unembed": "head",
}


class Blind(nn.Module):
    """Has an attention that context parallelism can replace, but counts positions itself."""

    def __init__(self, vocab_size, width=32):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, width), nn.Embedding(64, width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention = CausalAttention(4, 4, width // 4)
        self.unembed = nn.Linear(width, vocab_size)

    def forward(self, tokens, attention_plan=None):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(positions)
        q, k, v = (y.unflatten(-1, (4, -1)) for y in self.qkv(x).chunk(3, -1))
        context = SequenceContext(positions=positions[None], attention_plan=attention_plan)
        return self.unembed(x + self.merge(self.attention(q, k, v, context).flatten(-2)))
