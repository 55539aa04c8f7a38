"""Packed documents: exact, and with no path from one to another."""

import pytest
import torch
import torch.distributed as dist
from titan_cp import attention, plan, reference_attention
from titan_testing import run_ranks

# One-token documents, boundaries off every chunk grid of 64 tokens on 4 ranks, and a document over all ranks.
PACKINGS = {
    "one-token": [0, 1, 2, 3, 30, 31, 64],
    "off-grid": [0, 7, 13, 29, 50, 64],
    "across-all-ranks": [0, 3, 61, 64],
    "all-one-token": list(range(65)),
}


def gradients_across_documents(method, layout, bounds):
    """For each document: the largest gradient of its output with respect to any token of another, over q, k, v."""
    rank, size = dist.get_rank(), dist.get_world_size()
    p = plan(
        cu_seqlens=bounds, size=size, rank=rank, num_heads=4, num_kv_heads=2, method=method, layout=layout, block_size=4
    )
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    groups = (
        {"ring_group": mesh["ring"].get_group(), "ulysses_group": mesh["ulysses"].get_group()}
        if method == "usp"
        else {"group": dist.group.WORLD}
    )
    torch.manual_seed(0)
    whole = [torch.randn(1, h, 64, 8) for h in (4, 2, 2)]
    local = [p.shard(t, 2).requires_grad_() for t in whole]
    document = torch.bucketize(p.global_index(), torch.tensor(bounds[1:]), right=True)
    out = attention(*local, plan=p, **groups)
    leaks, own = [], []
    for d in range(min(len(bounds) - 1, 6)):
        grads = torch.autograd.grad((out * (document == d)[:, None]).sum(), local, retain_graph=True)
        leaks += [float(g[:, :, document != d].abs().max()) if (document != d).any() else 0.0 for g in grads]
        own.append(float(grads[2][:, :, document == d].abs().sum()))
    want = p.shard(reference_attention(*whole, cu_seqlens=bounds)[0], 2)
    return max(leaks), own, float((out.detach() - want).abs().max())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("method", "layout"),
    [("ring", "zigzag"), ("ring", "per_document"), ("allgather", "block"), ("ulysses", "contiguous"), ("usp", "auto")],
)
def test_gradient_of_one_document_with_respect_to_another_is_exactly_zero(method, layout, packing):
    results = run_ranks(gradients_across_documents, 4, method, layout, PACKINGS[packing])
    assert all(leak == 0.0 for leak, _, _ in results)
    # ... and it is not zero because everything is: each document has a gradient of its own, and the values are right.
    assert all(sum(amounts) > 0 for amounts in zip(*(own for _, own, _ in results), strict=True))
    assert max(error for _, _, error in results) < 5e-6
