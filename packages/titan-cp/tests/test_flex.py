"""FlexAttention through Ulysses and all-gather. On the CPU torch has its forward only."""

import pytest
import torch
import torch.distributed as dist
from titan_cp import allgather_attention, localize_mask, plan, ulysses_attention
from titan_testing import assert_close, run_ranks
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def prefix_mask(b, h, q, kv):
    """Every token sees a prefix of 20 tokens, and is causal after it: no plan of ours has this mask."""
    return (kv < 20) | (kv <= q)


def flex(method, layout):
    rank, size = dist.get_rank(), dist.get_world_size()
    p = plan(64, size=size, rank=rank, num_heads=4, num_kv_heads=2, method=method, layout=layout, block_size=4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 64, 16) for h in (4, 2, 2))
    token = torch.arange(64)
    mask = prefix_mask(0, 0, token[:, None], token[None, :])
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    local = [p.shard(t, 2) for t in (q, k, v)]
    mask_mod = prefix_mask if method == "ulysses" else localize_mask(prefix_mask, p)
    q_len = 64 if method == "ulysses" else p.local_len
    block_mask = create_block_mask(mask_mod, None, None, q_len, 64, device="cpu", BLOCK_SIZE=16)

    def attend(q, k, v):
        with torch.no_grad():
            return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    attention = ulysses_attention if method == "ulysses" else allgather_attention
    out = attention(*local, plan=p, group=dist.group.WORLD, attn_fn=attend)
    assert_close(out, p.shard(want, 2), atol=5e-6)
    return True


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("method", ["ulysses", "allgather"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_flex_attention_mask_gives_what_it_gives_on_one_device(method, layout):
    assert all(run_ranks(flex, 2, method, layout))


def differentiable_attn_fn(method):
    """Any differentiable local attention trains: here torch's own, full mask."""
    rank, size = dist.get_rank(), dist.get_world_size()
    p = plan(32, size=size, rank=rank, num_heads=4, num_kv_heads=2, method=method, causal=False)
    torch.manual_seed(0)
    whole = [torch.randn(1, h, 32, 8, requires_grad=True) for h in (4, 2, 2)]

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    wanted = torch.autograd.grad(attend(*whole).square().sum(), whole)
    local = [p.shard(t.detach(), 2).requires_grad_() for t in whole]
    attention = ulysses_attention if method == "ulysses" else allgather_attention
    out = attention(*local, plan=p, group=dist.group.WORLD, attn_fn=attend)
    for got, want in zip(torch.autograd.grad(out.square().sum(), local), wanted, strict=True):
        assert_close(got, p.shard(want, 2), atol=5e-6)
    return True


@pytest.mark.parametrize("method", ["ulysses", "allgather"])
def test_gradients_flow_through_an_attention_of_ones_own(method):
    assert all(run_ranks(differentiable_attn_fn, 2, method))


def test_an_attention_of_the_wrong_shape_is_refused():
    p = plan(8, size=1, rank=0, num_heads=2, method="ulysses")
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match=r"attn_fn returned shape \(1, 8, 2, 4\)"):
        ulysses_attention(q, q, q, plan=p, group=None, attn_fn=lambda q, k, v: q.transpose(1, 2))
    gather = plan(8, size=1, rank=0, num_heads=2, method="allgather")
    with pytest.raises(ValueError, match=r"heads_per_step=3 is outside the 2 KV heads"):
        allgather_attention(q, q, q, plan=gather, group=None, heads_per_step=3)
