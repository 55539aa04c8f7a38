"""Tensor parallelism of the shipped models against one process with the same weights: loss and every gradient."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from titan_testing import run_ranks
from titan_train.models import GPT, GPTArgs, Llama, LlamaArgs
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.loss import vocab_parallel_cross_entropy_sum
from titan_train.parallel.tensor.styles import table_for
from torch import Tensor, nn

SHAPE = {"dim": 32, "num_layers": 2, "num_heads": 8, "ffn_dim": 48, "vocab_size": 96}
BATCH, SEQ = 2, 16

# Error of the loss, and of any gradient as a share of the largest. float64: only the order of summation differs.
# Against float64 with the same weights. A gradient passes some thousand roundings of u = 2^-24 on its way through two layers
# and back (sums over widths of up to 96 and over the batch's tokens); they add up as a random walk, to some 32 u of the
# largest gradient. A sum that is left out changes a gradient by a quarter or more.
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 32 * 2**-24)}


def make_llama(dtype: torch.dtype, **changes: object) -> nn.Module:
    return _fill(Llama(LlamaArgs(**{**SHAPE, "num_kv_heads": 4, **changes})), dtype)  # type: ignore[arg-type]


def make_gpt(dtype: torch.dtype, **changes: object) -> nn.Module:
    return _fill(GPT(GPTArgs(**{**SHAPE, "max_seq_len": SEQ, **changes})), dtype)  # type: ignore[arg-type]


def _fill(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Weights away from their initial values, where biases are zero and norms all one."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        centre = 1.0 if "norm.weight" in name else 0.0
        parameter.data = (centre + noise * 0.1).to(dtype)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SHAPE["vocab_size"], (BATCH, SEQ), generator=generator)
    labels = torch.randint(0, SHAPE["vocab_size"], (BATCH, SEQ), generator=generator)
    labels[0, :3] = -100
    return tokens, labels


def reference(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = batch()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def finish(model: nn.Module, cuts: dict) -> None:
    for name, parameter in model.named_parameters():
        if name in cuts and cuts[name].partial_over is not None:
            dist.all_reduce(parameter.grad, group=cuts[name].partial_over)


def compare(
    family: str, dtype: torch.dtype, options: dict, changes: dict, skip_sum_of: str = ""
) -> tuple[float, float]:
    """Error of the loss, and the largest of any gradient as a share of the largest gradient, on this rank."""
    whole = (make_llama if family == "llama" else make_gpt)(dtype, **changes)
    model = copy.deepcopy(whole)
    group = dist.group.WORLD
    cuts = apply_tensor_parallel(model, group, table=table_for(model), **options)
    want_loss, want = reference(whole.double())

    tokens, labels = batch()
    logits = model(tokens)
    loss = vocab_parallel_cross_entropy_sum(logits, labels, group, cuts["lm_head.weight"].offset[0])
    loss = loss / (labels != -100).sum()
    loss.backward()
    finish(model, {name: cut for name, cut in cuts.items() if not (skip_sum_of and skip_sum_of in name)})

    errors = [0.0]
    for name, parameter in model.named_parameters():
        expected = cuts[name].of(want[name], parameter.shape) if name in cuts else want[name]
        assert parameter.grad is not None, name
        assert parameter.grad.shape == expected.shape, name
        errors.append(float((parameter.grad - expected).abs().max()))
    largest = max(float(grad.abs().max()) for grad in want.values())
    return float((loss.detach() - want_loss).abs()), max(errors) / largest


def check(ranks: int, family: str, options: dict, *, dtypes: tuple = (torch.float64, torch.float32), **changes) -> None:
    for results in run_ranks(compare_all, ranks, family, dtypes, options, changes):
        for dtype, (loss, grad) in zip(dtypes, results, strict=True):
            assert loss <= TOLERANCE[dtype][0]
            assert grad <= TOLERANCE[dtype][1]


def compare_all(family: str, dtypes: tuple, options: dict, changes: dict) -> list[tuple[float, float]]:
    return [compare(family, dtype, options, changes) for dtype in dtypes]


PLAIN = {"sequence_parallel": False}
SEQUENCE = {"sequence_parallel": True}
ASYNC = {"sequence_parallel": True, "async_tp": True}
modes = pytest.mark.parametrize("mode", [PLAIN, SEQUENCE, ASYNC], ids=["tp", "tp+sp", "async"])


@modes
@pytest.mark.parametrize("ranks", [2, 4])
def test_llama_matches_one_process(ranks, mode):
    check(ranks, "llama", mode)


@modes
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpt_with_learned_positions_biases_and_a_tied_head_matches_one_process(ranks, mode):
    check(ranks, "gpt", mode)


@modes
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_ranks_are_replicated(mode, kv_heads):
    check(4, "llama", {**mode, "replicate_kv": True}, num_kv_heads=kv_heads)


@pytest.mark.parametrize("name", ["wk", "wv", "ffn_norm", "attention_norm"])
def test_without_the_sum_over_ranks_the_gradient_is_wrong(name):
    results = run_ranks(
        compare, 4, "llama", torch.float64, {**SEQUENCE, "replicate_kv": True}, {"num_kv_heads": 2}, skip_sum_of=name
    )
    assert max(grad for _, grad in results) > 0.01


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_vocabulary_that_does_not_divide_is_cut_unevenly(family):
    heads = {"num_heads": 6, "dim": 24, **({"num_kv_heads": 6} if family == "llama" else {})}
    check(2, family, SEQUENCE, vocab_size=97, **heads)
    check(3, family, PLAIN, vocab_size=97, **heads)


@modes
def test_tied_llama_matches_one_process(mode):
    check(4, "llama", mode, dtypes=(torch.float64,), tied_embeddings=True)
