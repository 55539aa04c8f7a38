"""A packed row gives what its documents give alone."""

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import CausalAttention, SequenceContext, build_model, init_for
from titan_train.models.common.attention import document_mask, document_positions
from titan_train.models.common.packed import packed_boundaries
from torch import nn

LENGTHS = [[5, 1, 17, 9], [32], [31, 1]]
SEQ_LEN = 32


def make(name: str) -> nn.Module:
    # the balance loss is of a row, not of a document
    args = {"balance_loss": 0.0} if name in ("qwen3_moe_debug", "deepseek_debug") else {}
    model = build_model(ModelConfig(name=name, args=args), vocab_size=97, device="cpu")
    init = init_for(model)
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(i))
        if parameter.ndim > 1:
            parameter.data.mul_(4)  # attention that looks somewhere, logits of order one
    return model


def boundaries() -> torch.Tensor:
    """``[B, N + 1]`` int32, padded by repeating S."""
    rows = [[0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in LENGTHS]
    width = max(len(row) for row in rows) + 1
    return torch.tensor([row + [SEQ_LEN] * (width - len(row)) for row in rows], dtype=torch.int32)


@pytest.mark.parametrize(
    "name", ["llama3_debug", "gpt_debug", "qwen3_debug", "qwen3_moe_debug", "qwen3_next_debug", "deepseek_debug"]
)
@pytest.mark.parametrize("give_positions", [False, True])
def test_packed_row_equals_separate_documents(name: str, give_positions: bool) -> None:
    model = make(name).double()  # in float32 the order of sums decides, which differs between processors
    cu_seqlens = boundaries()
    tokens = torch.randint(97, (len(LENGTHS), SEQ_LEN), generator=torch.Generator().manual_seed(0))
    probe = torch.randn(len(LENGTHS), SEQ_LEN, 97, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    positions = document_positions(cu_seqlens, SEQ_LEN) if give_positions else None
    packed = model(tokens, positions=positions, cu_seqlens=cu_seqlens)
    (packed * probe).sum().backward()
    packed_grads = {fqn: p.grad.clone() for fqn, p in model.named_parameters() if p.grad is not None}

    model.zero_grad()
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            alone = model(tokens[row : row + 1, start : start + length])
            # logits of order one; what is computed in float32 at any precision is the same on both sides
            assert float((packed[row, start : start + length] - alone[0]).detach().abs().max()) <= 1e-10
            (alone[0] * probe[row, start : start + length]).sum().backward()
            start += length
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        assert float((packed_grads[fqn] - parameter.grad).abs().max()) <= 1e-10 * max(1.0, scale), fqn


def test_packing_changes_the_result_so_the_boundaries_matter() -> None:
    model = make("llama3_debug")
    tokens = torch.randint(97, (3, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    difference = (model(tokens) - model(tokens, cu_seqlens=boundaries())).abs().amax(dim=(1, 2))
    assert float(difference[0].detach()) > 1e-2
    assert float(difference[1].detach()) <= 1e-5  # one document: the plain causal mask


def test_positions_and_mask_of_packed_rows() -> None:
    cu_seqlens = torch.tensor([[0, 2, 5, 5], [0, 5, 5, 5]], dtype=torch.int32)
    assert document_positions(cu_seqlens, 5).tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    mask = document_mask(cu_seqlens, 5)
    assert mask.shape == (2, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert torch.equal(mask[1, 0], torch.ones(5, 5).tril().bool())


def test_attention_keeps_documents_apart_by_what_a_users_model_hands_on() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 12, 2, 8, generator=generator) for _ in range(3))
    bounds = torch.tensor([[0, 5, 12], [0, 9, 12]], dtype=torch.int32)
    positions, attention = document_positions(bounds, 12), CausalAttention(2, 2, 8)
    flat = packed_boundaries(bounds, 12)
    got = attention(q, k, v, SequenceContext(positions=positions, cu_seqlens=bounds))
    want = attention(q, k, v, SequenceContext(positions=positions, cu_seqlens=bounds, boundaries=flat))
    assert torch.equal(got, want)
