import time

import pytest
import torch
from titan_cp import causal_convolution, linear_attention, plan
from torch._subclasses.fake_tensor import FakeTensorMode

LLAMA = {"num_heads": 32, "num_kv_heads": 8}


def make(seq_len=8192, size=8, rank=0, **options):
    return plan(seq_len, size=size, rank=rank, **{"num_heads": 32, "num_kv_heads": 8, **options})


def test_auto_takes_ulysses_for_grouped_heads_and_the_ring_for_a_single_kv_head():
    assert make().method == "ulysses"
    assert make(num_kv_heads=1).method == "ring"


def test_auto_takes_usp_where_ranks_do_not_divide_the_heads():
    p = make(size=12, num_heads=8, num_kv_heads=8, seq_len=9216)
    assert (p.method, p.ulysses_degree, p.ring_degree) == ("usp", 4, 3)


def test_auto_never_sends_more_bytes_than_any_other_legal_method():
    for size in (2, 4, 8):
        for num_kv_heads in (1, 2, 4, 8, 32):
            options = {"size": size, "num_kv_heads": num_kv_heads}
            sent = {
                method: (c := make(method=method, **options).costs).forward_bytes + c.backward_bytes
                for method in ("auto", "ring", "ulysses")
            }
            assert sent["auto"] == min(sent["ring"], sent["ulysses"])


def test_crossover_is_the_first_size_at_which_ulysses_sends_less_than_the_ring():
    for num_kv_heads in (1, 2, 8):
        crossover = make(num_kv_heads=num_kv_heads).crossover_size
        for size in (2, 4, 8, 16, 32):
            ring, ulysses = (make(method=m, size=size, num_kv_heads=num_kv_heads).costs for m in ("ring", "ulysses"))
            less = ulysses.forward_bytes + ulysses.backward_bytes < ring.forward_bytes + ring.backward_bytes
            assert less == (size >= crossover)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({}, "zigzag"),
        ({"causal": False}, "contiguous"),
        ({"window": 64}, "contiguous"),
        ({"window": 4096}, "block"),
        ({"cu_seqlens": [0, 3, 5000, 8192]}, "per_document"),
        ({"cu_seqlens": [0, 3, 5000, 8192], "causal": False}, "per_document"),
    ],
)
def test_auto_layout_is_the_balanced_one(options, layout):
    p = make(method="ring", **options)
    assert p.layout == layout
    assert p.imbalance <= 1.05


def test_a_window_sends_only_the_rows_it_reaches():
    whole, windowed = make(method="ring", layout="contiguous"), make(method="ring", layout="contiguous", window=64)
    assert (whole.hops, windowed.hops) == (7, 1)
    assert (whole.direct, windowed.direct) == (False, True)
    row = 8 * 2 * 128 * 2
    assert whole.costs.forward_bytes == 7 * 1024 * row
    assert windowed.costs.forward_bytes == 63 * row
    assert windowed.for_rank(7).costs.forward_bytes == 0, "no rank comes after the last"


def test_ring_bytes_follow_the_published_formula():
    c = make(method="ring", dtype=torch.bfloat16).costs
    assert c.forward_bytes == 2 * 7 * 1024 * 8 * 128 * 2
    assert c.backward_bytes == c.forward_bytes + 8 * 2 * 1024 * 8 * 128 * 4


def test_ulysses_bytes_follow_the_published_formula():
    c = make(method="ulysses").costs
    assert c.forward_bytes == c.backward_bytes == (2 * 32 + 2 * 8) * 1024 * 128 * 2 * 7 // 8


def test_explain_states_bytes_memory_work_reasons_and_crossover():
    text = make(cu_seqlens=[0, 3, 5000, 8190], seq_len=None, method="ring", pad=True).explain()
    for part in ("3 documents", "padded by 2 to 8192", "per_document: auto", "sent ", "kept ", "peak ", "imbalance 1.0",
                 "7 of 7 hops", "from 2 ranks on"):  # fmt: skip
        assert part in text


def test_explain_needs_no_ranks_and_takes_seconds_for_1024_documents_on_64_ranks():
    bounds = list(range(0, 1024 * 1024 + 1, 1024))
    start = time.perf_counter()
    make(seq_len=None, cu_seqlens=bounds, size=64, method="ring").explain()
    assert time.perf_counter() - start < 20  # about 1 s alone; other jobs share the machine


def test_plans_of_different_ranks_agree_on_everything_but_the_rank():
    a, b = make(rank=0, method="usp"), make(rank=3, method="usp")
    assert a.for_rank(3) == b
    assert a.shard_ranges == b.shard_ranges


def state_layers(p, tokens):
    """A state layer and its convolution on leaves; what they give."""
    torch.manual_seed(0)
    q, decay, weight = torch.randn(1, 1, tokens, 4), -torch.rand(1, 1, tokens), torch.randn(4, 3)
    leaves = [x.requires_grad_() for x in (q, decay, weight)]
    out = linear_attention(q, q, q, decay, plan=p)
    return leaves, out + causal_convolution(q[0].transpose(1, 2), weight, plan=p).transpose(1, 2)


