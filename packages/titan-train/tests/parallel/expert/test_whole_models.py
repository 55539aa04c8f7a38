"""Whole models with experts under FSDP2, tensor and sequence parallelism: loss, norm and every gradient of one process."""

from dataclasses import replace
from typing import Any

import pytest
import titan_fsdp as fsdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from titan_testing import assert_close, run_ranks
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, init_for
from titan_train.models.common.moe.balance import moe_layers, set_aux_scale, set_sequence_group, update_expert_bias
from titan_train.parallel.expert.apply import apply_expert_parallel, check_expert_parallel
from titan_train.parallel.param_shard import ParamShard
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.loss import vocab_parallel_cross_entropy_sum
from titan_train.parallel.tensor.styles import table_for
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

ROWS, SEQ = 4, 16
ARGS: dict[str, dict[str, Any]] = {
    "qwen3_debug": {},
    "qwen3_moe_debug": {"balance_loss": 0.05, "z_loss": 0.01},
    "deepseek_debug": {"balance_loss": 0.05, "z_loss": 0.01},
    "v2": {
        "balance_loss": 0.05, "q_lora_rank": 0, "num_shared_experts": 2, "scores": "softmax", "num_groups": 1,
        "top_groups": 1, "bias_rate": 0.0,
    },
}  # fmt: skip


def make(kind: str, dtype: torch.dtype) -> nn.Module:
    name = "deepseek_debug" if kind == "v2" else kind
    model = build_model(ModelConfig(name=name, args=ARGS[kind]), vocab_size=97, device="cpu")
    init = init_for(model)
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(i))
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + i))
        parameter.data.add_(noise, alpha=0.1)  # away from norms of one and logits near zero
    set_aux_scale(model, 1 / ROWS)
    return model.to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(97, (ROWS, SEQ), generator=generator), torch.randint(97, (ROWS, SEQ), generator=generator)


Gradients = dict[str, tuple[ParamShard | None, Tensor]]


def one_process(kind: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, tuple[int, ...]]]:
    model = make(kind, dtype)
    tokens, labels = batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([grad.double().square().sum() for grad in grads.values()]).sum().sqrt()
    return loss.detach(), grads, norm, {name: r.load for name, r in update_expert_bias(model, None).items()}


