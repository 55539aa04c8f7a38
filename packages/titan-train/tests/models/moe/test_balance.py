"""Balancing: the bias evens the load out, and neither it nor the auxiliary losses depend on how a batch is cut."""

import math

import pytest
import torch
import torch.distributed as dist
from titan_testing import assert_close, run_ranks
from titan_train.models.common.args import MoEArgs
from titan_train.models.common.moe.balance import (
    LayerRouting,
    end_routing,
    routing_statistics,
    set_aux_scale,
    set_sequence_group,
    summed_routing,
    update_expert_bias,
)
from titan_train.models.common.moe.layer import MoE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, SEQ = 4, 16


def make(**changes: object) -> MoE:
    shape = {"dim": 16, "expert_ffn_dim": 16, "num_experts": 8, "experts_per_token": 2}
    layer = MoE(MoEArgs(**{**shape, **changes}))  # type: ignore[arg-type]
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(i))
    return layer


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, SEQ, 16, generator=generator), torch.randn(ROWS, SEQ, 16, generator=generator)


def reference_loss(layer: MoE, x: Tensor) -> Tensor:
    """DeepSeek-V3's equations 17 to 20 and the z-loss, a row at a time; the mean over rows."""
    args, total = layer.args, torch.zeros((), dtype=x.dtype)
    for row in x:
        logits = row @ layer.router.gate.weight.T
        scores = logits.sigmoid() if args.scores == "sigmoid" else logits.softmax(-1)
        chosen = scores.topk(args.experts_per_token, dim=-1).indices
        for e in range(args.num_experts):
            share = (chosen == e).sum().to(x.dtype) * args.num_experts / (args.experts_per_token * len(row))
            total = total + args.balance_loss * share * (scores[:, e] / scores.sum(-1)).mean()
        total = total + args.z_loss * (logits.exp().sum(-1).log() ** 2).mean()
    return total / len(x)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_gate_gets_the_gradient_of_the_sequence_wise_losses(scores: str) -> None:
    layer = make(scores=scores, balance_loss=0.3, z_loss=0.02).double()
    x = batch()[0].double()
    set_aux_scale(layer, 1 / ROWS)
    layer(x).backward(torch.zeros_like(x))  # only what the auxiliary losses give
    (want,) = torch.autograd.grad(reference_loss(layer, x), layer.router.gate.weight)
    assert layer.router.gate.weight.grad is not None
    assert_close(layer.router.gate.weight.grad, want)
    assert float(want.abs().max()) > 1e-3
    (routing,) = update_expert_bias(layer, None).values()
    got = layer.args.balance_loss * routing.balance_loss + layer.args.z_loss * routing.z_loss
    assert got == pytest.approx(float(reference_loss(layer, x).detach()), abs=1e-6)


def gate_gradient(scale: float | None, *, training: bool, **changes: object) -> tuple[Tensor, list[int]]:
    """Of a language-model loss alone, in a layer with balance and z-loss coefficients; and the load it counted."""
    layer = make(**{"balance_loss": 0.3, "z_loss": 0.02, "bias_rate": 0.01, **changes}).train(training)
    if scale is not None:
        set_aux_scale(layer, scale)
    x, probe = batch()
    layer(x).backward(probe)
    assert layer.router.gate.weight.grad is not None
    return layer.router.gate.weight.grad, layer.load.tolist()


def test_auxiliary_losses_give_no_gradient_until_they_are_asked_for() -> None:
    plain, load = gate_gradient(None, training=True, balance_loss=0.0, z_loss=0.0)
    unasked, counted = gate_gradient(None, training=True)
    assert torch.equal(unasked, plain)  # the same kernels on the same shapes: bits
    assert counted == load  # balancing by the bias needs no asking
    assert not torch.equal(gate_gradient(1 / ROWS, training=True)[0], plain)


def test_in_eval_mode_auxiliary_losses_give_no_gradient_and_nothing_is_counted() -> None:
    plain, _ = gate_gradient(None, training=False, balance_loss=0.0, z_loss=0.0)
    asked, counted = gate_gradient(1 / ROWS, training=False)
    assert torch.equal(asked, plain)
    assert counted == [0] * 8


