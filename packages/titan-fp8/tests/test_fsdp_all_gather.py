"""FSDP2 gathers weights in float8: the same bits as one process, on even, uneven and misaligned shards."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import titan_fp8
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from titan_fp8.weights import gathered
from titan_testing import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

# out_features of the three layers: shards of whole blocks (256 rows on 2 ranks) / uneven and misaligned / both.
WIDTHS = {"aligned": (256, 256, 256), "uneven": (301, 77, 256), "fewer_rows_than_blocks": (48, 130, 48)}


class Net(nn.Module):
    def __init__(self, widths: tuple[int, int, int]) -> None:
        super().__init__()
        a, b, c = widths
        self.first = nn.Linear(64, a, bias=False)
        self.second = nn.Linear(a, b)
        self.third = nn.Linear(b, c, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def build(widths: tuple[int, int, int], recipe: str) -> Net:
    torch.manual_seed(0)
    net = Net(widths)
    titan_fp8.convert_to_float8(net, recipe, min_speedup=0)
    return net


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of all-gather inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.gathered_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append(func._schema.name.split("::")[1])
            if "allgather" in self.calls[-1]:
                self.gathered_bytes += args[1].numel() * args[1].element_size()
        return func(*args, **(kwargs or {}))


def train(net: nn.Module, steps: int, *, sync: bool = False, loss_share: float = 1.0) -> list[torch.Tensor]:
    """Outputs of each step, then the first layer's weight after each.

    Products have the same shapes on one process and on many, and so the same bits. An update of a shard and one of a whole
    weight need not: vector and scalar code may contract a multiply-add or not. With a power of two as the rate the
    multiplication is exact, and either way gives the same bits.
    """
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=8.0)
    outs, weights = [], []
    constant = titan_fp8.ConstantWeights(net) if sync else contextlib.nullcontext()
    for _ in range(steps):
        with constant:
            out = net(x)
            (out.square().mean() * loss_share).backward()
        outs.append(out.detach())
        optimizer.step()
        optimizer.zero_grad()
        weight = net.first.weight.detach()
        weights.append((weight.full_tensor() if isinstance(weight, DTensor) else weight).clone())
    return outs + weights


def sharded(widths: tuple[int, int, int], recipe: str, reshard: bool = True, dtype: torch.dtype | None = None) -> Net:
    net = build(widths, recipe)
    names = titan_fp8.apply_float8_all_gather(net)
    assert names == ["first.weight", "second.weight", "third.weight"]
    for module in (net.first, net.second, net.third, net):
        fully_shard(module, reshard_after_forward=reshard, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        # Gradients are summed, and only rank 0 has one: no rounding sets the ranks apart from one process.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return net


def test_copies_of_a_weight_are_saved_as_plain_tensors(tmp_path: Path) -> None:
    net = build(WIDTHS["aligned"], "blockwise")
    titan_fp8.apply_float8_all_gather(net)
    average = net.first.weight.detach().clone()
    torch.save({"average": average}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)["average"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, average)


def recorded(recipe: str) -> bool:
    net = build(WIDTHS["aligned"], recipe)
    titan_fp8.apply_float8_all_gather(net)
    fully_shard(net)
    expected = titan_fp8.stats(net)
    with titan_fp8.record_stats(net) as found:
        net(torch.randn(8, 64)).square().mean().backward()
    assert all(entry.keys() == {"input", "weight", "grad"} for entry in found.values())
    assert all(20 < entry["weight"].sqnr_db < 40 for entry in found.values())
    return {name: entry["weight"] for name, entry in found.items()} == expected


def test_recorded_weights_are_those_of_the_shard_not_what_was_gathered() -> None:
    assert all(run_ranks(recorded, 2, "blockwise"))


def train_on_ranks(recipe: str, sync: bool, reshard: bool) -> list[list[torch.Tensor]]:
    share = float(dist.get_rank() == 0)
    return [train(sharded(w, recipe, reshard), 3, sync=sync, loss_share=share) for w in WIDTHS.values()]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gathered_weights_give_the_bits_of_one_process(recipe: str, ranks: int) -> None:
    wanted = [train(build(widths, recipe), 3) for widths in WIDTHS.values()]
    for of_rank in run_ranks(train_on_ranks, ranks, recipe, ranks == 2, ranks == 3):
        for got, want in zip(of_rank, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for want in wanted:  # the weights have changed, and later steps have used them
        assert not torch.equal(want[0], want[1])
        assert not torch.equal(want[1], want[2])
        assert not torch.equal(want[3], want[5])


def collectives_of_a_step(widths: tuple[int, int, int], recipe: str, sync: bool) -> tuple[list[str], int, int]:
    net = sharded(widths, recipe, dtype=torch.bfloat16)
    train(net, 1, sync=sync)
    constant = titan_fp8.ConstantWeights(net) if sync else contextlib.nullcontext()
    with Collectives() as on_entry, constant, Collectives() as seen:
        net(torch.zeros(8, 64))
    return seen.calls, seen.gathered_bytes, on_entry.calls.count("allreduce_") - seen.calls.count("allreduce_")


@pytest.mark.parametrize(
    ("widths", "recipe", "want"),
    [
        ("aligned", "blockwise", 0),
        ("uneven", "blockwise", 1),
        ("aligned", "tensorwise", 1),
        ("uneven", "tensorwise", 1),
    ],
)
def test_one_amax_collective_serves_all_weights_and_aligned_blocks_need_none(
    widths: str, recipe: str, want: int
) -> None:
    for calls, _, made in run_ranks(collectives_of_a_step, 2, WIDTHS[widths], recipe, True):
        assert made == want
        assert "allreduce_" not in calls


def test_a_weight_whose_scales_were_not_synchronised_finds_them_itself() -> None:
    for calls, _, _ in run_ranks(collectives_of_a_step, 2, WIDTHS["aligned"], "tensorwise", False):
        assert calls.count("allreduce_") == 3


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_half_the_bytes_of_bfloat16_are_gathered(recipe: str) -> None:
    widths = (512, 512, 256)
    numel = 64 * 512 + 512 * 512 + 256 * 512
    for _, sent, _ in run_ranks(collectives_of_a_step, 2, widths, recipe, True):
        bf16_of_a_shard = 2 * (numel + 512) / 2
        assert 0.5 <= sent / bf16_of_a_shard < 0.51


def checkpoint_round_trip(recipe: str) -> dict[str, torch.Tensor]:
    net = sharded(WIDTHS["uneven"], recipe)
    state = net.state_dict()
    assert all(type(v.to_local()) is torch.Tensor for v in state.values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        torch.save({k: v.full_tensor() for k, v in state.items()}, path)
        loaded = torch.load(path, weights_only=True)
    full = {k: v.clone() for k, v in loaded.items()}
    other = sharded(WIDTHS["uneven"], recipe)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.ones(2, 64)
    other(x)
    set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
    assert torch.equal(other(x), net(x))
    assert hasattr(other.first.weight._local_tensor, "fsdp_pre_all_gather")
    distributed_checkpoint_round_trip(net, other)
    assert torch.equal(other(x), net(x))
    return full


def distributed_checkpoint_round_trip(net: nn.Module, other: nn.Module) -> None:
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    dcp.save(net.state_dict(), checkpoint_id=folder[0])
    with torch.no_grad():
        other.first.weight.zero_()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_state_dicts_hold_plain_tensors_and_load_with_weights_only(recipe: str) -> None:
    want = build(WIDTHS["uneven"], recipe).state_dict()
    for got in run_ranks(checkpoint_round_trip, 2, recipe):
        assert got.keys() == want.keys()
        assert all(type(got[k]) is torch.Tensor and torch.equal(got[k], want[k]) for k in want)


def built_on_meta(recipe: str) -> list[torch.Tensor]:
    with torch.device("meta"):
        net = Net(WIDTHS["uneven"])
    titan_fp8.convert_to_float8(net, recipe, min_speedup=0)
    titan_fp8.apply_float8_all_gather(net)
    for module in (net.first, net.second, net.third, net):
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    net.to_empty(device="cpu")
    full = build(WIDTHS["uneven"], recipe).state_dict()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(distribute_tensor(full[name], parameter.device_mesh, parameter.placements))
    return train(net, 3, sync=True, loss_share=float(dist.get_rank() == 0))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_model_built_on_meta_is_materialised_after_sharding(recipe: str) -> None:
    want = train(build(WIDTHS["uneven"], recipe), 3)
    for got in run_ranks(built_on_meta, 2, recipe):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def bf16_gather_with_accumulation(recipe: str, reshard: bool) -> list[torch.Tensor]:
    net = build(WIDTHS["aligned"], recipe)
    for module in (net.first, net.second, net.third, net):
        fully_shard(module, reshard_after_forward=reshard)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return train(net, 3, loss_share=float(dist.get_rank() == 0))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_weights_gathered_in_high_precision_are_cast_afresh(recipe: str) -> None:
    """FSDP2 refills a weight's memory under the same version counter; the cached cast must not survive it."""
    want = train(build(WIDTHS["aligned"], recipe), 3)
    for reshard in (True, False):
        for got in run_ranks(bf16_gather_with_accumulation, 2, recipe, reshard):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def compiled_layer() -> list[torch.Tensor]:
    net = build(WIDTHS["aligned"], "blockwise")
    titan_fp8.apply_float8_all_gather(net)
    net.second.compile(fullgraph=True, backend="aot_eager")
    for module in (net.first, net.second, net.third, net):
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return train(net, 3, sync=True, loss_share=float(dist.get_rank() == 0))


