"""Float8 layers under accumulation and under schedules that split backward."""

import contextlib
import copy
import functools
import json
import re
from pathlib import Path

import pytest
import titan_fp8
import torch
from float8_casts import Casts
from titan_pipeline.runtime import TorchStage, WeightGradEngine
from titan_train.config import ActivationsConfig, Float8Config, ModelConfig, load_config
from titan_train.models import DeepSeek, DeepSeekArgs, Llama, LlamaArgs, Qwen3, Qwen3Args, build_model
from titan_train.models.common.moe.experts import Experts
from titan_train.models.common.shared_input import GatedInput
from titan_train.parallel.activations.recompute import apply_activation_checkpointing
from titan_train.parallel.float8 import DEFERRING_RULES, GeluFloat8Input, convert_to_float8, gathers_float8_weights
from titan_train.parallel.head_loss import fuse_head_loss

ARGS = LlamaArgs(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=64)
LINEARS = 7 * ARGS.num_layers
RECIPES = ["tensorwise", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8"]


def make(recipe):
    torch.manual_seed(0)
    model = Llama(ARGS)
    convert_to_float8(model, Float8Config(recipe=recipe, min_speedup=0.0), tokens=64)
    return model


def loss_of(model, seed=0):
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(seed))
    return model(tokens).square().mean()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def worst(got, want):
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).norm() / want[name].norm()) for name in want)


@pytest.mark.parametrize("declared", [False, True])
def test_weights_are_cast_once_a_step_where_the_step_is_declared(declared):
    model, microbatches = make("blockwise"), 3
    constant = titan_fp8.ConstantWeights(model) if declared else contextlib.nullcontext()
    for step in range(2):
        with Casts() as casts, constant:
            for index in range(microbatches):
                loss_of(model, index).backward()
        per_step = 1 if declared else 2 * microbatches
        # forward needs the rows alone; a kept cast has both layouts
        made = casts.calls["cast_weight_block"] + casts.calls["cast_weight_rows"]
        assert made == LINEARS * per_step, step
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        model.zero_grad()


def test_every_float8_layer_is_recorded_and_runs_its_hooks():
    model = make("blockwise")
    want = loss_of(model)
    want.backward()
    gradients_alone = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    seen = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
        for name, module in model.named_modules()
        if isinstance(module, titan_fp8.Float8Linear)
    ]
    with titan_fp8.record_stats(model) as found:
        loss = loss_of(model)
        loss.backward()
    assert torch.equal(loss, want)
    # an input's gradients are added in another order: a code may be the next one
    assert worst(gradients(model), gradients_alone) < 0.01
    assert len(found) == len(set(seen)) == len(seen) == LINEARS
    assert all(entry.keys() == {"input", "weight", "grad"} for entry in found.values())
    for handle in handles:
        handle.remove()
    with Casts() as casts:
        loss_of(model)
    assert casts.calls["swiglu_cast_block"] == ARGS.num_layers


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_before_forward_and_after_backward_run_too(register):
    model, seen = make("blockwise"), set()
    for name, module in model.named_modules():
        if isinstance(module, titan_fp8.Float8Linear):
            getattr(module, register)(lambda *_, name=name: seen.add(name))
    loss_of(model).backward()
    assert len(seen) == LINEARS


def test_an_observed_gelu_layer_runs_its_hooks():
    layer, seen = titan_fp8.Float8Linear(128, 128), []
    gelu, x = GeluFloat8Input(), torch.randn(4, 128)
    want = gelu(x, layer)
    layer.register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(gelu(x, layer), want, rtol=0.1, atol=0.05)  # another GELU: a code may be the next one
    assert seen == [1]


def weight_casts(casts):
    return casts.calls["cast_weight_block"] + casts.calls["cast_weight_rows"]


