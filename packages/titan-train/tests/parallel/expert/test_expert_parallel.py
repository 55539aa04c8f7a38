"""Expert parallelism against one process with the same weights: output and every gradient, however the load falls."""

import pytest
import torch
import torch.distributed as dist
from titan_testing import assert_close, run_ranks
from titan_train.config import ActivationsConfig
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, init_for
from titan_train.models.common.args import MoEArgs
from titan_train.models.common.blocks import SwiGLU
from titan_train.models.common.moe.balance import set_aux_scale, update_expert_bias
from titan_train.models.common.moe.experts import grouped_mm_loop
from titan_train.models.common.moe.layer import MoE
from titan_train.parallel.activations.recompute import apply_activation_checkpointing
from titan_train.parallel.expert.apply import apply_expert_parallel
from titan_train.parallel.param_shard import ParamShard
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, SEQ, DIM = 4, 16, 32
KINDS = {
    "softmax-k2": {},
    "sigmoid-k3-shared": {"scores": "sigmoid", "experts_per_token": 3, "num_shared_experts": 1},
}
# What rounding explains, of a tensor's largest element: the longest way through the layer and back sums over widths and
# heads of 32 + 8 + 32 + 48 + 3 terms forward, as many backward, and 128 rows of one weight: some 400 roundings of u each
# (2^-53, 2^-24). In bfloat16 ten values on that way are rounded to 8 bits; sums are kept in float32. A row that is lost or
# taken twice changes the result by more than 1e-2.
ROUNDING = {torch.float64: 400 * 2**-53, torch.float32: 400 * 2**-24, torch.bfloat16: 10 * 2**-8}
Result = tuple[Tensor, Tensor, dict[str, tuple[ParamShard | None, Tensor]], list[int], Tensor]


def make(kind: str, skew: bool, dtype: torch.dtype) -> MoE:
    shape = {"dim": DIM, "expert_ffn_dim": 48, "num_experts": 8, "experts_per_token": 2}
    args = MoEArgs(**{**shape, "balance_loss": 0.1, "z_loss": 0.01, "bias_rate": 0.01, **KINDS[kind]})  # type: ignore[arg-type]
    layer = MoE(args, SwiGLU(DIM, 48) if args.num_shared_experts else None)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(i))
        if skew:  # all tokens to the first experts: with four ranks, three receive nothing
            assert layer.expert_bias is not None
            layer.expert_bias[: args.experts_per_token] = 9.0
    return layer.to(dtype)


class Poisoned(nn.Module):
    """A product that leaves NaN in rows that belong to no group, as torch's kernel may, forward and backward."""

    def forward(self, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor) -> Tensor:
        return _Poison.apply(mat_a, mat_b, offs)  # type: ignore[return-value]


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mat_a, mat_b, offs):
        ctx.save_for_backward(mat_a, mat_b, offs)
        out = grouped_mm_loop(mat_a, mat_b, offs=offs)
        out[int(offs[-1]) :] = float("nan")
        return out

    @staticmethod
    def backward(ctx, grad):
        mat_a, mat_b, offs = ctx.saved_tensors
        with torch.enable_grad():
            a, b = mat_a.detach().requires_grad_(), mat_b.detach().requires_grad_()
            grad_a, grad_b = torch.autograd.grad(grouped_mm_loop(a, b, offs=offs), (a, b), grad)
        grad_a[int(offs[-1]) :] = float("nan")
        return grad_a, grad_b, None


