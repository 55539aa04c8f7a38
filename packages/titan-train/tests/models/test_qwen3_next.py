"""Qwen3-Next against transformers: logits, every gradient, weights both ways, greedy text; and what it refuses."""

import itertools
import json
from typing import Any

import pytest
import torch
from titan_ckpt import import_hf
from titan_train.config import ActivationsConfig, Float8Config
from titan_train.config.model import ModelConfig
from titan_train.generation import generate
from titan_train.models import Qwen3Next, Qwen3NextArgs, build_model, init_for
from titan_train.models.common.delta import GatedDeltaNet
from titan_train.models.common.recomputed import recomputed
from titan_train.models.qwen3_next.hf import QWEN3_NEXT_HF, args_from_hf, config_of, key_map, settings_of
from titan_train.parallel.activations.recompute import KeepCostly, apply_activation_checkpointing
from titan_train.parallel.float8 import convert_to_float8
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ARGS: dict[str, Any] = {
    "dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope_dim": 8, "delta_heads": 4,
    "delta_key_heads": 2, "delta_key_dim": 16, "delta_value_dim": 16, "vocab_size": 97,
}  # fmt: skip
DENSE = {"ffn_dim": 96}
SPARSE = {"num_experts": 8, "experts_per_token": 3, "expert_ffn_dim": 32, "num_shared_experts": 2}
LAST = DENSE | {"attention_every": 3, "num_layers": 3, "delta_taps": 2, "tied_embeddings": True}


def make(**changes: Any) -> Qwen3Next:
    model = Qwen3Next(Qwen3NextArgs(**{**ARGS, **changes}))
    init = init_for(model)
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(i))
        # away from the initial values, where logits are near zero; further away a state may recall next to nothing, which
        # the norm behind it magnifies with its rounding (6e-5 of float64 in both implementations at 0.1)
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + i)), alpha=0.03)
    return model


def published(model: Qwen3Next, folder: Any) -> nn.Module:
    """transformers' model with the weights of ours, through a folder."""
    theirs = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**config_of(model.args))).eval()
    names = key_map(model.args)
    ours = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            found = [(pair, letters) for pair, letters in names.match_hf(name)]
            parts = [
                ours[pair.native.format(**letters)] for pair, letters in found if pair.native.format(**letters) in ours
            ]
            tensor.copy_(torch.cat(parts, 1 if "gate_up" in name else 0))
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("changes", [DENSE, SPARSE, LAST], ids=["dense", "moe", "attention-last"])
def test_logits_and_every_gradient_are_those_of_transformers_and_weights_come_back_bitwise(changes, tmp_path) -> None:
    ours = make(**changes)
    theirs = published(ours, tmp_path)
    again = Qwen3Next(args_from_hf(json.loads((tmp_path / "config.json").read_text())))
    import_hf(tmp_path, again, names=key_map(again.args))
    for name, parameter in ours.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name

    tokens = torch.randint(97, (2, 150), generator=torch.Generator().manual_seed(1))  # three chunks of the state layer
    probe = torch.randn(2, 150, 97, generator=torch.Generator().manual_seed(2)) / 150
    got, want = ours(tokens), theirs(tokens).logits
    scale = float(want.detach().abs().max())
    assert scale > 0.5
    assert float((got - want).detach().abs().max()) < 1e-5 * scale  # float32 rounding, in another order
    (got * probe).sum().backward()
    (want * probe).sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    pairs = key_map(ours.args)
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for name, parameter in ours.named_parameters():
        pair, letters = pairs.match_native(name)
        grad = _their_gradient(pair, letters, expected, parameter)
        assert parameter.grad is not None
        error = float((parameter.grad - grad).abs().max())
        # a decay's gradient is a small difference of large terms, whose rounding it has
        assert error < 2e-5 * max(float(grad.abs().max()), 0.05 * largest), name