def gradients(layer: MoE) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def whole_batch(*, padded: bool = False) -> tuple[dict[str, Tensor], list[int], Tensor]:
    layer = make(scores="sigmoid", balance_loss=0.3, z_loss=0.02, bias_rate=0.01)
    x, probe, padding = padded_batch() if padded else (*batch(), None)
    set_aux_scale(layer, 1 / ROWS)
    layer(x, padding).backward(probe)
    load = layer.load.tolist()
    update_expert_bias(layer, None)
    assert layer.expert_bias is not None
    return gradients(layer), load, layer.expert_bias


@pytest.mark.parametrize("cuts", [[1, 3], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_microbatches_and_recomputation_change_neither_gradient_nor_bias(cuts: list[int], recompute: bool) -> None:
    want, load, bias = whole_batch()
    layer = make(scores="sigmoid", balance_loss=0.3, z_loss=0.02, bias_rate=0.01)
    set_aux_scale(layer, 1 / ROWS)
    for x, probe in zip(*(t.split(cuts) for t in batch()), strict=True):
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        assert out is not None
        out.backward(probe)
    assert layer.load.tolist() == load
    update_expert_bias(layer, None)
    assert layer.expert_bias is not None
    assert torch.equal(layer.expert_bias, bias)
    # the largest elements are about 30, sums of 64 terms in another order
    assert_close(gradients(layer), want, rtol=1e-6)


PADDING = torch.arange(SEQ) >= torch.tensor([[SEQ], [9], [1], [0]])


def padded_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Rows that end before SEQ, one of them at once; no loss is taken of padding."""
    x, probe = batch()
    x[PADDING] = 1.0
    probe[PADDING] = 0.0
    return x, probe, PADDING


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_padded_rows_are_counted_and_balanced_as_their_tokens_alone(scores: str, recompute: bool) -> None:
    padded, alone = (make(scores=scores, balance_loss=0.3, z_loss=0.02, bias_rate=0.01).double() for _ in range(2))
    for layer in (padded, alone):
        set_aux_scale(layer, 1 / ROWS)
    x, probe, padding = padded_batch()
    out = checkpoint(padded, x.double(), padding, use_reentrant=False) if recompute else padded(x.double(), padding)
    assert out is not None
    out.backward(probe.double())
    for row, grad, fills in zip(x.double(), probe.double(), padding, strict=True):
        if not fills.all():
            alone(row[~fills][None]).backward(grad[~fills][None])
    assert padded.load.tolist() == alone.load.tolist()
    assert padded.load.sum() == 2 * (~padding).sum()
    assert_close(gradients(padded), gradients(alone))
    (got,), (want,) = (update_expert_bias(layer, None).values() for layer in (padded, alone))
    assert (got.balance_loss, got.z_loss) == pytest.approx((want.balance_loss, want.z_loss), abs=1e-6)
    assert padded.expert_bias is not None
    assert alone.expert_bias is not None
    assert torch.equal(padded.expert_bias, alone.expert_bias)


def on_part_of_the_rows(kind: str) -> tuple[dict[str, Tensor], list[int], Tensor]:
    """Ranks hold other rows ("rows"), parts of the same rows ("sequence", "padded"), or two groups of ranks that ("both")."""
    layer = make(scores="sigmoid", balance_loss=0.3, z_loss=0.02, bias_rate=0.01)
    set_aux_scale(layer, 1 / ROWS)
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    x, probe, padding = padded_batch() if kind == "padded" else (*batch(), None)
    if kind == "rows":
        x, probe = (t.chunk(world)[rank] for t in (x, probe))
    elif kind in ("sequence", "padded"):
        set_sequence_group(layer, dist.group.WORLD)
        x, probe, padding = (None if t is None else t.chunk(world, dim=1)[rank] for t in (x, probe, padding))
    else:
        set_sequence_group(layer, pairs[rank // 2])
        x, probe = (t.chunk(world // 2)[rank // 2].chunk(2, dim=1)[rank % 2] for t in (x, probe))
    layer(x, padding).backward(probe)
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad)
    (routing,) = update_expert_bias(layer, dist.group.WORLD).values()
    assert layer.expert_bias is not None
    return gradients(layer), list(routing.load), layer.expert_bias


@pytest.mark.parametrize(("kind", "ranks"), [("rows", 2), ("sequence", 2), ("padded", 2), ("both", 4)])
def test_data_and_sequence_cuts_over_ranks_change_neither_gradient_nor_bias(kind: str, ranks: int) -> None:
    want, load, bias = whole_batch(padded=kind == "padded")
    for grads, got_load, got_bias in run_ranks(on_part_of_the_rows, ranks, kind):
        assert got_load == load
        assert torch.equal(got_bias, bias)
        assert_close(grads, want, rtol=1e-6)  # the largest elements are about 30


# Rates at which 200 steps suffice; a softmax's scores are smaller, so that smaller steps reach as far.
@pytest.mark.parametrize(("scores", "rate"), [("sigmoid", 1e-2), ("softmax", 1e-3)])
def test_the_bias_evens_out_a_skewed_load_in_200_steps(scores: str, rate: float) -> None:
    layer = make(scores=scores, bias_rate=rate)
    layer.experts.requires_grad_(False)
    with torch.no_grad():  # the first channel is always one: logits are skewed by up to 1.5 either way
        layer.router.gate.weight.normal_(std=0.25, generator=torch.Generator().manual_seed(0))
        layer.router.gate.weight[:, 0] = torch.linspace(-1.5, 1.5, 8)
    generator = torch.Generator().manual_seed(1)
    worst: list[float] = []
    for _ in range(200):
        x = torch.randn(8, 64, 16, generator=generator)
        x[..., 0] = 1.0
        layer(x).sum().backward()
        (routing,) = update_expert_bias(layer, None).values()
        worst.append(routing.max_over_mean)
    assert worst[0] > 2.0
    assert sum(worst[-10:]) / 10 <= 1.3
    assert layer.expert_bias is not None
    assert abs(float(layer.expert_bias.mean())) < 1e-6


def test_the_bias_moves_by_its_rate_against_the_load_and_is_restored_bitwise() -> None:
    layer = make(bias_rate=0.25)
    layer.load.copy_(torch.tensor([10, 10, 10, 10, 0, 0, 0, 40]))
    update_expert_bias(layer, None)
    want = torch.tensor([0.0, 0, 0, 0, 1, 1, 1, -1]) * 0.25
    assert layer.expert_bias is not None
    assert_close(layer.expert_bias, want - want.mean())

    other = make(bias_rate=0.25)
    other.load_state_dict(layer.state_dict())
    assert other.expert_bias is not None
    assert torch.equal(other.expert_bias, layer.expert_bias)
    assert set(layer.state_dict()) - {name for name, _ in layer.named_parameters()} == {"expert_bias"}


def test_a_skipped_step_forgets_the_load_and_keeps_the_bias() -> None:
    layer = make(bias_rate=0.25)
    layer(batch()[0]).sum().backward()
    assert sum(layer.load.tolist()) == ROWS * SEQ * 2
    routing = update_expert_bias(layer, None, skip=True)
    assert sum(routing[""].load) == ROWS * SEQ * 2
    assert layer.load.tolist() == [0] * 8
    assert layer.expert_bias is not None
    assert layer.expert_bias.tolist() == [0.0] * 8


@pytest.mark.parametrize("how", ["train.freeze", "optimizer.frozen_steps"])
def test_the_bias_of_a_router_that_is_not_trained_stays(how: str) -> None:
    layer = make(bias_rate=0.25)
    gate = layer.router.gate.weight.requires_grad_(how != "train.freeze")
    layer(batch()[0].requires_grad_()).sum().backward()
    total = summed_routing([layer], None)
    assert total is not None
    assert sum(end_routing([layer], total, total.tolist(), frozen=[gate] if gate.requires_grad else [])[""].load) > 0
    assert layer.expert_bias is not None
    assert layer.expert_bias.tolist() == [0.0] * 8


def test_statistics_name_the_worst_and_the_mean() -> None:
    routing = {
        "layers.0.moe": LayerRouting((10, 10, 10, 10), balance_loss=1.0, z_loss=0.5),
        "layers.1.moe": LayerRouting((0, 0, 20, 20), balance_loss=2.0, z_loss=1.5),
    }
    found = routing_statistics(routing)
    assert found == {
        "load_max": 2.0,
        "load_max_mean": 1.5,
        "load_min": 0.0,
        "load_entropy": pytest.approx((1.0 + math.log(2) / math.log(4)) / 2),
        "idle_experts": 2.0,
        "balance_loss": 1.5,
        "z_loss": 1.0,
    }
    assert routing_statistics(update_expert_bias(nn.Linear(2, 2), None)) == {}
