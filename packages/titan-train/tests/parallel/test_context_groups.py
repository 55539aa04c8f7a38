"""The groups of context parallelism: few calls to make them, connected before the first batch, planned without the device."""

import dataclasses
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from titan_mesh import Layout, MeshSpec, build
from titan_testing import run_ranks
from titan_train.config import ContextConfig
from titan_train.data import Batch
from titan_train.data.loader.batch import HostBatch
from titan_train.models import CausalAttention, SequenceContext
from titan_train.parallel.context import ContextAttention, ContextParallelism, Heads
from torch import nn


def _made_and_connected(method):
    """Ranks of every group made, its time limit, and ranks of every group that met, in order."""
    mesh = build(Layout(MeshSpec(dp_shard=2, cp=4)), device_type="cpu", timeout=timedelta(seconds=77))
    made, met = [], []
    new_group, all_reduce = dist.new_group, dist.all_reduce

    def counted(ranks, **options):
        made.append((tuple(ranks), options["timeout"], options["use_local_synchronization"]))
        return new_group(ranks, **options)

    def seen(tensor, group=None, **options):
        met.append(tuple(dist.get_process_group_ranks(group)))
        return all_reduce(tensor, group=group, **options)

    dist.new_group, dist.all_reduce = counted, seen
    try:
        config = ContextConfig(method=method, ulysses_degree=2 if method == "usp" else 0)
        ContextParallelism(config, mesh, Heads(4, 4, 8), seq_len=64, dtype=torch.float32)
    finally:
        dist.new_group, dist.all_reduce = new_group, all_reduce
    return made, met


@pytest.mark.parametrize("method", ["ring", "usp"])
def test_groups_of_context_parallelism_are_made_by_their_own_ranks_and_connect_at_once(method):
    for rank, (made, met) in enumerate(run_ranks(_made_and_connected, 8, method)):
        first = rank // 4 * 4
        context = tuple(range(first, first + 4))
        ring, heads = (first + rank % 2, first + rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        if method == "ring":
            assert made == []
            assert met == [context]
        else:
            assert made == [(ring, timedelta(seconds=77), True), (heads, timedelta(seconds=77), True)]
            assert met == [context, ring, heads]


def test_an_attention_that_several_blocks_share_is_replaced_in_each():
    model = nn.ModuleDict({"a": nn.ModuleDict({"inner": CausalAttention(4, 4, 8)}), "b": nn.ModuleDict()})
    model["b"]["inner"] = model["a"]["inner"]
    ContextParallelism.apply(SimpleNamespace(_groups={"group": None}), model)
    assert [type(block["inner"]) for block in model.values()] == [ContextAttention, ContextAttention]


def test_a_batch_on_a_device_brings_its_documents_in_host_memory():
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    boundaries = torch.tensor([[0, 3, 8, 8]], dtype=torch.int32)
    host = HostBatch(*(t.numpy() for t in (tokens, tokens, tokens, boundaries)), max_seqlen=5, samples_consumed=1)
    batch = host.on_device([tokens, tokens, tokens, boundaries.to("meta"), None])
    assert isinstance(batch, Batch)
    assert batch.boundaries is host.cu_seqlens


def _cut_without_reading_the_device():
    mesh = build(Layout(MeshSpec(cp=2)), device_type="cpu")
    context = ContextParallelism(ContextConfig(), mesh, Heads(4, 4, 8), seq_len=64, dtype=torch.float32)
    tokens = torch.arange(64)[None]
    boundaries = torch.tensor([[0, 16, 48, 64]], dtype=torch.int32)
    whole = Batch(tokens, tokens, tokens, boundaries, 32, 1)
    # a tensor without data stands for one whose data the host would have to wait for
    unread = dataclasses.replace(whole, cu_seqlens=boundaries.to("meta"), boundaries=boundaries.numpy())
    return context.cut(whole).tokens, context.cut(unread).tokens


def _methods_of_documents(config, options):
    """The method of a whole row, of many short documents and of one long one, and whether attention is one process's."""
    mesh = build(Layout(MeshSpec(cp=2)), device_type="cpu")
    context = ContextParallelism(
        ContextConfig(**config), mesh, Heads(4, 4, 8), seq_len=64, dtype=torch.float32, **options
    )
    tokens = torch.arange(64)[None]
    q, k, v = torch.randn(3, 1, 64, 4, 8, generator=torch.Generator().manual_seed(0))
    methods, same = [context.cut(Batch(tokens, tokens, tokens, None, 64, 1)).attention_plan.plan.method], []
    for ends in (range(0, 65, 8), (0, 64)):
        boundaries = torch.tensor([list(ends)], dtype=torch.int32)
        rows = context.cut(Batch(tokens, tokens, tokens, boundaries, 64, 1)).attention_plan
        methods.append(rows.plan.method)
        mine = SequenceContext(tokens, attention_plan=rows)
        parts = (rows.plan.shard(x) for x in (q, k, v))
        out = context.join(ContextAttention(context._groups)(*parts, mine), rows)
        whole = CausalAttention(4, 4, 8)(q, k, v, SequenceContext(tokens, boundaries))
        same.append(torch.allclose(out, whole, atol=1e-5))
    return methods, same


@pytest.mark.parametrize(
    ("config", "options", "many"),
    [({}, {}, "ring"), ({}, {"windows": (16,)}, "ulysses"), ({"layout": "contiguous"}, {"states": True}, "ulysses")],
)
def test_the_method_of_documents_is_the_one_that_sends_least_where_layers_do_not_share_a_layout(config, options, many):
    for methods, same in run_ranks(_methods_of_documents, 2, config, options):
        assert methods == ["ulysses", many, "ulysses"]
        assert same == [True, True]


def test_rows_are_cut_without_reading_documents_from_the_device():
    for expected, got in run_ranks(_cut_without_reading_the_device, 2):
        assert torch.equal(expected, got)