def _their_gradient(pair: Any, letters: Any, expected: dict[str, Tensor], parameter: Tensor) -> Tensor:
    name = pair.hf.format(**{"j": "{j}", **letters})
    if "{j}" in name:  # transformers stacks experts, gate and up in one
        stack, _, leaf = name.partition(".{j}.")
        if leaf == "down_proj.weight":
            return expected[f"{stack}.down_proj"]
        return expected[f"{stack}.gate_up_proj"].chunk(2, 1)[leaf.startswith("up")]
    whole = expected[name]
    return whole if pair.rows is None else whole.narrow(0, *pair.rows)


def test_greedy_text_is_that_of_transformers_with_and_without_the_cache(tmp_path) -> None:
    ours = make(**SPARSE)
    theirs = published(ours, tmp_path)
    prompts = [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 3, 1)]
    want = [
        theirs.generate(
            torch.tensor([row]),
            attention_mask=torch.ones(1, len(row)),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )[0, len(row) :].tolist()
        for row in prompts
    ]
    assert generate(ours, prompts, max_new_tokens=12) == want  # rows of different lengths side by side
    assert generate(ours, prompts, max_new_tokens=12, use_cache=False) == want
    assert generate(ours, prompts, max_new_tokens=12, multiple_of=2) == want


def test_documents_of_a_row_stay_apart_and_the_future_does_not_reach_the_past() -> None:
    model = make(**DENSE).double()
    tokens = torch.randint(97, (1, 140), generator=torch.Generator().manual_seed(3))
    bounds = [0, 1, 2, 67, 70, 140]
    packed = model(tokens, cu_seqlens=torch.tensor([bounds], dtype=torch.int32))
    for start, stop in itertools.pairwise(bounds):
        assert torch.allclose(packed[:, start:stop], model(tokens[:, start:stop]), atol=1e-9)
    changed = tokens.clone()
    changed[0, 100:] = (changed[0, 100:] + 1) % 97
    assert torch.allclose(model(tokens)[:, :100], model(changed)[:, :100], atol=1e-9)


def test_backward_keeps_of_a_state_layer_what_its_projections_gave() -> None:
    layer = GatedDeltaNet(64, Qwen3NextArgs(**ARGS, **DENSE).delta(), 1e-6)
    model = make(**DENSE)
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    context = model.sequence_context(tokens, None, None)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        layer(torch.randn(1, 256, 64, requires_grad=True), context)
    # projections' results, the layer's own, its norm, gate and product: a chunk's matrices would be ten times as much
    assert sum(kept.values()) < 4 * 256 * (64 + layer.wqkvz.out_features + 8 + 8 * 64) + 4 * sum(
        p.numel() for p in layer.parameters()
    )


def test_a_compiled_block_is_as_large_for_a_long_row_as_for_a_short_one() -> None:
    """The chunks of a state layer are in no graph, which would unroll them."""
    nodes: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    model, by_length = make(**DENSE).double(), []
    for length in (64, 512):
        tokens = torch.randint(97, (1, length), generator=torch.Generator().manual_seed(1))
        want, got = [], []
        for found, compiled in ((want, False), (got, True)):
            torch._dynamo.reset()
            for block in model.layers.values():
                block._compiled_call_impl = None
                if compiled:
                    block.compile(backend=count)
            model.zero_grad()
            logits = model(tokens)
            logits.square().mean().backward()
            found += [logits, *(p.grad for p in model.parameters())]
        assert torch.equal(want[0], got[0])
        for a, b in zip(want[1:], got[1:], strict=True):
            # a residual stream's gradients are added in another order
            assert (a - b).abs().max() <= 1e-12 * a.abs().max()
        by_length.append(sum(nodes))
        nodes.clear()
    assert by_length[0] == by_length[1]


def test_selective_recomputation_keeps_nothing_of_what_runs_again() -> None:
    """A chunk's products are many times as large as the projections, which are kept."""
    model = make(**DENSE)
    block = next(iter(model.layers.values()))
    apply_activation_checkpointing(block, [block], ActivationsConfig(checkpoint="selective"))
    kept: list[int] = []
    own = KeepCostly.__exit__

    def look(self: Any, *exc: Any) -> None:
        own(self, *exc)
        kept.append(sum(t.untyped_storage().nbytes() for t in self.kept_tensors()))

    tokens = torch.randint(97, (1, 512))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeepCostly, "__exit__", look)
        model(tokens)
    delta, width = block.delta, model.args.dim
    most = delta.wqkvz.out_features + delta.wba.out_features + 2 * width + 2 * DENSE["ffn_dim"]
    assert 0 < kept[0] <= 4 * 512 * most


