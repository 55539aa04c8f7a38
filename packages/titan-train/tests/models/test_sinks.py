"""Attention sinks: a softmax with one more score and no value for it, by any kernel; values and every gradient."""

import pytest
import torch
from titan_train.models.common.attention import CausalAttention, SequenceContext, attend, document_mask
from titan_train.models.common.packed import packed_boundaries
from titan_train.models.common.sinks import with_sink_key

ROWS = [[0, 5, 6, 13], [0, 13, 13, 13]]
S, H, K, D = 13, 4, 2, 8


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """gpt-oss's own arithmetic, in float64."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(H // K, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) / D**0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1)[..., :-1], v)


def inputs(value: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, S, H, D), (2, S, K, D), (2, S, K, value), (H,)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("value", [D, 6])
@pytest.mark.parametrize("rows", ["whole", "packed", "window"])
def test_sinks_take_part_in_the_softmax_and_bring_no_value(rows: str, value: int) -> None:
    q, k, v, sinks = leaves = inputs(value)
    cu_seqlens = torch.tensor(ROWS, dtype=torch.int32) if rows != "whole" else torch.tensor([[0, S]] * 2)
    mask = document_mask(cu_seqlens, S)
    if rows == "window":
        places = torch.arange(S)
        mask = mask & (places[:, None] - places[None, :] < 4)
        parts = with_sink_key(*(x.transpose(1, 2) for x in (q, k, v)), mask, sinks)
        got = attend(*parts).transpose(1, 2)
    else:
        boundaries = packed_boundaries(cu_seqlens, S) if rows == "packed" else None
        context = SequenceContext(torch.arange(S)[None], boundaries=boundaries)
        got = CausalAttention(H, K, D, value_dim=value)(q, k, v, context, sinks=sinks)
    want = plain(q, k, v, sinks, mask)
    weights = torch.linspace(-1, 1, want.numel()).view_as(want)
    pairs = zip(
        torch.autograd.grad((got * weights).sum(), leaves),
        torch.autograd.grad((want * weights).sum(), leaves),
        strict=True,
    )
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)  # float32 against float64
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, atol=3e-6, rtol=2e-5)


def test_a_sink_far_above_the_scores_leaves_nothing() -> None:
    q, k, v, _ = inputs(D)
    out = CausalAttention(H, K, D)(q, k, v, SequenceContext(torch.arange(S)[None]), sinks=torch.full((H,), 60.0))
    assert out.abs().max() < 1e-6
    assert not torch.isnan(out).any()
