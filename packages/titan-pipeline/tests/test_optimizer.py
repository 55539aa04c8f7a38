"""The pipeline's optimizer step equals one process's: clipped, skipped, or optimistically taken and undone."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

from titan_pipeline import build_schedule  # noqa: E402
from titan_pipeline.runtime import Executor, Optimistic, ThreadHub, TorchStage, clip_grad_norm  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

RANKS, STEPS, CLIP = 4, 50, 20.0


def build_layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(RANKS)]


def loss_sum(output, target):
    return ((output - target) ** 2).sum()


def batch(step):
    """Every fifth step is large enough to clip, every eleventh holds an infinity."""
    generator = torch.Generator().manual_seed(step)
    scale = 3e38 if step % 11 == 10 else 100.0 if step % 5 == 4 else 0.3
    x = [torch.randn(3, 6, generator=generator) for _ in range(4)]
    return x, [scale * torch.randn(3, 6, generator=generator) for _ in range(4)]


def train(layers, optimistic):
    schedule = build_schedule("zb_h1", RANKS, 4)

    def work(transport):
        rank = transport.rank
        stage = TorchStage(layers[rank], rank, loss=loss_sum if rank == RANKS - 1 else None)
        executor = Executor(schedule, [stage], transport)
        optimizer = torch.optim.AdamW(layers[rank].parameters(), lr=0.01)
        lazy = Optimistic(executor, optimizer, CLIP)
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            executor.step(*batch(step))
            if optimistic:
                lazy.step()
                norms.append(lazy.settle()[0])
            else:
                norms.append(clip_grad_norm(executor, CLIP))
                if norms[-1] < float("inf"):
                    optimizer.step()
        return norms, lazy.undone

    return ThreadHub(RANKS).run(work)


def test_the_optimistic_step_is_bit_equal_to_the_synchronous_clip_over_50_steps():
    exact, lazy = build_layers(), build_layers()
    exact_norms = train(exact, optimistic=False)
    lazy_norms = train(lazy, optimistic=True)
    for a, b in zip(nn.Sequential(*exact).parameters(), nn.Sequential(*lazy).parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
    norms = exact_norms[0][0]
    # as text, since a norm may be nan
    assert all(str(n) == str(norms) for n, _ in exact_norms + lazy_norms)
    undone = lazy_norms[0][1]
    clipped = sum(not n <= CLIP for n in norms)
    assert undone == clipped
    assert 5 < clipped < STEPS - 5  # both ways are taken
    assert not all(map(math.isfinite, norms))


def test_the_global_norm_and_clip_equal_torch_on_the_whole_model():
    """In float64: the norm is summed in another order, fewer than 200 squares, each rounded by at most 2^-53."""
    layers = [layer.double() for layer in build_layers()]
    model = nn.Sequential(*copy.deepcopy(layers))
    x, y = ([t.double() for t in part] for part in batch(4))
    for a, b in zip(x, y, strict=True):
        (loss_sum(model(a), b) / 4).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    schedule = build_schedule("1f1b", RANKS, 4)

    def work(transport):
        rank = transport.rank
        stage = TorchStage(layers[rank], rank, loss=loss_sum if rank == RANKS - 1 else None)
        executor = Executor(schedule, [stage], transport)
        executor.step(x, y)
        return clip_grad_norm(executor, 1.0)

    assert ThreadHub(RANKS).run(work) == pytest.approx([float(expected)] * RANKS, rel=1e-13)
    for stage, part in zip(layers, model, strict=True):
        for p, e in zip(stage.parameters(), part.parameters(), strict=True):
            torch.testing.assert_close(p.grad, e.grad, rtol=1e-13, atol=0)


def test_imaginary_parts_count_in_the_norm():
    layer = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    stage = TorchStage(layer, 0, loss=lambda o, t: (o - t).abs().square().sum())
    executor = Executor(build_schedule("gpipe", 1, 1), [stage])
    layer.weight.grad = torch.tensor([[3 + 0j, 4j]]).conj()
    assert clip_grad_norm(executor, 1.0) == 5
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.6 + 0j, -0.8j]]))


def test_an_optimistic_step_must_be_settled_before_the_next():
    layer = nn.Linear(2, 2)
    executor = Executor(build_schedule("gpipe", 1, 1), [TorchStage(layer, 0, loss=loss_sum)])
    executor.step([torch.ones(1, 2)], [torch.ones(1, 2)])
    lazy = Optimistic(executor, torch.optim.SGD(layer.parameters(), lr=0.1), 1.0)
    with pytest.raises(RuntimeError, match="no step to settle"):
        lazy.settle()
    lazy.step()
    with pytest.raises(RuntimeError, match="not settled"):
        lazy.step()


class WideMomentum(torch.optim.Optimizer):
    """Momentum in float32 of weights in bfloat16, whose rate falls with every step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                momentum.mul_(0.9).add_(p.grad.float())
                p.sub_((group["lr"] * momentum).to(p.dtype))
            group["lr"] *= 0.9


