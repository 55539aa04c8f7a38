import pytest
import torch
from titan_cp import merge, reference_attention
from titan_testing import assert_close


def attend(q, k, v):
    return reference_attention(q, k, v, causal=False)


def test_merging_blocks_of_keys_equals_attention_over_all_of_them():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 12, 8) for _ in range(3))
    want_out, want_lse = attend(q.repeat_interleave(2, 2), k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    keys = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    queries = q.repeat_interleave(2, 2)
    out, lse = torch.zeros(queries.shape), torch.full(queries.shape[:-1], -torch.inf)
    for start in range(0, 24, 6):
        scores = queries.double() @ keys[0][:, :, start : start + 6].double().transpose(-1, -2) / 8**0.5
        block_lse = scores.logsumexp(-1)
        block_out = scores.softmax(-1) @ keys[1][:, :, start : start + 6].double()
        out, lse = merge(out, lse, block_out.float(), block_lse.float())
    assert out.dtype == lse.dtype == torch.float32
    assert_close(out, want_out.float())
    assert_close(lse, want_lse.float())


@pytest.mark.parametrize("empty", ["left", "right", "both"])
def test_merging_rows_without_keys_changes_nothing_and_gives_no_nan(empty):
    out, lse = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    if empty == "left":
        got = merge(*nothing, out, lse)
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)
    elif empty == "right":
        got = merge(out, lse, *nothing)
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)
    else:
        got = merge(*nothing, *nothing)
        assert torch.equal(got[0], nothing[0])
        assert torch.equal(got[1], nothing[1])


def test_merging_extreme_scores_does_not_overflow():
    out, other = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    got, lse = merge(out, torch.full((1, 1, 1), 1e4), other, torch.full((1, 1, 1), -1e4))
    assert torch.equal(got, out)
    assert lse.item() == 1e4


def test_merge_leaves_its_arguments_unchanged_and_keeps_float64():
    out, lse = torch.randn(1, 2, 4, 8, dtype=torch.float64), torch.randn(1, 2, 4, dtype=torch.float64)
    kept = out.clone(), lse.clone()
    got = merge(out, lse, torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4))
    assert torch.equal(out, kept[0])
    assert torch.equal(lse, kept[1])
    assert got[0].dtype == torch.float64


def test_merge_rejects_a_padded_lse():
    out = torch.zeros(1, 2, 20, 8)
    with pytest.raises(ValueError, match="slice the efficient kernel's padded lse"):
        merge(out, torch.zeros(1, 2, 32), out, torch.zeros(1, 2, 32))