@pytest.mark.parametrize("rules", [None, DEFERRING_RULES], ids=["1f1b", "weight-pass"])
def test_weights_are_cast_once_over_the_microbatches_of_a_pipeline(rules):
    """Forwards of several microbatches before the first backward, as a pipeline's stages run them."""
    model = make("blockwise")
    engine = WeightGradEngine(model, rules)
    with Casts() as casts, titan_fp8.ConstantWeights(model):
        losses = []
        for index in range(3):
            with engine.recording():
                losses.append(loss_of(model, index))
        for loss in losses:
            with engine.deferring() as queue:
                loss.backward()
            queue.run()
    assert weight_casts(casts) == LINEARS


def family(name):
    torch.manual_seed(0)
    if name == "llama":
        return Llama(ARGS)
    if name == "qwen3":
        return Qwen3(
            Qwen3Args(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=64)
        )
    args = DeepSeekArgs(
        dim=64, num_layers=2, num_dense_layers=2, num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, ffn_dim=128, vocab_size=64, num_experts=4, experts_per_token=2, expert_ffn_dim=32,
    )  # fmt: skip
    return DeepSeek(args)


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek"])
def test_norms_and_swiglu_are_computed_in_the_pass_that_casts(name):
    model = family(name)
    convert_to_float8(model, Float8Config(recipe="blockwise", min_speedup=0.0), tokens=64)
    with Casts() as casts:
        loss_of(model).backward()
    layers = ARGS.num_layers
    assert casts.calls["rmsnorm_cast_block"] == casts.calls["rmsnorm_backward"] == 2 * layers
    assert casts.calls["swiglu_cast_block"] == casts.calls["swiglu_backward"] == layers
    assert casts.calls["swiglu"] == casts.calls["rmsnorm"] == 0
    # what is left: the other inputs (attention's output; DeepSeek's latent), and the gradient of every linear's output
    linears = sum(isinstance(m, titan_fp8.Float8Linear) for m in model.modules())
    others = {"llama": 1, "qwen3": 1, "deepseek": 2}[name]
    assert casts.calls["cast_block_dual"] == others * layers + linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek"])
def test_casting_in_the_pass_gives_the_bits_of_norm_and_swiglu_and_then_the_cast(name, dtype):
    found = []
    for fuse in (True, False):
        model = family(name).to(dtype)
        convert_to_float8(model, Float8Config(recipe="blockwise", min_speedup=0.0), tokens=64, fuse_norms=fuse)
        if not fuse:
            take_apart(model)
        loss = loss_of(model)
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1])


def take_apart(model):
    """Norms and SwiGLU as passes of their own, with the same roundings."""
    for block in model.layers.values():
        block.feed_forward.gated = GatedInput()
        for norm in (block.attention_norm, block.ffn_norm):
            norm.forward = functools.partial(titan_fp8.rms_norm, weight=norm.weight, eps=norm.eps)


def test_a_float8_head_and_the_fused_loss_are_refused():
    model = family("llama")
    convert_to_float8(model, Float8Config(recipe="blockwise", min_speedup=0.0, skip=("none of them",)), tokens=64)
    with pytest.raises(ValueError, match=r"Add 'lm_head' to float8\.skip, or set train\.fused_loss=false"):
        fuse_head_loss(model, z_loss=0.0, vocab_size=64)


