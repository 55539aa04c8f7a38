"""Modules that predict tokens further ahead, against the formulas written out document by document."""

import dataclasses
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, count_active_parameters, count_parameters, flops_per_token, init_for
from titan_train.models.common.loss import IGNORE_INDEX
from titan_train.models.common.mtp import AHEAD, look_ahead, mtp_of
from titan_train.models.common.norm import ZeroCentredRMSNorm
from titan_train.models.registry import find_model
from titan_train.parallel.head_loss import fuse_head_loss

FAMILIES = {
    "llama3_debug": {},
    "llama3_debug tied": {"tied_embeddings": True},
    "qwen3_debug": {},
    "qwen3_moe_debug": {},
    "deepseek_debug": {},
    "qwen3_next_debug": {},
    "qwen3_next_moe_debug": {"num_layers": 2},  # without attention but in the modules
}
DOCUMENTS = [[4, 1, 7], [9, 2, 1]]  # two rows of 12 tokens
DEPTH, WEIGHT, Z_LOSS = 3, 0.3, 1e-3


def make(name, depth=DEPTH, seed=0):
    args = FAMILIES[name] | {"mtp_depth": depth}
    model = build_model(ModelConfig(name=name.split()[0], args=args), vocab_size=None, device="cpu").double()
    init = init_for(model)
    for number, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(seed + number))
        if parameter.ndim == 1:
            parameter.data *= 1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return model


def batch():
    torch.manual_seed(3)
    tokens, labels = torch.randint(500, (2, 12)), torch.full((2, 12), IGNORE_INDEX)
    positions, bounds = torch.zeros_like(tokens), torch.tensor([[0, *accumulate(d)] for d in DOCUMENTS])
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            labels[row, start : start + length - 1] = tokens[row, start + 1 : start + length]
            positions[row, start : start + length] = torch.arange(length)
            start += length
    labels[0, 6] = IGNORE_INDEX  # a label that is not learned is so for every module
    return tokens, labels, positions, bounds.int()


def rms(norm, x):
    return (
        (norm.weight + isinstance(norm, ZeroCentredRMSNorm)) * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    )


def sums_of_document(model, tokens, labels):
    """The sums of the next token's loss and of each module's, and the log-sum-exp of what is learned, from a whole document."""
    context = model.sequence_context(tokens[None], None, None)
    hidden = model.tok_embeddings.weight[tokens][None]
    for layer in model.layers.values():
        hidden = layer(hidden, context)
    hidden = rms(model.norm, hidden)
    found = []
    for k in range(DEPTH + 1):
        if k:
            module = model.mtp[str(k - 1)]
            inside = max(0, len(tokens) - k)
            embedded = model.tok_embeddings.weight[torch.cat([tokens[k:], torch.zeros(len(tokens) - inside).long()])][
                None
            ]
            joined = torch.cat([rms(module.embedding_norm, embedded), rms(module.hidden_norm, hidden)], -1)
            hidden = rms(module.norm, module.block(joined @ module.proj.weight.T, context))
        logits = hidden[0] @ model.lm_head.weight.T
        wanted = torch.cat([labels[k:], torch.full((min(k, len(tokens)),), IGNORE_INDEX)])[: len(tokens)]
        loss = F.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORE_INDEX)
        z = Z_LOSS * logits.logsumexp(-1).square()[wanted != IGNORE_INDEX].sum()
        found.append((loss, z, (wanted != IGNORE_INDEX).sum()))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_have_the_losses_and_gradients_of_the_formulas_by_document(name):
    tokens, labels, positions, bounds = batch()
    plain, model = make(name), make(name)
    plain.train(), model.train()
    totals = [[torch.zeros((), dtype=torch.float64), 0] for _ in range(DEPTH + 1)]
    objective = 0
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            inside = slice(start, start + length)
            for k, (loss, z, count) in enumerate(sums_of_document(plain, tokens[row, inside], labels[row, inside])):
                totals[k][0] = totals[k][0] + loss.detach()
                totals[k][1] += int(count)
                objective = objective + (loss + z) * (1 if k == 0 else WEIGHT / DEPTH)
            start += length
    objective.backward()

    assert fuse_head_loss(model, z_loss=Z_LOSS, vocab_size=500) == "lm_head"
    sums = mtp_of(model).begin(WEIGHT, torch.device("cpu"))
    ahead = dict(zip(AHEAD, look_ahead(tokens, labels, positions, DEPTH), strict=True))
    loss = model(tokens, positions=positions, cu_seqlens=bounds, labels=labels, **ahead)
    loss.backward()
    # float64 sums of some hundred terms in another order; rotary angles, routing and the recorded sums are float32
    assert loss.item() == pytest.approx(totals[0][0].item(), rel=1e-6)
    assert sums.tolist() == [pytest.approx([float(total), count], rel=1e-6) for total, count in totals[1:]]
    wanted = dict(plain.named_parameters())
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None, fqn
        scale = wanted[fqn].grad.abs().max()
        assert (parameter.grad - wanted[fqn].grad).abs().max() <= 2e-6 * scale, fqn
        assert scale > 0 or "experts" in fqn, fqn