def test_a_plan_that_inference_used_first_serves_training():
    p = plan(cu_seqlens=[0, 31, 67], size=1, rank=0, num_heads=1)
    with torch.inference_mode():
        want = state_layers(p, 67)[1]
    leaves, out = state_layers(p, 67)
    assert torch.equal(out, want)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


def test_a_plan_serves_fake_tensors_and_real_ones_in_turn():
    p = plan(cu_seqlens=[0, 33, 71], size=1, rank=0, num_heads=1)
    for _ in range(2):
        with FakeTensorMode():
            assert state_layers(p, 71)[1].shape == (1, 1, 71, 4)
        assert type(state_layers(p, 71)[1]) is torch.Tensor


@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_shards_of_many_pieces_are_taken_in_one_graph(first):
    bounds = list(range(0, 801 if first == "eager" else 809, 4))
    p = make(cu_seqlens=bounds, seq_len=None, size=2, method="ring", layout="per_document", pad=True)
    x = torch.randn(p.seq_len, 3)
    compiled = torch.compile(lambda x: p.shard(x, 0) * 2, backend="aot_eager", fullgraph=True)
    assert len(p.shard_ranges[0]) > 64
    if first == "eager":
        p.shard(x, 0)
    assert torch.equal(compiled(x), p.shard(x, 0) * 2)


def test_cu_seqlens_may_be_a_tensor():
    bounds = [0, 3, 5000, 8192]
    assert make(cu_seqlens=torch.tensor(bounds)).cu_seqlens == tuple(bounds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1001, "method": "ring"}, r"multiple of 16\. Nearest: 992 or 1008\. plan\(\.\.\., pad=True\)"),
        ({"seq_len": 5, "method": "ring", "layout": "contiguous"}, r"multiple of 8\. Nearest: 8\."),
        ({"seq_len": 8200, "method": "ring", "layout": "block"}, r"multiple of 1024\. Nearest: 8192 or 9216"),
        ({"seq_len": 1004, "method": "usp", "ulysses_degree": 2}, r"multiple of 8"),
        ({"seq_len": 1000, "method": "usp", "ulysses_degree": 8, "layout": "zigzag"}, r"multiple of 16"),
        ({"num_kv_heads": 5}, r"num_kv_heads=5 does not divide num_heads=32.*\[1, 2, 4, 8, 16, 32\]"),
        ({"window": 0}, r"window=0 leaves a token nothing to attend to"),
        ({"rank": 8}, r"rank=8 is outside a group of size=8"),
        ({"size": 0}, r"size=0 is not a positive number"),
        ({"method": "rings"}, r"method='rings' does not exist"),
        ({"layout": "striped"}, r"layout='striped' does not exist"),
        ({"ulysses_degree": 2}, r"ulysses_degree=2 was given with method='auto'"),
        (
            {"method": "usp", "ulysses_degree": 3},
            r"must divide size=8.*\[1, 2, 4, 8\]",
        ),
        ({"cu_seqlens": [0, 4, 4, 8192]}, r"document 1 would have 0 tokens.*drop empty documents"),
        ({"cu_seqlens": [1, 8192]}, r"must start with 0"),
        ({"cu_seqlens": [0, 8000]}, r"seq_len=8192 but cu_seqlens ends at 8000"),
        ({"seq_len": None}, r"neither seq_len nor cu_seqlens"),
        ({"seq_len": 0}, r"seq_len=0 is not a positive number"),
    ],
)
def test_what_cannot_work_is_refused_with_the_nearest_legal_choice(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_auto_counts_what_a_ring_of_packed_documents_sends():
    options = {"size": 8, "rank": 0, "num_heads": 32, "num_kv_heads": 8}
    even = plan(cu_seqlens=[0, *range(1000, 64001, 1000)], **options)
    assert even.method == "ring"
    assert "nothing is sent" in even.explain()
    short = [0, *range(900, 64000, 900), 64000]
    packed = plan(cu_seqlens=short, **options)
    assert (packed.method, packed.layout) == ("ring", "documents")
    assert "as packed documents need" in packed.explain()
    assert plan(64000, **options).method == "ulysses"  # one document: the whole ring would travel
    assert plan(cu_seqlens=[0, 40000, 64000], **options).method == "ulysses"  # long ones too
    assert plan(cu_seqlens=short, layout="zigzag", **options).method == "ulysses"
    bytes_of = {
        m: plan(cu_seqlens=short, method=m, **options).costs for m in ("auto", "ring", "ulysses")
    }  # fmt: skip
    total = {m: c.forward_bytes + c.backward_bytes for m, c in bytes_of.items()}
    assert total["auto"] == min(total.values())