def test_kept_casts_change_no_bit():
    models = [make("blockwise"), make("blockwise")]
    for model, declared in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        constant = titan_fp8.ConstantWeights(model) if declared else contextlib.nullcontext()
        for step in range(3):
            with constant:
                for index in range(2):
                    loss_of(model, 2 * step + index).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def split(model, rules):
    """Gradients by a split backward, and how many parameters waited for its second half."""
    engine = WeightGradEngine(model, rules)
    waiting = 0
    for index in range(2):
        with engine.recording():
            loss = loss_of(model, index)
        with engine.deferring() as queue:
            loss.backward()
        if index == 0:
            waiting = sum(p.grad is None for p in model.parameters())
        queue.run()
    return gradients(model), waiting


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_weight_gradients_of_float8_layers_wait_for_the_weight_pass(recipe, checkpoint):
    models = [make(recipe) for _ in range(3)]
    for model in models:
        apply_activation_checkpointing(model, list(model.layers.values()), ActivationsConfig(checkpoint=checkpoint))
    for index in range(2):
        loss_of(models[0], index).backward()
    want = gradients(models[0])
    fallback, few = split(models[1], None)
    got, many = split(models[2], DEFERRING_RULES)
    assert all(torch.equal(fallback[name], want[name]) for name in want)
    assert few == 2  # embedding and head
    assert many == LINEARS + 2
    # Gradients of an input that several linears share are added in another order: one bit of float32, but where that
    # changes a code it changes by a step, 2**-3 of one value at most.
    assert worst(got, want) <= 2**-6


def test_selective_recomputation_keeps_the_float8_products_that_it_is_to_keep():
    products = {}
    for checkpoint in ("none", "selective", "full"):
        model = make("blockwise")
        apply_activation_checkpointing(model, list(model.layers.values()), ActivationsConfig(checkpoint=checkpoint))
        with Casts() as counted:
            loss_of(model).backward()
        products[checkpoint] = counted.calls["scaled_mm"], gradients(model)
    layers = ARGS.num_layers
    assert products["none"][0] == 3 * LINEARS
    assert products["selective"][0] - products["none"][0] == 3 * layers  # each second of 7, as for other linears
    assert products["full"][0] - products["none"][0] > 3 * layers
    for checkpoint in ("selective", "full"):
        assert all(torch.equal(products[checkpoint][1][name], g) for name, g in products["none"][1].items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_of_float8_experts_wait_for_the_weight_pass(recipe):
    torch.manual_seed(0)
    experts = Experts(4, 128, 128).bfloat16()
    experts.grouped_mm = titan_fp8.Float8GroupedMM(recipe)
    whole = copy.deepcopy(experts)
    x, counts = torch.randn(256, 128, dtype=torch.bfloat16), torch.tensor([100, 0, 56, 100])
    direct = x.clone().requires_grad_()
    out = whole(direct, counts)
    grad = torch.randn_like(out)
    out.backward(grad)
    stage = TorchStage(experts, 1, rules=DEFERRING_RULES)
    stage.configure(True)
    stage.forward(0, (x,), None, {"counts": counts}, True)
    (input_grad,) = stage.backward(0, (grad,), True)
    assert all(p.grad is None for p in experts.parameters())
    assert stage.deferred_share == 1
    stage.backward_weight(0)
    assert torch.equal(input_grad, direct.grad)
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name


def test_skip_keeps_experts_out_of_float8_too():
    model = build_model(ModelConfig(name="qwen3_moe_debug"), vocab_size=64, device="meta")
    convert_to_float8(model, Float8Config(recipe="blockwise", skip=("layers.0.moe.experts", "lm_head")), tokens=64)
    names = [name for name, module in model.named_modules() if isinstance(module, titan_fp8.Float8GroupedMM)]
    assert names
    assert not any(name.startswith("layers.0.") for name in names)


@pytest.mark.parametrize("parallel", [{"reshard": 2}, {"reshard_overrides": {"layers.0": 2}}])
def test_weights_that_stay_sharded_over_some_ranks_are_gathered_in_high_precision(parallel):
    assert gathers_float8_weights(load_config("debug", float8={"recipe": "blockwise"}))
    assert not gathers_float8_weights(load_config("debug", float8={"recipe": "blockwise"}, parallel=parallel))


def test_the_patterns_of_the_guide_keep_the_head_in_high_precision():
    guide = (Path(__file__).parents[4] / "docs/guides/float8.md").read_text(encoding="utf-8")
    (patterns,) = re.findall(r"--float8\.skip '(\[.*?\])'", guide)
    assert titan_fp8.matching_pattern("lm_head", json.loads(patterns))
