"""The loss in the head, a chunk of tokens at a time, against the head, whole logits and cross-entropy."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import composition
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composition_check import compare
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, call_model
from titan_train.models.common.loss import LogitsChange, cross_entropy_sum
from titan_train.parallel import head_loss
from titan_train.parallel.head_loss import (
    LossHead,
    VocabShard,
    fuse_head_loss,
    head_chunk_rows,
    linear_cross_entropy_sum,
    locate_vocabulary,
)
from titan_train.parallel.layout.run import plan_run
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.plan import own_units
from titan_train.parallel.tensor.styles import table_for
from titan_train.planner.memory.ranks import estimate_ranks
from torch import nn

TOKENS, WIDTH = 210, 32


def inputs(vocab, dtype, ignored, bias):
    torch.manual_seed(0)
    hidden = (torch.randn(3, TOKENS // 3, WIDTH, dtype=torch.float64) * 0.3).to(dtype).requires_grad_()
    weight = torch.randn(vocab, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (3, TOKENS // 3))
    labels[:, :: 1 if ignored == "all" else 3] = labels[:, ::3] if ignored == "none" else -100
    return hidden, weight, torch.randn(vocab, dtype=dtype).requires_grad_() if bias else None, labels


def plain(hidden, weight, bias, labels, z_loss, change=None):
    """Loss, and the gradients of 0.3 times it, by autograd of whole logits."""
    wide = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    wide = wide if change is None else change(wide)
    loss = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")
    extra = z_loss * (wide.logsumexp(-1).square() * (labels != -100)).sum()
    wanted = [t for t in (hidden, weight, bias) if t is not None]
    return loss.detach(), torch.autograd.grad(0.3 * (loss + extra), wanted)


def relative(got, want):
    return float((got - want).abs().max()) / max(1.0, float(want.abs().max()))


# Logits are of order 2. float64: order of summation. float32: 1e-6 is 8 units in the last place of such a logit. bfloat16
# rounds logits to 8 bits, so 2^-8 of 4 in the logarithm of a probability, in both.
BOUND = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 0.02}


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [64, 70, 1000])
@pytest.mark.parametrize(("ignored", "bias"), [("none", False), ("some", True), ("all", False)])
def test_loss_and_gradients_match_whole_logits(ignored, bias, chunk, z_loss):
    for dtype, bound in BOUND.items():
        hidden, weight, shift, labels = inputs(97, dtype, ignored, bias)
        want, want_grads = plain(hidden, weight, shift, labels, z_loss)
        got = linear_cross_entropy_sum(hidden, weight, labels, bias=shift, z_loss=z_loss, chunk_tokens=chunk)
        grads = torch.autograd.grad(0.3 * got, [t for t in (hidden, weight, shift) if t is not None])
        assert relative(got.detach(), want) <= bound
        for found, wanted in zip(grads, want_grads, strict=True):
            assert found.dtype == wanted.dtype
            assert relative(found, wanted) <= bound
        with torch.no_grad():
            assert relative(linear_cross_entropy_sum(hidden, weight, labels, bias=shift), want) <= bound


CHANGES = [LogitsChange(scale=0.0625), LogitsChange(scale=1.3), LogitsChange(cap=3.0), LogitsChange(scale=0.7, cap=2.0)]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_logits_that_a_family_scales_or_caps_are_changed_in_the_loss(change):
    for dtype, bound in BOUND.items():
        for bias, z_loss in ((False, 0.0), (True, 1e-2)):
            hidden, weight, shift, labels = inputs(97, dtype, "some", bias)
            want, want_grads = plain(hidden, weight, shift, labels, z_loss, change)
            options = {"bias": shift, "z_loss": z_loss, "chunk_tokens": 64, "change": change}
            got = linear_cross_entropy_sum(hidden, weight, labels, **options)
            grads = torch.autograd.grad(0.3 * got, [t for t in (hidden, weight, shift) if t is not None])
            assert relative(got.detach(), want) <= bound
            for found, wanted in zip(grads, want_grads, strict=True):
                assert relative(found, wanted) <= bound


def sharded(vocab, dtype, z_loss, change=None):
    group = dist.group.WORLD
    hidden, weight, _, labels = inputs(vocab, dtype, "some", False)
    want, (want_hidden, want_weight) = plain(hidden, weight, None, labels, z_loss, change)
    start, length = own_units(vocab, group.size(), group.rank())
    own = weight.detach()[start : start + length].clone().requires_grad_()
    shard = VocabShard(group, start)
    got = linear_cross_entropy_sum(hidden, own, labels, z_loss=z_loss, shard=shard, chunk_tokens=64, change=change)
    of_hidden, of_weight = torch.autograd.grad(0.3 * got, (hidden, own))
    dist.all_reduce(of_hidden)
    return (
        got.item(),
        relative(got.detach(), want),
        relative(of_hidden, want_hidden),
        relative(of_weight, want_weight[start : start + length]),
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_vocabulary_cut_over_ranks_gives_the_loss_and_gradients_of_the_whole(ranks):
    for vocab, change in ((97, None), (4, None), (97, CHANGES[-1])):
        for dtype in (torch.float64, torch.float32):
            results = run_ranks(sharded, ranks, vocab, dtype, 1e-2, change)
            assert len({loss for loss, *_ in results}) == 1  # the same bits on every rank
            for _, *errors in results:
                assert max(errors) <= BOUND[dtype]


def cut_unevenly(vocab, tokens):
    """The loss of a tiny model whose ranks choose their chunks by themselves, and that of the whole."""
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(name="llama3_debug", args={"num_layers": 1, "vocab_size": vocab}), vocab_size=None, device="cpu"
    )
    whole = copy.deepcopy(model.lm_head)
    name, group = fuse_head_loss(model, z_loss=0.0, vocab_size=vocab), dist.group.WORLD
    table = table_for(model)
    cuts = apply_tensor_parallel(model, group, table=table, sequence_parallel=False)
    locate_vocabulary(model, name, cuts, table, group)
    hidden, labels = torch.randn(1, tokens, whole.in_features), torch.randint(0, vocab, (1, tokens))
    rows = model.lm_head.weight.shape[0]
    return (
        rows,
        float(model.lm_head(hidden, labels)),
        float(F.cross_entropy(whole(hidden)[0], labels[0], reduction="sum")),
    )


def test_ranks_of_an_uneven_vocabulary_choose_the_same_chunks():
    results = run_ranks(cut_unevenly, 2, 257, 5000)
    assert [rows for rows, *_ in results] == [128, 129]
    assert len({head_chunk_rows(rows, "cpu") for rows, *_ in results}) == 2  # alone each would choose another
    for _, found, wanted in results:
        assert found == pytest.approx(wanted, rel=1e-5)


def test_a_validation_makes_no_gradient(monkeypatch):
    made = []
    monkeypatch.setattr(head_loss, "_add_product", lambda *arguments, **_: made.append(arguments))
    hidden, weight, _, labels = inputs(97, torch.float32, "none", False)
    with torch.no_grad():
        linear_cross_entropy_sum(hidden, weight, labels)
    assert not made
    linear_cross_entropy_sum(hidden, weight, labels)
    assert made


def test_hidden_states_of_other_tokens_than_the_labels_are_refused():
    hidden, weight, _, labels = inputs(97, torch.float32, "none", False)
    with pytest.raises(ValueError, match=r"hidden states must be \[B, S, 32\]"):
        linear_cross_entropy_sum(hidden[:, 1:], weight, labels)


def test_a_second_backward_is_refused():
    hidden, weight, _, labels = inputs(97, torch.float32, "none", False)
    loss = linear_cross_entropy_sum(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward can run once"):
        loss.backward()


def peak_of_a_large_vocabulary():
    """Bytes that forward and backward add to this process, with logits of 1 GiB in float32."""
    import resource

    tokens, vocab, width = 2048, 128 * 1024, 32
    hidden = torch.randn(1, tokens, width).requires_grad_()
    weight = (torch.randn(vocab, width) * 0.1).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens))
    linear_cross_entropy_sum(hidden[:, :64], weight, labels[:, :64]).backward()  # libraries are loaded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    linear_cross_entropy_sum(hidden, weight, labels).backward()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_memory_at_a_vocabulary_of_128k_does_not_hold_the_logits():
    (grown,) = run_ranks(peak_of_a_large_vocabulary, 1, init=False)
    assert (
        grown < 160 << 20
    )  # three chunks of 32 MiB, and the weight's gradient of 16 MiB twice; the logits have 1024 MiB


SMALL = {"train": {"steps": 4}, "validation": {"every": 4, "steps": 1}}
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "cp2 fsdp2": (4, {"parallel": {"cp": 2, "dp_shard": 2}, "data": {"document_mask": True}}),
    "pp2 tp2": (4, {"parallel": {"pp": 2, "tp": 2}}),
}


@pytest.mark.parametrize(("layout", "tied"), [("one", True), ("tp2", False), ("cp2 fsdp2", False), ("pp2 tp2", True)])
def test_a_run_has_the_losses_and_gradients_of_whole_logits(layout, tied, folder):
    ranks, sections = LAYOUTS[layout]
    model = {
        "name": "llama3_debug",
        "seq_len": 32,
        "args": {"num_layers": 4, "num_kv_heads": 4, "tied_embeddings": tied},
    }
    found = {}
    for fused in (False, True):
        tree = {**SMALL, **sections, "model": model, "train": {"steps": 4, "fused_loss": fused, "z_loss": 1e-3}}
        name = f"{layout}-{tied}-{fused}".replace(" ", "-")
        found[fused] = run_ranks(composition.run, ranks, folder, name, tree, 4, init=ranks > 1, timeout_s=120)
    errors = compare_runs(found[False], found[True])
    # one step's sums in another order; four steps of AdamW amplify them
    assert errors.first_loss <= 1e-6
    assert errors.norm <= 1e-6
    assert errors.gradient <= 2e-6, errors
    assert errors.last_loss <= 1e-5
    assert errors.validation <= 1e-5


def compare_runs(want, got):
    merged = (*want[0][:3], {})
    whole = composition.assemble([boxes for *_, boxes in want])
    boxes = {name: (tuple(value.shape), (0,) * value.ndim, value) for name, value in whole.items()}
    return compare((*merged[:3], boxes), got)


def test_only_a_head_that_the_model_hands_labels_to_is_replaced():
    class Scaled(nn.Module):
        loss_head = "lm_head"

        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(8, 16)

        def forward(self, tokens, **inputs):  # would scale a loss as it scales logits
            return 0.5 * self.lm_head(tokens)

    assert fuse_head_loss(Scaled(), z_loss=0.0, vocab_size=16) is None
    config = parse_config({"model": {"name": "llama3_debug"}, "tokenizer": {"kind": "bytes"}})
    model = build_model(config.model, vocab_size=64, device="cpu")
    weight = model.lm_head.weight
    assert fuse_head_loss(model, z_loss=0.0, vocab_size=64) == "lm_head"
    assert isinstance(model.lm_head, LossHead)
    assert model.lm_head.weight is weight
    with pytest.raises(ValueError, match="gives 64 logits for 65 tokens"):
        fuse_head_loss(build_model(config.model, vocab_size=64), z_loss=0.0, vocab_size=65)


def test_logits_of_a_replaced_head_and_its_loss_agree():
    config = parse_config({"model": {"name": "gpt_debug"}, "tokenizer": {"kind": "bytes"}})
    model = build_model(config.model, vocab_size=64, device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    fuse_head_loss(model, z_loss=0.0, vocab_size=64)
    batch = composition_batch()
    logits = call_model(model, batch)
    assert logits.shape == (2, 16, 64)
    loss = call_model(model, batch, labels=batch.labels)
    want = cross_entropy_sum(logits, batch.labels)
    assert abs((loss - want).item()) <= 1e-6 * want.item()  # float32 sums of 32 terms


def composition_batch():
    from titan_train.data import Batch

    tokens = torch.arange(32).view(2, 16) % 64
    return Batch(tokens, (tokens * 7 + 3) % 64, torch.arange(16).expand(2, -1), None, 16, 0)


def test_the_estimate_of_a_large_vocabulary_holds_no_logits():
    peaks = {}
    for fused in (False, True):
        config = parse_config(
            {
                "model": {"name": "llama3_debug", "seq_len": 2048, "args": {"vocab_size": 65536}},
                "tokenizer": {"kind": "bytes"},
                "train": {"fused_loss": fused, "global_batch": 1},
            }
        )
        plan = plan_run(config, 1)
        model = build_model(config.model, vocab_size=None, device="meta")
        (rank,) = estimate_ranks(config, model, layout=plan.layout, mode=plan.mode, batch=plan.batch, schedule=None)
        peaks[fused] = rank.activations
    assert peaks[False] - peaks[True] > 2048 * 65536 * 4


def test_kernels_of_a_gpu_are_as_near_to_float64_as_plain_torch():
    """In Triton's interpreter: logits in bfloat16, tokens without a label, the z-loss, a vocabulary over ranks."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("head_loss_by_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for kernels, plain in json.loads(done.stdout.splitlines()[-1]):
        assert all(a <= 1.05 * b + 1e-6 for a, b in zip(kernels, plain, strict=True)), (kernels, plain)