def test_a_layer_compiled_by_itself_takes_gathered_weights() -> None:
    want = train(build(WIDTHS["aligned"], "blockwise"), 3)
    for got in run_ranks(compiled_layer, 2, timeout_s=150):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def replicated_shards(recipe: str) -> tuple[list[torch.Tensor], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    net = build(WIDTHS["uneven"], recipe)
    titan_fp8.apply_float8_all_gather(net)
    for module in (net.first, net.second, net.third, net):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    outs = train(net, 2, sync=True, loss_share=float(dist.get_rank() == 0))
    with Collectives() as seen, titan_fp8.ConstantWeights(net):
        pass
    return outs, seen.calls.count("allreduce_")


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_replicas_of_shards_find_scales_within_their_shard_group(recipe: str) -> None:
    want = train(build(WIDTHS["uneven"], recipe), 2)
    for got, collectives in run_ranks(replicated_shards, 4, recipe):
        assert collectives == 1
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class ShardCasts(TorchDispatchMode):
    """Counts casts of weights' shards."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("titan_fp8::cast_weight_rows", "titan_fp8::cast_tensor")
        return func(*args, **(kwargs or {}))


def shard_casts_of_a_step(recipe: str) -> tuple[int, int]:
    net = sharded(WIDTHS["aligned"], recipe)
    x = torch.ones(8, 64)
    counts: list[int] = []
    for constant in (titan_fp8.ConstantWeights(net), contextlib.nullcontext()):
        with constant, ShardCasts() as casts:
            for _ in range(2):  # microbatches, each gathers for forward and for backward
                # The three layers' inputs and gradients are cast too; under tensorwise by another op, in both layouts.
                net(x).sum().backward()
        counts.append(casts.count)
    return counts[0], counts[1]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_shard_is_cast_once_in_a_declared_step_and_at_each_gather_outside(recipe: str) -> None:
    for declared, undeclared in run_ranks(shard_casts_of_a_step, 2, recipe):
        assert (declared, undeclared) == (3, 3 * 2 * 2)


def outputs_after_changes(recipe: str) -> None:
    """Each change reaches the next forward, in declared steps and outside of them."""
    changes = {
        "parameter": lambda p, new: p.copy_(new),
        "data": lambda p, new: p.data.copy_(new),
        "local": lambda p, new: p.to_local().copy_(new.to_local()),
        "data of local": lambda p, new: p.to_local().data.copy_(new.to_local()),
        "inner": lambda p, new: p._local_tensor.tensor.copy_(new.to_local()),
        "numpy": lambda p, new: p._local_tensor.tensor.numpy().__setitem__(..., new.to_local().numpy()),
    }
    for constant_step in (False, True):
        net = sharded(WIDTHS["uneven"], recipe)
        constant = titan_fp8.ConstantWeights(net) if constant_step else contextlib.nullcontext()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
        for seed, change in enumerate(changes.values()):
            with constant:
                net(x).sum().backward()
            for p in net.parameters():
                p.grad = None if seed % 2 else p.grad
            new = torch.randn(301, 64, generator=torch.Generator().manual_seed(seed)) * 4.0**seed
            weight = net.first.weight
            with torch.no_grad():
                change(weight, distribute_tensor(new, weight.device_mesh, weight.placements))
            with constant:
                got = net(x)
            plain = build(WIDTHS["uneven"], recipe)
            with torch.no_grad():
                plain.first.weight.copy_(new)
            assert torch.equal(got, plain(x)), (constant_step, seed)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_every_change_of_a_shard_reaches_the_next_forward(recipe: str) -> None:
    run_ranks(outputs_after_changes, 2, recipe)


def change_inside_a_block(check: bool) -> None:
    net = sharded(WIDTHS["uneven"], "tensorwise")
    x = torch.ones(8, 64)
    with titan_fp8.ConstantWeights(net, check=check):
        net(x)
        shard = net.first.weight._local_tensor
        if check:
            shard.tensor.numpy()[...] = 3.0
        else:
            shard.data.fill_(3.0)
        with pytest.raises(RuntimeError, match=r"first\.weight was changed after it was cast"):
            net(x)


@pytest.mark.parametrize("check", [False, True])
def test_a_shard_that_changes_inside_a_block_is_refused(check: bool) -> None:
    run_ranks(change_inside_a_block, 2, check)


def reads_inside_a_block() -> None:
    net = sharded(WIDTHS["uneven"], "tensorwise")
    x, weight = torch.ones(8, 64), net.first.weight
    with titan_fp8.ConstantWeights(net), torch.no_grad():
        want = net(x)
        average = torch.zeros_like(weight).add_(weight)
        torch._foreach_lerp_([average], [weight], 0.5)
        plain = torch.zeros_like(weight.to_local().tensor)
        assert plain.copy_(weight.to_local()) is plain
        assert torch.equal(average.to_local(), plain)
        assert torch.equal(net(x), want)
        torch._foreach_lerp_([weight], [average], 0.5)
        with pytest.raises(RuntimeError, match=r"first\.weight was changed"):
            net(x)


def test_reading_a_shard_is_no_change() -> None:
    run_ranks(reads_inside_a_block, 2)


def gathered_as_under_offload(recipe: str) -> None:
    net = sharded(WIDTHS["aligned"], recipe)
    layer, weight = net.first, net.first.weight

    def gather() -> Any:  # with CPU offload FSDP2 copies the shard to the device for each gather
        copied = weight._local_tensor.clone()
        return copied.fsdp_pre_all_gather(weight.device_mesh, weight.shape, weight.stride(), layer, None)[0][0]

    with titan_fp8.ConstantWeights(net):
        assert gather() is gather()  # cast once
        with torch.no_grad():
            weight.to_local().mul_(2.0)
        with pytest.raises(RuntimeError, match=r"first\.weight was changed after it was cast"):
            gather()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_copies_of_an_offloaded_shard_are_no_changes(recipe: str) -> None:
    run_ranks(gathered_as_under_offload, 2, recipe)


def transposes_per_gather() -> tuple[list[int], bool]:
    original = gathered.gathered_operand
    made: list[torch.Size] = []

    def counting(*args: Any, for_input_grad: bool) -> Any:
        if for_input_grad:
            made.append(args[0].shape)
        return original(*args, for_input_grad=for_input_grad)

    gathered.gathered_operand = counting
    counts: list[int] = []
    x = torch.ones(8, 64, requires_grad=True)
    for reshard in (True, False):
        net = sharded(WIDTHS["aligned"], "blockwise", reshard)
        net.set_reshard_after_backward(reshard)
        made.clear()
        for _ in range(2):  # microbatches
            net(x).sum().backward()
        counts.append(len(made))
    net.set_reshard_after_backward(True)
    (old,) = torch.autograd.grad(net(x).square().sum(), x)
    torch.optim.SGD(net.parameters(), lr=8.0).step()
    (new,) = torch.autograd.grad(net(x).square().sum(), x)
    return counts, torch.equal(old, new)


def test_a_gathered_weight_is_transposed_once_per_gather() -> None:
    for counts, stale in run_ranks(transposes_per_gather, 2):
        assert counts == [3 * 2, 3]
        assert not stale
