"""QK-clip against the plain formula: logits, and what clipping makes of them."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from titan_train.config.compute import ActivationsConfig
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, init_for
from titan_train.models.common.attention import SequenceContext
from titan_train.parallel import qk_clip
from titan_train.parallel.activations.recompute import KeepCostly, apply_activation_checkpointing
from titan_train.parallel.qk_clip import QKClip, attention_layers, check_qk_clip, largest_logits
from titan_train.parallel.structure import blocks_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0, 9, 24, 24], [0, 5, 11, 24]], dtype=torch.int32)


def built(name, **args):
    model = build_model(ModelConfig(name=name, args=args, seq_len=32), vocab_size=None, device="cpu").double()
    init = init_for(model)
    with torch.no_grad():
        for i, (fqn, parameter) in enumerate(model.named_parameters()):
            init(fqn, parameter, torch.Generator().manual_seed(i))
            if parameter.ndim == 2 and ".attention." in fqn:
                parameter.mul_(8)
            elif fqn.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(i))
    return model


def plain_logits(model, cu_seqlens):
    """By layer ``[H]``: of whole matrices with a mask, from what reaches the attention."""
    found = {}

    def keep(number):
        def hook(_module, args):
            q, k, _, context = args
            k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
            scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
            positions = context.positions.expand(len(q), -1)
            documents = (positions == 0).cumsum(-1)
            seen = torch.ones(q.shape[1], q.shape[1]).tril().bool()
            if cu_seqlens is not None:
                seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
            found[number] = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3)).float()

        return hook

    hooks = [m.inner_attention.register_forward_pre_hook(keep(n)) for n, m in attention_layers([model])]
    with torch.no_grad():
        model.eval()(TOKENS, cu_seqlens=cu_seqlens)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("llama3_debug", {"num_layers": 1}),
        ("gpt_debug", {"num_layers": 1}),
        ("deepseek_debug", {"num_layers": 1, "q_lora_rank": 0}),
        ("deepseek_debug", {"num_layers": 1, "q_lora_rank": 16}),
    ],
)
def test_a_head_beyond_the_threshold_gives_the_threshold_for_the_same_tokens(name, args, packed, monkeypatch):
    monkeypatch.setattr("titan_train.parallel.qk_clip._BLOCK_BYTES", {"cpu": 4 << 10})  # several blocks
    model = built(name, **args)
    documents = DOCUMENTS if packed else None
    before = plain_logits(model, documents)[0]
    threshold = float(before.sort().values[len(before) // 2 - 1 : len(before) // 2 + 1].mean())
    clip = QKClip([model], threshold, num_layers=1, device=torch.device("cpu"))
    model.train()
    with torch.no_grad():
        for row in range(2):  # micro-batches
            model(TOKENS[row : row + 1], cu_seqlens=None if documents is None else documents[row : row + 1])
    assert float(clip.share()) == pytest.approx(float(before.max()), rel=1e-6)
    untouched = {n: p.clone() for n, p in model.named_parameters() if not any(w in n for w in ("wq", "wk"))}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    clip.clip()
    after = plain_logits(model, documents)[0]
    torch.testing.assert_close(after, before.clamp(max=threshold), rtol=1e-5, atol=0)
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in untouched.items())
    weights = {n: p.clone() for n, p in model.named_parameters()}
    clip.clip()  # nothing was measured since
    assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())


def test_what_is_frozen_in_a_step_is_not_clipped():
    """``optimizer.frozen_steps`` drops the gradients of what it does not train yet."""
    model = built("llama3_debug", num_layers=2)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    clip = QKClip([model], 1e-3, num_layers=2, device=torch.device("cpu"))
    model.train()(TOKENS).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("layers.0."):
            parameter.grad = None
    clip.share()
    clip.clip()
    changed = {n for n, p in model.named_parameters() if not torch.equal(weights[n], p)}
    assert changed == {f"layers.1.attention.{name}.weight" for name in ("wq", "wk")}


def test_attention_named_as_in_transformers_is_refused_in_modules_for_tokens_ahead():
    model = nn.Module()
    model.mtp = nn.ModuleList([nn.Module()])
    model.mtp[0].attention = nn.Module()
    model.mtp[0].attention.inner_attention, model.mtp[0].attention.k_proj = nn.Identity(), nn.Linear(8, 8)
    with pytest.raises(ValueError, match="no attention whose queries and keys are known"):
        list(attention_layers([model]))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen3_debug", {}, "normalizes queries and keys by head"),
        ("flux_tiny", {}, "has no attention whose queries and keys are known"),
        ("llama3_debug", {"compiled": True}, "Set compile.enabled=false"),
        ("llama3_debug", {"replicate_kv": True}, "parallel.replicate_kv=false"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(name, settings, message):
    model = build_model(ModelConfig(name=name), vocab_size=None)
    with pytest.raises(ValueError, match=message):
        check_qk_clip(model, **{"compiled": False, "replicate_kv": False} | settings)


def test_selective_recomputation_keeps_no_logits(monkeypatch):
    kept, leave = [], KeepCostly.__exit__

    def leave_and_count(region, *exc):
        leave(region, *exc)
        kept.append(sum(tensor.nbytes for tensor in region.kept_tensors()))

    monkeypatch.setattr(KeepCostly, "__exit__", leave_and_count)
    for measured in (False, True):
        model = built("llama3_debug", num_layers=1)
        apply_activation_checkpointing(
            model, blocks_of(model), ActivationsConfig(checkpoint="selective", matmul_every=0)
        )
        if measured:
            QKClip([model], 1.0, num_layers=1, device=torch.device("cpu"))
        model.train()(TOKENS).sum().backward()
    without, with_logits = kept
    assert without == with_logits > 0


class Products(TorchDispatchMode):
    """Shapes and dtypes of the results of matrix products; how many elements are masked."""

    def __init__(self):
        super().__init__()
        self.results, self.masked = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.results.append((out.numel(), out.dtype))
        elif func is torch.ops.aten.masked_fill_.Scalar:
            self.masked += out.numel()
        return out


def measured(device, q, k, packed):
    """Products and the result of measuring queries and keys of these shapes, on a fake device if it is a GPU."""
    with FakeTensorMode() if device == "cuda" else nullcontext(), Products() as products:
        context = SequenceContext(
            torch.arange(q[1], device=device)[None],
            torch.tensor([[0, q[1]]] * q[0], device=device) if packed else None,
        )
        q, k = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in (q, k))
        return products, largest_logits(q, k, context)


@pytest.mark.parametrize("packed", [False, True])
def test_logits_behind_a_block_are_not_computed_and_those_before_it_are_masked_in_packed_rows_alone(
    packed, monkeypatch
):
    monkeypatch.setattr(qk_clip, "_BLOCK_BYTES", {"cpu": 2 * 4 * 64 * 8 * 4})  # 8 of 64 queries of 2 rows and 4 heads
    products, _ = measured("cpu", (2, 64, 4, 16), (2, 64, 2, 16), packed)
    pairs = sum(8 * end for end in range(8, 65, 8))
    assert [numel for numel, _ in products.results] == [2 * 4 * 8 * end for end in range(8, 65, 8)]
    assert products.masked == 2 * 4 * (pairs if packed else 8 * 8 * 8)


def test_a_gpu_takes_large_products_in_the_dtype_of_activations_and_a_maximum_in_float32():
    products, largest = measured("cuda", (1, 8192, 32, 128), (1, 8192, 8, 128), packed=False)
    block = 2048 * 32  # queries and heads, 1 GiB with 8192 keys
    assert products.results == [(block * end, torch.bfloat16) for end in (2048, 4096, 6144, 8192)]
    assert (largest.shape, largest.dtype) == ((32,), torch.float32)


def test_one_block_of_logits_is_there_at_a_time(monkeypatch):
    blocks, einsum = [], torch.einsum

    def counted(*args):
        assert not any(block() is not None for block in blocks)
        out = einsum(*args)
        blocks.append(weakref.ref(out))
        return out

    monkeypatch.setattr(torch, "einsum", counted)
    monkeypatch.setattr(qk_clip, "_BLOCK_BYTES", {"cpu": 1})
    measured("cpu", (1, 4, 2, 8), (1, 4, 2, 8), packed=False)
    assert len(blocks) == 4


def test_what_is_recomputed_is_measured_once(monkeypatch):
    measurements = []
    monkeypatch.setattr(qk_clip, "largest_logits", lambda *args: measurements.append(args) or largest_logits(*args))
    model = built("llama3_debug", num_layers=2)
    apply_activation_checkpointing(model, blocks_of(model), ActivationsConfig(checkpoint="full"))
    QKClip([model], 1.0, num_layers=2, device=torch.device("cpu"))
    model.train()(TOKENS).sum().backward()
    assert len(measurements) == 2