def test_an_undone_step_keeps_the_precision_of_the_optimizers_state():
    x, y = batch(3)

    def run(optimistic):
        torch.manual_seed(0)
        layer = nn.Linear(6, 6).bfloat16()
        stage = TorchStage(layer, 0, loss=lambda output, target: loss_sum(output.float(), target))
        executor = Executor(build_schedule("gpipe", 1, 4), [stage])
        optimizer = WideMomentum(layer.parameters())
        lazy = Optimistic(executor, optimizer, 5.0)
        for _ in range(6):
            optimizer.zero_grad()
            executor.step([t.bfloat16() for t in x], y)
            if optimistic:
                lazy.step()
                lazy.settle()
            else:
                clip_grad_norm(executor, 5.0)
                optimizer.step()
        return layer.weight, optimizer.state[layer.weight]["momentum"], optimizer.param_groups[0]["lr"], lazy.undone

    (weight, momentum, rate, undone), (exact_weight, exact_momentum, exact_rate, _) = run(True), run(False)
    assert undone > 2
    assert momentum.dtype == torch.float32
    assert torch.equal(momentum, exact_momentum)
    assert torch.equal(weight, exact_weight)
    assert rate == exact_rate


class Dropping(torch.optim.SGD):
    """Lets go of its gradients at the end of its step."""

    def step(self):
        super().step()
        self.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.SGD, Dropping])
def test_a_step_is_judged_and_redone_by_its_gradients_even_if_the_optimizer_changed_them(kind):
    """SGD with Nesterov momentum adds the momentum to the gradients themselves where it takes all parameters at once."""
    x, y = batch(3)

    def run(optimistic):
        torch.manual_seed(0)
        layer = nn.Linear(6, 6)
        executor = Executor(build_schedule("gpipe", 1, 4), [TorchStage(layer, 0, loss=loss_sum)])
        optimizer = kind(layer.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)
        lazy, norms = Optimistic(executor, optimizer, 7.0), []
        for _ in range(4):
            if kind is not Dropping:
                optimizer.zero_grad()
            executor.step(x, y)
            if optimistic:
                lazy.step()
                norms.append(lazy.settle()[0])
            else:
                norms.append(clip_grad_norm(executor, 7.0))
                optimizer.step()
        return norms, layer.weight, lazy.undone

    (norms, weight, undone), (exact_norms, exact, _) = run(True), run(False)
    assert 0 < undone < 4
    assert norms == exact_norms
    assert torch.equal(weight, exact)


def test_a_schedulers_step_before_settling_stays():
    layer = nn.Linear(6, 6)
    executor = Executor(build_schedule("gpipe", 1, 4), [TorchStage(layer, 0, loss=loss_sum)])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scheduler, lazy = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), Optimistic(executor, optimizer, 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        executor.step(*batch(3))
        lazy.step()
        scheduler.step()
        assert not lazy.settle()[1]
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def _unsummed():
    """Clips gradients whose parts on two ranks are still to be summed; ``rank + 1`` on each."""
    mesh = init_device_mesh("cpu", (2,))
    module = nn.ParameterList([DTensor.from_local(torch.ones(3), mesh, [p]) for p in (Replicate(), Shard(0))])
    for parameter, placement in zip(module, (Partial(), Shard(0)), strict=True):
        parameter.grad = DTensor.from_local(torch.full((3,), mesh.get_local_rank() + 1.0), mesh, [placement])
    executor = Executor(build_schedule("gpipe", 1, 1), [TorchStage(module, 0)])
    norm = clip_grad_norm(executor, 1.0)
    return norm, clip_grad_norm(executor, math.inf), [p.grad.full_tensor() for p in module]


def test_gradients_that_are_not_summed_over_their_mesh_yet_count_as_their_sum():
    whole = [torch.full((3,), 3.0), torch.tensor([1.0] * 3 + [2.0] * 3)]
    expected = math.sqrt(sum(float(g.square().sum()) for g in whole))
    for norm, after, grads in testing.run_ranks(_unsummed, 2):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx(1.0, rel=1e-5)
        for grad, e in zip(grads, whole, strict=True):
            torch.testing.assert_close(grad, e / expected)


def _in_two_ways():
    """Clips the gradients of a layer that is sharded by columns over one axis and by FSDP over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x, y = ([torch.cat(part)] for part in batch(3))
    executor = Executor(build_schedule("gpipe", 1, 1), [TorchStage(model, 0, loss=loss_sum)])
    executor.step(x, y)
    loss_sum(alone(x[0]), y[0]).backward()
    return clip_grad_norm(executor, math.inf), float(nn.utils.get_total_norm([p.grad for p in alone.parameters()]))


def test_gradients_that_are_sharded_twice_over_two_axes_count_once():
    norms = testing.run_ranks(_in_two_ways, 4)
    assert len({norm for norm, _ in norms}) == 1
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-5)


def test_parameters_to_skip_may_come_as_a_generator():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    executor = Executor(build_schedule("gpipe", 1, 1), [TorchStage(layers, 0, loss=loss_sum)])
    executor.step([torch.ones(1, 2)], [torch.ones(1, 2)])
    before = [p.grad.clone() for p in layers.parameters()]
    clip_grad_norm(executor, 1e-3, skip=layers[1].parameters())
    kept = [torch.equal(p.grad, b) for p, b in zip(layers.parameters(), before, strict=True)]
    assert kept == [False, False, True, True]
