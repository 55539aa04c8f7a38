"""The host runs ahead of the device: what a plan needs there is built once, and copied without waiting."""

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from titan_cp import attention, connect, plan
from titan_cp.backends import Grads, Saved
from titan_cp.backends.cuda_varlen import CudaVarlenFlash
from titan_cp.methods import allgather, ulysses
from titan_testing.device_rules import host_syncs, on_device, run_on_devices
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def packing(tokens, seed):
    ends, rng = [0], random.Random(seed)
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + max(1, int(rng.lognormvariate(0, 1) * 600))))
    return ends


class Copies(TorchDispatchMode):
    """Copies from the host to the device; from pageable memory the host waits for each."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and target is not None and target.type == "cuda":
            self.seen["behind" if kwargs.get("non_blocking") else "waits"] += args[0].device.type == "cpu"
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen["waits"] += 1
        return func(*args, **kwargs)


def layer(p):
    """Forward and backward of one layer's blocks on the packed kernel, with tensors that have no data."""
    backend = CudaVarlenFlash()
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    q, out = torch.empty(1, 8, p.local_len, 64, **half), torch.empty(1, 8, p.local_len, 64, device="cuda")
    lse = torch.empty(1, 8, p.local_len, device="cuda")
    for tiles in [p.tiles(p.ring_rank), *(p.round_tiles(i) for i in range(len(p.rounds)))]:
        if tiles:
            rows = max(p.local_len, *(tile.k_stop for tile in tiles))
            k = torch.empty(1, 2, rows, 64, **half)
            backend.forward(q, k, k, tiles, 0.1, out, lse)
            grads = Grads(torch.empty_like(q), torch.empty_like(k), torch.empty_like(k))
            backend.backward(Saved(q, q, k, k, q, lse), tiles, 0.1, grads)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_layer_of_packed_documents_copies_nothing_to_the_device_after_the_first(size):
    p = plan(
        cu_seqlens=packing(2048 * size, size),
        size=size,
        rank=size - 1,
        num_heads=8,
        num_kv_heads=2,
        method="ring",
        layout="documents",
        pad=True,
    )
    assert p.rounds
    with FakeTensorMode(), Copies() as copies:
        layer(p)
        first = dict(copies.seen)
        layer(p)
    assert first["behind"] > 0
    assert first.get("waits", 0) == 0
    assert dict(copies.seen) == first


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_the_order_of_the_tokens_is_built_once_for_all_layers_and_head_groups(method, monkeypatch):
    sorts = []
    monkeypatch.setattr(torch.Tensor, "argsort", lambda x, *_: sorts.append(x))
    p = plan(4096, size=4, rank=1, num_heads=8, num_kv_heads=8, method=method, layout="zigzag")
    device = torch.device("cpu")
    order = p.ring_order(device) if method == "allgather" else ulysses._token_order(p, device)
    again = p.ring_order(device) if method == "allgather" else ulysses._token_order(p, device)
    assert order is again
    assert torch.equal(order.tokens[order.places.long()], torch.arange(4096, dtype=torch.int32))
    assert not sorts
    assert not hasattr(allgather, "_rank_order")


def test_rows_of_many_documents_are_cut_with_an_index_that_is_made_once():
    p = plan(cu_seqlens=packing(1 << 16, 1), size=2, rank=0, num_heads=4, layout="per_document", pad=True)
    x = torch.arange(p.seq_len)[None]
    first = p.shard(x)
    kept = dict(p._indices)
    assert torch.equal(p.shard(x), first)
    assert len(kept) == 1
    assert all(p._indices[key] is value for key, value in kept.items())


def waits_of_two_layers(method):
    """Host syncs of each of two layers, forward and backward."""
    size, rank = dist.get_world_size(), dist.get_rank()
    options = {"layout": "zigzag"} if method in ("allgather", "ulysses") else {"layout": "documents"}
    documents = {"seq_len": 64} if options["layout"] == "zigzag" else {"cu_seqlens": [0, 5, 30, 33, 64]}
    p = plan(
        **documents, size=size, rank=rank, num_heads=4, num_kv_heads=4, method=method, dtype=torch.float32, **options
    )
    connect(dist.group.WORLD, device="cuda")
    q, k, v = (on_device(torch.ones(1, 4, p.local_len, 8)).requires_grad_() for _ in range(3))
    waits = []
    for _ in range(2):
        before = host_syncs()
        attention(q, k, v, plan=p, group=dist.group.WORLD, backend="naive").sum().backward()
        waits.append(host_syncs() - before)
    return waits


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_no_layer_makes_the_host_wait_for_the_device(method):
    assert run_on_devices(waits_of_two_layers, 2, method).check().results == [[0, 0], [0, 0]]