def assert_gradients(found: Gradients, want: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == want.keys()
    largest = max(float(grad.abs().max()) for grad in want.values())
    for name, (cut, grad) in found.items():
        expected = want[name] if cut is None else cut.of(want[name], tuple(grad.shape))
        assert_close({name: grad}, {name: expected}, atol=tolerance * largest)


# --- tensor parallelism ------------------------------------------------------------------------------------------------


def under_tensor_parallelism(
    kind: str, dtype: torch.dtype, tp: int, ep: int, sequence_parallel: bool
) -> tuple[Tensor, Gradients, dict[str, tuple[int, ...]]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dense = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    sparse = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    model = make(kind, dtype)
    check_expert_parallel(model, ep, tp=tp, sequence_parallel=sequence_parallel)
    tp_group = dense.get_group("tp")
    cuts = apply_tensor_parallel(model, tp_group, table=table_for(model), sequence_parallel=sequence_parallel)
    cuts |= apply_expert_parallel(model, sparse.get_group("ep"))
    set_sequence_group(model, tp_group if sequence_parallel else None)
    tokens, labels = (t.chunk(world // tp)[rank // tp] for t in batch())
    offset = cuts["lm_head.weight"].offset[0]
    loss = vocab_parallel_cross_entropy_sum(model(tokens), labels, tp_group, offset) / (ROWS * SEQ)
    loss.backward()
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        cut = cuts.get(name)
        assert parameter.grad is not None, name
        if cut is not None and cut.partial_over is not None:
            dist.all_reduce(parameter.grad, group=cut.partial_over)
        same = sparse.get_group("efsdp") if cut is not None and cut.axis == "ep" else dense.get_group("dp")
        dist.all_reduce(parameter.grad, group=same)
        # a group cannot leave its process
        found[name] = (None if cut is None else replace(cut, partial_over=None), parameter.grad)
    total = loss.detach()
    dist.all_reduce(total, group=dense.get_group("dp"))
    tokens_group = dist.group.WORLD if sequence_parallel else dense.get_group("dp")
    return total, found, {name: r.load for name, r in update_expert_bias(model, tokens_group).items()}


@pytest.mark.parametrize(
    ("kind", "ranks", "tp", "ep", "sequence_parallel"),
    [
        ("qwen3_debug", 4, 4, 1, True),
        ("qwen3_moe_debug", 2, 2, 1, False),
        ("qwen3_moe_debug", 2, 2, 1, True),
        ("qwen3_moe_debug", 4, 2, 2, True),
        ("qwen3_moe_debug", 4, 2, 4, True),
        ("deepseek_debug", 2, 2, 1, False),
        ("deepseek_debug", 4, 4, 4, True),
        ("deepseek_debug", 4, 2, 2, True),
        ("v2", 2, 2, 2, True),
    ],
)
def test_loss_and_every_gradient_are_those_of_one_process(
    kind: str, ranks: int, tp: int, ep: int, sequence_parallel: bool
) -> None:
    # float64: nothing but the order of summation differs
    loss, grads, _, load = one_process(kind, torch.float64)
    for result in run_ranks(under_tensor_parallelism, ranks, kind, torch.float64, tp, ep, sequence_parallel):
        assert float((result[0] - loss).abs()) < 1e-12
        assert_gradients(result[1], grads, 1e-12)
        assert result[2] == load


def test_float32_is_as_near_as_the_order_of_summation_allows() -> None:
    loss, grads, _, load = one_process("deepseek_debug", torch.float32)
    for result in run_ranks(under_tensor_parallelism, 2, "deepseek_debug", torch.float32, 2, 2, True):
        assert float((result[0] - loss).abs()) < 1e-6
        assert_gradients(result[1], grads, 2e-6)
        assert result[2] == load


# --- FSDP2 -------------------------------------------------------------------------------------------------------------


def under_fsdp(kind: str, ep: int, shard_dim: int, max_norm: float, mixed: bool) -> tuple[Tensor, Tensor, Gradients]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dense = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    sparse = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    model = make(kind, torch.float32)
    cuts = apply_expert_parallel(model, sparse.get_group("ep"))
    policy = fsdp.Policy(
        units=[fsdp.Unit("layers.*.moe.experts", mesh="experts", shard_dim=shard_dim), "layers.*"],
        mp=fsdp.MixedPrecision(param="bf16", keep_fp32=["*.router"]) if mixed else fsdp.MixedPrecision(),
        grad_divide="sum",
    )
    fsdp.plan(model, dense, policy, meshes={"experts": sparse["efsdp"]}).apply(model)
    tokens, labels = (t.chunk(world)[rank] for t in batch())
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(), reduction="sum") / (ROWS * SEQ)
    loss.backward()
    experts = [p for _, layer in moe_layers(model) for p in layer.experts.parameters()]
    norm = fsdp.clip_grad_norm_(
        model.parameters(), max_norm, sharded_over=[(experts, sparse.get_group("ep"))] if ep > 1 else []
    )
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        found[name] = (cuts.get(name), parameter.grad.full_tensor())
    total = loss.detach()
    dist.all_reduce(total)
    return total, norm, found


@pytest.mark.parametrize(
    ("kind", "ranks", "ep", "shard_dim"),
    [("qwen3_moe_debug", 4, 2, 0), ("qwen3_moe_debug", 4, 2, 1), ("deepseek_debug", 2, 2, 0)],
)
def test_experts_on_their_own_fsdp_mesh_give_one_processs_gradients_and_norm(
    kind: str, ranks: int, ep: int, shard_dim: int
) -> None:
    loss, grads, norm, _ = one_process(kind, torch.float32)
    for got_loss, got_norm, found in run_ranks(under_fsdp, ranks, kind, ep, shard_dim, 1e9, False):
        assert float((got_loss - loss).abs()) < 1e-6
        assert float((got_norm - norm).abs()) < 1e-6 * float(norm)
        assert_gradients(found, grads, 2e-6)  # sums over ranks in another order


def test_clipping_scales_experts_and_the_rest_alike() -> None:
    _, grads, norm, _ = one_process("qwen3_moe_debug", torch.float32)
    limit = 0.5 * float(norm)
    clipped = {name: grad * 0.5 for name, grad in grads.items()}
    for _, got_norm, found in run_ranks(under_fsdp, 4, "qwen3_moe_debug", 2, 0, limit, False):
        assert float((got_norm - norm).abs()) < 1e-6 * float(norm)
        assert_gradients(found, clipped, 2e-6)


def test_bfloat16_experts_on_their_own_mesh_stay_near_float32() -> None:
    loss, grads, _, _ = one_process("qwen3_moe_debug", torch.float32)
    for got_loss, _, found in run_ranks(under_fsdp, 4, "qwen3_moe_debug", 2, 0, 1e9, True):
        # 8 bits of mantissa through two layers; a few tokens may go to other experts
        assert float((got_loss - loss).abs()) < 3e-2 * float(loss)
        for name, (cut, grad) in found.items():
            want = grads[name] if cut is None else cut.of(grads[name], tuple(grad.shape))
            likeness = F.cosine_similarity(grad.flatten().float(), want.flatten(), dim=0)
            assert float(likeness) > 0.9, name


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ep", "tp", "words"),
    [
        ("qwen3_debug", 2, 1, ["ep=2", "Qwen3 has none", "ep=1"]),
        ("qwen3_moe_debug", 3, 1, ["ep=3", "8 experts", "[1, 2, 4, 8]", "layers.0.moe"]),
        ("deepseek_debug", 2, 2, ["ep=2", "tp=2", "sequence_parallel=true"]),
    ],
)
def test_layouts_that_cannot_work_are_refused(kind: str, ep: int, tp: int, words: list[str]) -> None:
    model = build_model(ModelConfig(name=kind), vocab_size=97)
    with pytest.raises(ValueError, match="ep=") as caught:
        check_expert_parallel(model, ep, tp=tp)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    check_expert_parallel(model, 1, tp=tp)


def cut_on_meta() -> dict[str, tuple[int, ...]]:
    model = build_model(ModelConfig(name="deepseek_debug"), vocab_size=97)
    cuts = apply_expert_parallel(model, dist.group.WORLD)  # type: ignore[arg-type]
    assert all(cut.pieces == 2 and cut.axis == "ep" and cut.partial_over is None for cut in cuts.values())
    assert all(model.get_parameter(name).is_meta for name in cuts)
    return {name: (*model.get_parameter(name).shape, cut.offset[0], cut.global_shape[0]) for name, cut in cuts.items()}


def test_experts_are_cut_on_the_meta_device_and_in_whole_experts() -> None:
    first, second = run_ranks(cut_on_meta, 2)
    assert set(first) == {f"layers.{i}.moe.experts.w{j}" for i in (1, 2) for j in (1, 2, 3)}
    assert first["layers.1.moe.experts.w1"] == (4, 96, 64, 0, 8)
    assert second["layers.1.moe.experts.w2"] == (4, 64, 96, 4, 8)
