"""Llama against a naive reference in float64: logits and every gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from naive import assert_matches, shaken
from titan_train.models import Llama, LlamaArgs
from torch import Tensor

ARGS = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "vocab_size": 61}


def make(**changes: object) -> Llama:
    return shaken(Llama(LlamaArgs(**{**ARGS, **changes})))  # type: ignore[arg-type]


def naive_llama(w: dict[str, Tensor], args: LlamaArgs, tokens: Tensor) -> Tensor:
    """Token by token and head by head, from the definitions; nothing shared with the package."""

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + args.norm_eps) * weight

    def rotate(x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        out = []
        for i in range(2 * half):
            f = args.rope_theta ** (-2 * (i % half) / (2 * half))
            wavelength = 2 * math.pi / f
            if args.rope_factor > 1:
                smooth = (args.rope_original_seq_len / wavelength - args.rope_low_freq_factor) / (
                    args.rope_high_freq_factor - args.rope_low_freq_factor
                )
                smooth = min(1.0, max(0.0, smooth))
                f = (1 - smooth) * f / args.rope_factor + smooth * f
            c, s = math.cos(position * f), math.sin(position * f)
            out.append(x[i] * c - x[i + half] * s if i < half else x[i] * c + x[i - half] * s)
        return torch.stack(out)

    def attention(x: Tensor, layer: str) -> Tensor:
        hd, groups = args.head_width, args.num_heads // args.num_kv_heads
        q, k, v = (x @ w[f"{layer}.attention.{n}.weight"].T for n in ("wq", "wk", "wv"))
        rows = []
        for s in range(x.shape[0]):
            heads = []
            for h in range(args.num_heads):
                mine, shared = slice(h * hd, (h + 1) * hd), slice(h // groups * hd, (h // groups + 1) * hd)
                turned = rotate(q[s, mine], s)
                scores = torch.stack([turned @ rotate(k[t, shared], t) / math.sqrt(hd) for t in range(s + 1)])
                weights = scores.exp() / scores.exp().sum()
                heads.append(sum(weights[t] * v[t, shared] for t in range(s + 1)))
            rows.append(torch.cat(heads))
        return torch.stack(rows) @ w[f"{layer}.attention.wo.weight"].T

    def feed_forward(x: Tensor, layer: str) -> Tensor:
        gate = x @ w[f"{layer}.feed_forward.w1.weight"].T
        up = x @ w[f"{layer}.feed_forward.w3.weight"].T
        return (gate / (1 + (-gate).exp()) * up) @ w[f"{layer}.feed_forward.w2.weight"].T

    logits = []
    for row in tokens.tolist():
        x = torch.stack([w["tok_embeddings.weight"][t] for t in row])
        for i in range(args.num_layers):
            x = x + attention(rms_norm(x, w[f"layers.{i}.attention_norm.weight"]), f"layers.{i}")
            x = x + feed_forward(rms_norm(x, w[f"layers.{i}.ffn_norm.weight"]), f"layers.{i}")
        logits.append(rms_norm(x, w["norm.weight"]) @ w.get("lm_head.weight", w["tok_embeddings.weight"]).T)
    return torch.stack(logits)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True, "head_dim": 16},
        {"rope_factor": 8.0, "rope_original_seq_len": 16, "num_kv_heads": 4},
    ],
    ids=["gqa", "tied-wide-heads", "mha-llama3.1-rope"],
)
def test_logits_and_every_gradient_match_the_naive_reference(changes: dict[str, object]) -> None:
    # all float64 but the cosines, stored in float32: 6e-8 relative to values of order 10
    assert_matches(make(**changes), naive_llama, 1e-6)


def test_the_future_does_not_reach_the_past() -> None:
    model = make()
    tokens = torch.randint(61, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 61
    assert torch.equal(model(tokens)[:, :8], model(changed)[:, :8])


def test_the_model_has_no_buffers_to_lose_on_the_meta_device() -> None:
    model = make()
    assert list(model.buffers()) == []
    want = model(torch.arange(9)[None])
    weights = model.state_dict()
    with torch.device("meta"):
        empty = Llama(model.args)
    empty.to_empty(device="cpu").double().load_state_dict(weights)
    assert torch.equal(empty(torch.arange(9)[None]), want)


def test_bfloat16_model_stays_near_float32() -> None:
    model = make().float()
    tokens = torch.randint(61, (2, 32))
    want = model(tokens).detach()
    got = model.bfloat16()(tokens).detach()
    assert got.dtype == torch.bfloat16
    # 2 layers of bfloat16 (8 bits of mantissa) on logits with standard deviation about 1
    assert float((got.float() - want).abs().max()) < 0.1 * float(want.std()) + 0.05


def test_blocks_compile_to_one_graph_each_and_never_again() -> None:
    model = make().float()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    batches = [torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    documents = [torch.tensor([[0, 4 + i, 16, 16], [0, 16, 16, 16]], dtype=torch.int32) for i in range(3)]
    want = [model(t, cu_seqlens=cu).detach() for t, cu in zip(batches, documents, strict=True)]
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=backend)
    for i, (tokens, cu_seqlens) in enumerate(zip(batches, documents, strict=True)):
        got = model(tokens, cu_seqlens=cu_seqlens)
        got.sum().backward()
        assert torch.equal(got.detach(), want[i])
        assert len(graphs) <= 2  # one a layer at most; new documents and a new context object bring no other


def test_taking_a_layer_out_keeps_the_names_of_the_others() -> None:
    model = make()
    del model.layers["0"]
    assert next(name for name in model.state_dict() if name.startswith("layers.")).startswith("layers.1.")
    assert model(torch.arange(5)[None]).shape == (1, 5, 61)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 3}, ["num_kv_heads=3", "num_heads=4", "nearest valid choice is 2"]),
        ({"dim": 33}, ["dim=33", "dim=32"]),
        ({"head_dim": 5}, ["head_dim=5", "6"]),
        ({"num_layers": 0}, ["num_layers=0", "1"]),
        ({"rope_factor": 0.5}, ["rope_factor=0.5"]),
        ({"rope_theta": 0.0}, ["rope_theta=0.0"]),
        ({"rope_low_freq_factor": 9.0}, ["rope_low_freq_factor=9.0", "rope_high_freq_factor=4.0"]),
    ],
)
def test_shapes_that_cannot_work_are_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"model\.args") as caught:
        LlamaArgs(**{**ARGS, **changes})  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