def test_a_state_layer_gives_all_gradients_at_once_where_a_pipeline_would_take_them_apart() -> None:
    x, weight = torch.randn(3, requires_grad=True), nn.Parameter(torch.randn(3))
    out = recomputed(torch.mul, x, weight)
    out.grad_fn.needs_input_grad = (False, True, False)  # titan-pipeline strikes a parameter for the first half
    out.sum().backward()
    assert torch.equal(weight.grad, x)  # FSDP may have freed it before the second


def test_a_state_layer_takes_a_norm_that_float8_has_yet_to_apply() -> None:
    wide = {"dim": 128, "head_dim": 32, "delta_key_dim": 32, "delta_value_dim": 32, "ffn_dim": 128}
    tokens, logits = torch.randint(97, (1, 16)), []
    for fused in (True, False):
        model = make(**wide)  # whole blocks of 128
        convert_to_float8(model, Float8Config(recipe="blockwise", min_speedup=0.0), tokens=16, fuse_norms=fused)
        logits.append(model(tokens))
    fused, apart = logits  # a norm that is summed in another order may round to the next float8
    assert (fused - apart).norm() < 0.05 * apart.norm()


def test_a_decay_keeps_its_published_range_and_norms_start_at_zero() -> None:
    model = build_model(ModelConfig(name="qwen3_next_debug"), vocab_size=None, device="cpu")
    init = init_for(model)
    for fqn, parameter in model.named_parameters():
        init(fqn, parameter.data, torch.Generator().manual_seed(0))
    values = {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}
    decay = values["layers.0.delta.decay.weight"].exp()
    assert 0.01 <= float(decay.min()) <= float(decay.max()) <= 16.001
    assert float(values["layers.0.delta.decay.bias"].min()) == 1
    for name in ("norm", "layers.0.attention_norm", "layers.3.attention.q_norm"):
        assert float(values[f"{name}.weight"].abs().max()) == 0, name
    assert float(values["layers.0.delta.gated_norm.weight"].min()) == 1


CONFIG = config_of(Qwen3NextArgs(**ARGS, **SPARSE))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention", *["linear_attention"] * 3]}, ["layer_types=", "every k-th block"]),
        ({"layer_types": ["linear_attention"] * 3}, ["layer_types="]),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, ["sliding_attention"]),
        ({"shared_expert_intermediate_size": 40}, ["shared_expert_intermediate_size=40", "32"]),
        ({"mlp_only_layers": [1]}, ["mlp_only_layers=[1]"]),
        ({"decoder_sparse_step": 2}, ["decoder_sparse_step=2"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type='dynamic'"]),
    ],
)
def test_a_config_that_means_another_model_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    assert settings_of(args_from_hf(CONFIG)) == settings_of(Qwen3NextArgs(**ARGS, **SPARSE))
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        args_from_hf(CONFIG | changes)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({**DENSE, "delta_key_heads": 3}, ["delta_key_heads=3", "nearest valid choice is 2"]),
        ({**DENSE, "rope_dim": 7}, ["rope_dim=7", "8"]),
        ({**DENSE, "rope_dim": 32}, ["rope_dim=32", "16"]),
        ({}, ["ffn_dim=0", "num_experts=0"]),
        ({**SPARSE, "experts_per_token": 9}, ["experts_per_token=9", "8"]),
    ],
)
def test_shapes_that_cannot_work_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"model\.args") as caught:
        Qwen3NextArgs(**{**ARGS, **changes})
    assert all(word in str(caught.value) for word in words)


def test_experts_without_a_shared_one_are_not_written_for_transformers() -> None:
    with pytest.raises(ValueError, match="num_shared_experts=0"):
        config_of(Qwen3NextArgs(**ARGS, **{**SPARSE, "num_shared_experts": 0}))
    assert QWEN3_NEXT_HF.kinds == ("qwen3_next",)