def train_layer(
    ranks: int,
    kind: str,
    skew: bool,
    dtype: torch.dtype,
    poison: bool = False,
    compiled: bool = False,
    exact: bool = False,
) -> Result:
    """One forward and backward on this rank's rows; gradients of what is not cut are summed over the ranks.

    With ``exact`` the same weights and inputs, rounded to ``dtype``, are computed with in float64.
    """
    rank = dist.get_rank() if ranks > 1 else 0
    layer = make(kind, skew, dtype)
    if exact:
        layer = layer.double()
    set_aux_scale(layer, 1 / ROWS)
    cuts: dict[str, ParamShard] = {}
    if ranks > 1:
        cuts = apply_expert_parallel(layer, dist.group.WORLD, pad_rows_to=64 if poison else 1)
    if poison:
        layer.experts.grouped_mm = Poisoned()
    if compiled:
        torch._dynamo.config.capture_scalar_outputs = True
        layer.compile(fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(1)
    x, probe = (torch.randn(ROWS, SEQ, DIM, generator=generator).to(dtype).chunk(ranks)[rank] for _ in range(2))
    if exact:
        x, probe = x.double(), probe.double()
    x.requires_grad_()
    out = layer(x)
    out.backward(probe)
    grads: dict[str, tuple[ParamShard | None, Tensor]] = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if ranks > 1 and name not in cuts:
            dist.all_reduce(parameter.grad)
        grads[name] = (cuts.get(name), parameter.grad)
    (routing,) = update_expert_bias(layer, dist.group.WORLD if ranks > 1 else None).values()
    assert x.grad is not None
    assert layer.expert_bias is not None
    return out.detach(), x.grad, grads, list(routing.load), layer.expert_bias.float()


def compare(ranks: int, kind: str, skew: bool, dtype: torch.dtype, *, poison: bool = False, compiled: bool = False):
    """With one process in float64: a product's bits depend on its shape, and the gate's on how many tokens a rank has."""
    out, x_grad, grads, load, bias = train_layer(1, kind, skew, dtype, exact=True)
    found = run_ranks(train_layer, ranks, ranks, kind, skew, dtype, poison, compiled, timeout_s=240 if compiled else 60)
    limit = ROUNDING[dtype]
    assert_close(torch.cat([result[0] for result in found]), out, atol=0.0, rtol=limit)
    assert_close(torch.cat([result[1] for result in found]), x_grad, atol=0.0, rtol=limit)
    for result in found:
        assert result[3] == load
        assert torch.equal(result[4], bias)  # made of counts
        for name, (cut, grad) in result[2].items():
            want = grads[name][1]
            assert_close({name: grad}, {name: want if cut is None else cut.of(want, grad.shape)}, atol=0.0, rtol=limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("skew", [False, True], ids=["even", "all-on-one-rank"])
def test_output_and_every_gradient_are_those_of_one_process(kind: str, ranks: int, skew: bool) -> None:
    compare(ranks, kind, skew, torch.float32)


def test_bfloat16_is_within_its_rounding() -> None:
    compare(4, "sigmoid-k3-shared", False, torch.bfloat16)


def test_float64_goes_through_the_plain_loop() -> None:
    compare(2, "softmax-k2", False, torch.float64)


@pytest.mark.parametrize("skew", [False, True], ids=["even", "all-on-one-rank"])
def test_padding_rows_full_of_nan_reach_no_output_and_no_gradient(skew: bool) -> None:
    compare(2, "softmax-k2", skew, torch.float32, poison=True)


@pytest.mark.slow  # half a minute of tracing
@pytest.mark.timeout(300)
def test_a_compiled_layer_with_experts_on_two_ranks_is_one_graph() -> None:
    compare(2, "sigmoid-k3-shared", False, torch.float32, compiled=True)


def received_rows(skew: bool) -> int:
    layer = make("softmax-k2", skew, torch.float32)
    apply_expert_parallel(layer, dist.group.WORLD)
    seen: list[int] = []
    layer.experts.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[0]))
    layer(torch.randn(1, SEQ, DIM))
    return seen[0]


def test_all_tokens_on_one_ranks_experts_are_all_computed_there() -> None:
    assert run_ranks(received_rows, 4, True) == [4 * SEQ * 2, 0, 0, 0]
    assert sum(run_ranks(received_rows, 4, False)) == 4 * SEQ * 2


class CountExchanges(TorchDispatchMode):
    """Counts the all-to-alls that are really sent."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "all_to_all_single" in str(func)
        return func(*args, **(kwargs or {}))


def train_recomputed(checkpoint: str) -> tuple[int, dict[str, Tensor], list[int]]:
    model = build_model(ModelConfig(name="deepseek_debug"), vocab_size=61, device="cpu")
    init = init_for(model)
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(i))
    set_aux_scale(model, 0.5)
    apply_expert_parallel(model, dist.group.WORLD)
    apply_activation_checkpointing(model, list(model.layers.values()), ActivationsConfig(checkpoint=checkpoint))
    tokens = torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    communication = CountExchanges()
    with communication:
        model(tokens).float().square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    routing = update_expert_bias(model, dist.group.WORLD)
    return communication.count, grads, [n for r in routing.values() for n in r.load]


def test_recomputation_changes_no_bit_and_selective_recomputation_sends_nothing_again() -> None:
    none, full, selective = (run_ranks(train_recomputed, 2, mode) for mode in ("none", "full", "selective"))
    for plain, *others in zip(none, full, selective, strict=True):
        for other in others:
            assert other[1].keys() == plain[1].keys()
            assert all(torch.equal(grad, plain[1][name]) for name, grad in other[1].items())
            assert other[2] == plain[2]  # and every token is counted once
    # two layers with experts: counts, rows there and rows back; backward sends rows both ways
    assert none[0][0] == 2 * 5
    assert selective[0][0] == none[0][0]
    assert full[0][0] > none[0][0]
