"""Attention within a window and of packed documents: the kernel that is taken, and what each computes.

No GPU: torch's varlen_attn is a stub with its signature here, and flex_attention runs without gradients.
"""

import functools
import sys
from pathlib import Path

import pytest
import torch
from titan_cp import backends
from titan_cp.backends import kernel_choices
from titan_train.models.common import packed, windowed
from titan_train.models.common.packed import packed_attention, plain_attention
from titan_train.models.common.windowed import _flex, plain_windowed, windowed_attention

ROWS, SEQ, WINDOW = 2, 48, 7
BOUNDARIES = torch.tensor([0, 1, 20, 48, 48, 50, 96], dtype=torch.int32)


@pytest.fixture(autouse=True)
def untried():
    backends.forget_choices()
    packed.varlen.cache_clear()
    yield
    backends.forget_choices()
    packed.varlen.cache_clear()


def inputs(heads=4, key_heads=2, width=8, value_width=8):
    make = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
    return [torch.randn(ROWS, SEQ, *shape, generator=make).requires_grad_() for shape in shapes]


def mask():
    of = torch.searchsorted(BOUNDARIES, torch.arange(ROWS * SEQ), right=True).unflatten(0, (ROWS, SEQ))
    apart = torch.arange(SEQ)[:, None] - torch.arange(SEQ)[None]
    return ((of[:, :, None] == of[:, None]) & (apart >= 0) & (apart < WINDOW))[:, None]


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """torch's function, from whole scores."""
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa or groups == 1
    k, v = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    of = torch.searchsorted(cu_seq_q, torch.arange(query.shape[0]).int(), right=True)
    apart = torch.arange(query.shape[0])[:, None] - torch.arange(query.shape[0])
    left, right = (x if x >= 0 else query.shape[0] for x in window_size)
    seen = (of[:, None] == of) & (apart <= left) & (-apart <= right)
    scores = torch.einsum("qhd,khd->hqk", query, k) * query.shape[-1] ** -0.5
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def put_varlen(monkeypatch, function):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    for module in (packed, windowed):
        monkeypatch.setattr(module, "flash_problem", lambda q, v: None)


def gradients(out, wanted):
    return torch.autograd.grad(out.square().sum(), wanted)


def close(found, wanted):
    return all(torch.allclose(x, y, atol=1e-4) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 3.0, 0.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("value_width", [8, 6])
def test_flex_attention_gives_the_masks_values(sinks, value_width):
    """With values alone: it has no backward on the CPU."""
    q, k, v = (x.detach() for x in inputs(value_width=value_width))
    found = _flex(q, k, v, BOUNDARIES, WINDOW, sinks)
    assert torch.allclose(
        found, windowed_attention(q, k, v, mask(), boundaries=BOUNDARIES, window=WINDOW, sinks=sinks), atol=1e-5
    )
    assert torch.allclose(found, plain_windowed(q, k, v, BOUNDARIES, WINDOW, sinks), atol=1e-5)


@pytest.mark.gpu
def test_flex_attention_on_a_gpu_with_its_mask_by_a_compiled_function_gives_the_plain_values():
    q, k, v = (x.detach().cuda() for x in inputs(width=32, value_width=32))
    found, want = (run(q, k, v, BOUNDARIES.cuda(), WINDOW, None) for run in (_flex, plain_windowed))
    torch.testing.assert_close(found, want, atol=2e-2, rtol=0)  # TF32


@pytest.mark.parametrize("documents", [True, False])
def test_a_window_takes_varlen_attention_where_it_is_equal(monkeypatch, documents):
    put_varlen(monkeypatch, varlen_attn)
    given = inputs()
    apart = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    near = mask() if documents else ((apart >= 0) & (apart < WINDOW))[None, None]
    found = windowed_attention(*given, near, boundaries=BOUNDARIES if documents else None, window=WINDOW)
    assert [choice.used.name for choice in kernel_choices()] == ["torch's varlen_attn"]
    want = windowed._with_mask(*given, near, None)
    assert close([found, *gradients(found, given)], [want, *gradients(want, given)])
    sinks = torch.zeros(4, requires_grad=True)
    windowed_attention(*given, near, boundaries=BOUNDARIES if documents else None, window=WINDOW, sinks=sinks)
    assert "has no sinks" in str(kernel_choices()[-1])
    assert kernel_choices()[-1].used.name == "torch"


def test_a_window_that_is_off_by_one_is_left(monkeypatch):
    @functools.wraps(varlen_attn)
    def wider(*args, window_size, **keywords):
        return varlen_attn(*args, window_size=(window_size[0] + 1, 0), **keywords)

    put_varlen(monkeypatch, wider)
    given = inputs()
    found = windowed_attention(*given, mask(), boundaries=BOUNDARIES, window=WINDOW)
    (choice,) = kernel_choices()
    assert choice.used.name == "torch"
    assert choice.refused
    assert torch.equal(found, windowed._with_mask(*given, mask(), None))


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_form_of_packed_attention_is_what_the_cpus_operator_computes(causal):
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in inputs(value_width=6)]
    both = [run(*flat, BOUNDARIES, 46, causal=causal) for run in (plain_attention, packed_attention)]
    assert close(*([out, *gradients(out, flat)] for out in both))