def test_without_labels_in_evaluation_and_without_tokens_ahead_a_model_is_that_without_modules():
    tokens, labels, positions, bounds = batch()
    model, without = make("llama3_debug"), make("llama3_debug", depth=0)
    without.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("mtp")})
    rows = {"positions": positions, "cu_seqlens": bounds}
    assert torch.equal(model(tokens, **rows), without(tokens, **rows))
    fuse_head_loss(model, z_loss=0.0, vocab_size=500), fuse_head_loss(without, z_loss=0.0, vocab_size=500)
    ahead = dict(zip(AHEAD, look_ahead(tokens, labels, positions, DEPTH), strict=True))
    expected = without(tokens, labels=labels, **rows)
    assert torch.equal(model.train()(tokens, labels=labels, **rows), expected)
    sums = mtp_of(model).begin(WEIGHT, torch.device("cpu"))
    assert torch.equal(model.eval()(tokens, labels=labels, **rows, **ahead), expected)
    assert not sums.any()


def test_tokens_ahead_stay_in_the_row_and_their_labels_in_the_document():
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    labels = torch.tensor([[6, 7, IGNORE_INDEX, 9, 10]])
    ahead, learned = look_ahead(tokens, labels, torch.tensor([[0, 1, 2, 0, 1]]), 2)
    assert ahead[0].tolist() == [[6, 7], [7, 8], [8, 9], [9, 0], [0, 0]]
    none = IGNORE_INDEX
    assert learned[0].tolist() == [[7, none], [none, none], [none, none], [10, none], [none, none]]
    # more modules than tokens
    assert look_ahead(tokens[:, :1], labels[:, :1], torch.zeros(1, 1).long(), 3)[1].tolist() == [[[none] * 3]]


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_flops_are_those_that_the_shape_states(name):
    model = make(name, depth=2)
    family, args = find_model(name.split()[0])
    shape = family.shape(dataclasses.replace(args, mtp_depth=2, **FAMILIES[name]), "m")
    assert shape.parameters() == count_parameters(model)
    assert shape.active_parameters() == count_active_parameters(model)
    # the shape leaves norms out and the model counts them: three of a module, one of the model, and latents'
    assert flops_per_token(model, 64) == pytest.approx(shape.flops_per_token(64, causal=False), rel=2e-3)
    without = make(name, depth=0)
    assert flops_per_token(model, 64) > flops_per_token(without, 64) + 2 * 6 * without.lm_head.weight.numel()


def test_weights_change_once_and_refuse_what_means_nothing():
    from titan_train.config.recipe import MTPConfig

    weights = MTPConfig(late_from=0.5)
    assert [weights.weight_at(step, 10) for step in (1, 5, 6, 10)] == [0.3, 0.3, 0.1, 0.1]
    assert MTPConfig(late_from=1.0).weight_at(10, 10) == 0.3
    with pytest.raises(ValueError, match=r"mtp\.weight=-1"):
        MTPConfig(weight=-1)
    with pytest.raises(ValueError, match=r"mtp_depth=1: the tokens ahead of an image"):
        build_model(
            parse_config({"model": {"name": "qwen3_vl_debug", "args": {"mtp_depth": 1}}}).model, vocab_size=None
        )
