"""A tiny language model at CP 4 and CP 1: the same loss and the same gradients, packed and not."""

import pytest
import torch
import torch.distributed as dist
from titan_cp import CPAttention, plan
from titan_testing import assert_close, run_ranks
from torch import nn

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8


def rotate(x, positions):
    """Rotary embedding, ``x [B, H, T, D]``."""
    frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = positions[:, None] * frequency
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1).flatten(-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.attention = CPAttention()
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, x, positions):
        widths = [n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)]
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(widths, -1))
        x = x + self.attention(rotate(q, positions), rotate(k, positions), v).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, positions):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def loss_and_gradients(bounds, method, parallel):
    rank, size = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
    torch.manual_seed(0)
    model = LanguageModel()
    tokens = torch.randint(VOCABULARY, (2, bounds[-1]))
    p = plan(
        cu_seqlens=bounds, size=size, rank=rank, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        dtype=torch.float32, method=method if parallel else "ring", pad=True,
    )  # fmt: skip
    for block in model.blocks:
        block.attention.plan, block.attention.group = p, dist.group.WORLD if parallel else None
    labels = p.shift_labels(tokens)
    # Every rank has the whole batch before sharding, so the global token count needs no communication.
    total = (labels != -100).sum()
    logits = model(p.shard(tokens, 1), p.positions())
    local_labels = p.shard(labels, 1, pad_value=-100)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), local_labels.flatten(), reduction="sum") / total
    loss.backward()
    result = {"loss": loss.detach(), **{name: w.grad for name, w in model.named_parameters()}}
    if parallel:
        for value in result.values():
            dist.all_reduce(value)
    return result


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize(
    "bounds", [[0, 64], [0, 1, 9, 40, 41, 64], [0, 20, 61]], ids=["one-document", "packed", "packed-padded"]
)
def test_language_model_on_4_ranks_has_the_loss_and_gradients_of_one(bounds, method):
    want = loss_and_gradients(bounds, method, parallel=False)
    for got in run_ranks(loss_and_gradients, 4, bounds, method, parallel=True):
        # float32 sums in another order: gradients here are below 1
        assert_close(got, want, atol=2e-6)
