"""Attention document by document against a dense mask: values, gradients, memory, and the CUDA paths on fake tensors."""

import pytest
import torch
import torch.nn.functional as F
from titan_testing import run_ranks
from titan_train.models.common.attention import CausalAttention, SequenceContext, attend, document_mask
from titan_train.models.common.packed import _Efficient, packed_attention, packed_boundaries
from torch._subclasses.fake_tensor import FakeTensorMode

SEQ = 48
ROWS = [[0, 48, 48, 48, 48], [0, 1, 2, 25, 48], [0, 47, 48, 48, 48]]
# queries, keys, values: heads and width
SHAPES = {
    "grouped": ((4, 16), (2, 16), (2, 16)),
    "latent": ((4, 24), (4, 24), (4, 16)),
    "one": ((2, 8), (2, 8), (2, 8)),
}


def inputs(shapes, dtype):
    torch.manual_seed(0)
    return [torch.randn(3, SEQ, *shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def dense(q, k, v, mask):
    """Softmax of whole masked scores."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhst,bthe->bshe", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shapes", SHAPES)
def test_packed_attention_matches_a_dense_mask(shapes, dtype):
    q, k, v = inputs(SHAPES[shapes], dtype)
    cu_seqlens = torch.tensor(ROWS, dtype=torch.int32)
    context = SequenceContext(torch.arange(SEQ)[None], boundaries=packed_boundaries(cu_seqlens, SEQ))
    got = CausalAttention(q.shape[2], k.shape[2], q.shape[3], value_dim=v.shape[3])(q, k, v, context)
    want = dense(q, k, v, document_mask(cu_seqlens, SEQ))
    probe = torch.randn_like(want)
    bound = 1e-12 if dtype == torch.float64 else 2e-5  # sums of 48 terms of order one in another order
    assert (got - want).abs().max().item() <= bound
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), probe) for out in (got, want)), strict=True):
        assert (a - b).abs().max().item() <= bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_a_causal_mask_every_token_sees_all_of_its_document(dtype):
    q, k, v = (x[0].detach().requires_grad_() for x in inputs(SHAPES["grouped"], dtype))
    ends = [0, 10, 10, 26, 42, SEQ]
    document = torch.bucketize(torch.arange(SEQ), torch.tensor(ends[1:]), right=True)
    got = packed_attention(q, k, v, torch.tensor(ends, dtype=torch.int32), SEQ, causal=False)
    want = dense(q[None], k[None], v[None], document[:, None] == document)[0]
    probe = torch.randn_like(want)
    bound = 1e-12 if dtype == torch.float64 else 2e-5  # as above
    assert (got - want).abs().max().item() <= bound
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), probe) for out in (got, want)), strict=True):
        assert (a - b).abs().max().item() <= bound


def test_channels_may_lie_apart_in_memory():
    torch.manual_seed(0)
    q, k, v, probe = (torch.randn(2, 16, SEQ).permute(2, 0, 1) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    boundaries = torch.tensor([0, 20, SEQ], dtype=torch.int32)
    out = packed_attention(*leaves, boundaries, 28)
    want = packed_attention(*(x.contiguous() for x in leaves), boundaries, 28)
    assert torch.equal(out, want)
    both = (torch.autograd.grad(x, leaves, probe) for x in (out, want))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_the_operator_is_sound_and_compiles_without_its_lengths():
    q, k, v = (x[0].detach().requires_grad_() for x in inputs(SHAPES["grouped"], torch.float32))
    boundaries = torch.tensor([0, 10, 10, 48], dtype=torch.int32)
    for causal in (True, False):
        torch.library.opcheck(torch.ops.titan_train.document_attention.default, (q, k, v, boundaries, causal))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(packed_attention, backend=backend, fullgraph=True)
    for ends in ([0, 10, 10, 48], [0, 3, 7, 48]):
        boundaries = torch.tensor(ends, dtype=torch.int32)
        assert torch.equal(compiled(q, k, v, boundaries, SEQ), packed_attention(q, k, v, boundaries, SEQ))
    assert len(graphs) == 1  # other documents need no other graph


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cuda_paths_have_the_right_shapes_on_fake_tensors(shapes, dtype, monkeypatch):
    """Without a GPU: fake tensors run every operator's own shape function, not its kernel. Torch 2.11 and 2.15."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # newer versions choose a kernel by it
    with FakeTensorMode():
        q, k, v = (torch.empty(96, *shape, device="cuda", dtype=dtype) for shape in SHAPES[shapes])
        boundaries = torch.empty(5, device="cuda", dtype=torch.int32)
        out = packed_attention(q, k, v, boundaries, SEQ)
        assert out.shape == (96, q.shape[1], v.shape[2])
        assert out.dtype == dtype
        kept = Kept()  # autograd's engine needs a driver: forward and backward are called by hand
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        for causal in (True, False):
            assert packed_attention(q, k, v, boundaries, SEQ, causal=causal).shape == out.shape
            of_all_heads = _Efficient.forward(kept, q, k, v, boundaries, SEQ, causal)
            for grad, x in zip(_Efficient.backward(kept, torch.empty_like(of_all_heads)), (q, k, v), strict=False):
                assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


class Kept:
    """What autograd would hand from forward to backward."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


def test_a_mask_for_grouped_heads_repeats_no_key():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    mask = torch.rand(2, 1, 3, 10) < 0.7
    mask[..., 0] = True
    want = F.scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=mask)
    assert (attend(q, k, v, mask) - want).abs().max() <= 1e-6  # sums of 10 terms of order one


def peak_of_a_long_row(seq_len):
    """Bytes that forward and backward add to this process, with documents of 64 tokens."""
    import resource

    q, k, v = (torch.randn(1, seq_len, 1, 8).requires_grad_() for _ in range(3))
    attention = CausalAttention(1, 1, 8)

    def step(length):
        cu_seqlens = torch.arange(0, length + 1, 64, dtype=torch.int32)[None]
        context = SequenceContext(torch.zeros(1, 1), boundaries=packed_boundaries(cu_seqlens, length))
        attention(q[:, :length], k[:, :length], v[:, :length], context).sum().backward()

    step(1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(seq_len)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_memory_of_a_packed_row_of_32k_tokens_is_linear():
    (grown,) = run_ranks(peak_of_a_long_row, 1, 32768, init=False)
    assert grown < 64 << 20  # tensors of 1 MiB each; the mask of such a row has 1024 MiB