def test_packed_attention_passes_over_kernels_that_raise_or_differ(monkeypatch):
    @functools.wraps(varlen_attn)
    def larger(*args, **keywords):
        return varlen_attn(*args, **keywords) * 1.01

    put_varlen(monkeypatch, larger)
    q, k, v = (x.flatten(0, 1) for x in inputs())
    assert packed._choose(q, k, v, True, packed._flash) is plain_attention
    (choice,) = kernel_choices()
    assert "differs from torch's by 1.0e-02" in choice.reasons["torch's varlen_attn"]
    assert "its first call raised" in choice.reasons["memory-efficient attention"], "it has no form for the CPU"
    backends.forget_choices()
    packed.varlen.cache_clear()
    put_varlen(monkeypatch, varlen_attn)
    assert packed._choose(q, k, v, True, packed._flash) is packed._flash


def windowed_model(folder):
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders
    import titan_fsdp
    from titan_train.config.model import ModelConfig
    from titan_train.models import build_model, init_for

    made = hf_folders.make(folder / "mistral", "mistral")  # a window of 7
    model = build_model(ModelConfig(name=f"hf:{made}", seq_len=32), vocab_size=96)
    titan_fsdp.materialize(model, "cpu", init_for(model), seed=3)
    return model


@pytest.mark.parametrize("how", ["by a kernel", "by a mask", "recomputed", "compiled"])
def test_a_mask_is_made_once_for_a_forward_and_never_for_a_kernel(how, tmp_path, monkeypatch):
    from titan_train.config import ActivationsConfig, CompileConfig
    from titan_train.models.hf import attention, decoder
    from titan_train.parallel.activations.recompute import apply_activation_checkpointing
    from titan_train.parallel.compiled import compile_blocks

    made, make = [], attention.window_mask
    ids = torch.randint(96, (2, 32), generator=torch.Generator().manual_seed(1))
    rows = {"cu_seqlens": torch.tensor([[0, 10, 32], [0, 20, 32]], dtype=torch.int32)}
    monkeypatch.setattr(decoder, "window_mask", lambda *args, **given: made.append(args) or make(*args, **given))
    model = windowed_model(tmp_path)
    blocks = model.repeated_layers()
    if how == "by a kernel":
        kernel = backends.TrialKernel("torch's varlen_attn", plain_windowed)
        monkeypatch.setattr(windowed, "_choose", lambda *unused: kernel)
    if how == "recomputed":
        apply_activation_checkpointing(model, blocks, ActivationsConfig(checkpoint="full"))
    if how == "compiled":
        compile_blocks(blocks, CompileConfig(backend="aot_eager"), ActivationsConfig(), whole_graph=True)
    weight = blocks[0].self_attn.q_proj.weight
    for forwards in (1, 2):
        logits = model(ids, **rows)
        (gradient,) = torch.autograd.grad(logits.square().sum(), weight)
        assert len(made) == (0 if how == "by a kernel" else forwards)
    monkeypatch.undo()
    plain = windowed_model(tmp_path)
    expected = plain(ids, **rows)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    of = plain.repeated_layers()[0].self_attn.q_proj.weight
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), of)[0], atol=1e-4, rtol=1e-4)
