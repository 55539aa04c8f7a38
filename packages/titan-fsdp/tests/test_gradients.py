"""Gradients, not parameters: AdamW hides a wrong scale, so a parameter comparison would pass with sum for mean."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from model_for_tests import TinyLM, batches, fill, loss_of
from titan_fsdp import (
    Accumulate,
    Comm,
    Policy,
    Prefetch,
    Unit,
    accumulate,
    full_state_dict,
    materialize,
    named_parameters,
    plan,
    share_streams,
    unwrap,
    verify,
)
from titan_fsdp.torch_private import _STREAMS, fsdp_modules
from titan_testing import run_ranks
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

# float32, values of order 0.1, sums of up to 8 ranks in another order: seen 3e-8.
TOLERANCE = 1e-6
MICROBATCHES = 2


def reference(ranks: int, microbatches: int, tied: bool = False) -> dict[str, Tensor]:
    """Gradients of the mean loss over all ranks and microbatches, in one process."""
    model = materialize(TinyLM(tied=tied), "cpu", fill)
    tokens, targets = batches(ranks, microbatches)
    for m in range(microbatches):
        for r in range(ranks):
            (loss_of(model, tokens[m, r], targets[m, r]) / (microbatches * ranks)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def mesh_for(mode: str) -> DeviceMesh:
    world = dist.get_world_size()
    if mode == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Full gradients by plain FQN."""
    return {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in named_parameters(model)}


def step(model: torch.nn.Module, microbatches: int, keep: Accumulate) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, targets = batches(world, microbatches)
    for m in range(microbatches):
        with accumulate(model, m, microbatches, keep):
            (loss_of(model, tokens[m, rank], targets[m, rank]) / microbatches).backward()


def worst(got: dict[str, Tensor], want: dict[str, Tensor], scale: float = 1.0) -> float:
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n] * scale).abs().max()) for n in want)


def run_policies(
    cases: list[tuple[Policy, Accumulate]], tied: bool = False, steps: int = 1
) -> list[tuple[float, str, bool]]:
    """For each case: the largest gradient error, the verification report, and whether the counts agreed."""
    world = dist.get_world_size()
    want = reference(world, MICROBATCHES, tied)
    meshes = {mode: mesh_for(mode) for mode in {policy.mode for policy, _ in cases}}
    results: list[tuple[float, str, bool]] = []
    for policy, keep in cases:
        with torch.device("meta"):
            model: Any = TinyLM(tied=tied)
        decided = plan(model, meshes[policy.mode], policy)
        if policy.comm.ddp_hook:
            model = decided.apply(materialize(model, "cpu", fill))
        else:
            model = materialize(decided.apply(model), "cpu", fill)
        for _ in range(steps):
            model.zero_grad()
            seen = verify(decided, model, lambda m=model, k=keep: step(m, MICROBATCHES, k), MICROBATCHES, keep)
        divide = {"mean": 1.0, "sum": float(world)}.get(str(policy.grad_divide))
        scale = divide if divide is not None else world / float(policy.grad_divide)
        results.append((worst(gradients(model), want, scale) / scale, seen.report(), seen.ok))
        assert full_state_dict(model, rank0=False).keys() == unwrap(TinyLM(tied=tied)).state_dict().keys()
    return results


def check(cases: list[tuple[Policy, Accumulate]], ranks: int, **options: Any) -> None:
    for rank, results in enumerate(run_ranks(run_policies, ranks, cases, timeout_s=150, **options)):
        for (policy, keep), (error, report, ok) in zip(cases, results, strict=True):
            where = f"rank {rank} of {ranks}, keep={keep}, {policy}"
            assert error <= TOLERANCE, f"{where}: gradients differ by {error}"
            assert ok, f"{where}: {report}"


def keeps(mode: str) -> list[Accumulate]:
    return ["sharded", "unsharded", "zero1"] + (["hsdp-ar"] if mode == "hsdp" else [])


def settings() -> list[Any]:
    """Every mode, reshard policy and number of ranks that exist together."""
    found: list[Any] = []
    for ranks in (2, 4, 8):
        for mode in ("fsdp", "hsdp", "ddp"):
            shard = ranks // 2 if mode == "hsdp" else ranks
            reshards: list[Any] = ["default"] if mode == "ddp" else ["default", "always", "never"]
            reshards += [2] if mode != "ddp" and shard >= 4 else []
            found += [pytest.param(ranks, mode, r, id=f"{mode}-{r}-{ranks}ranks") for r in reshards]
    return found


@pytest.mark.parametrize(("ranks", "mode", "reshard"), settings())
def test_gradients_and_collectives_match_the_single_process_in_every_accumulation_mode(
    ranks: int, mode: str, reshard: Any
) -> None:
    check([(Policy(mode=mode, reshard=reshard), keep) for keep in keeps(mode)], ranks)


@pytest.mark.parametrize("mode", ["fsdp", "hsdp", "ddp"])
def test_gradient_divide_by_sum_and_number_is_right_on_gloo(mode: str) -> None:
    cases = [(Policy(mode=mode, grad_divide=d), k) for d in ("sum", 3.0) for k in ("sharded", "unsharded")]
    check(cases, 4)
    check(cases[::2], 2)  # hsdp: 2 replicas of one shard, where torch would divide twice


OVERLAPPED = Comm(reduce_scatter_group="own", reduce_scatter_buffers=3)
needs_2_15 = pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="torch < 2.15")


@needs_2_15
@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
def test_gradients_are_the_same_with_reduce_scatters_in_a_group_and_buffers_of_their_own(mode: str) -> None:
    check([(Policy(mode=mode, comm=OVERLAPPED), keep) for keep in keeps(mode)], 4)


def run_groups() -> list[set[int]]:
    """Addresses of the group of all reduce-scatters, and of all all-gathers, of one model."""
    model = plan(TinyLM(), mesh_for("fsdp"), Policy(comm=OVERLAPPED)).apply(TinyLM())
    infos = [g.mesh_info for m in fsdp_modules(model) for g in m._get_fsdp_state()._fsdp_param_groups]
    return [{id(i.reduce_scatter_process_group) for i in infos}, {id(i.shard_process_group) for i in infos}]


@needs_2_15
def test_all_units_share_one_group_for_reduce_scatters_beside_the_one_for_all_gathers() -> None:
    for scatters, gathers in run_ranks(run_groups, 2):
        assert len(scatters) == len(gathers) == 1
        assert scatters.isdisjoint(gathers)


def test_a_torch_without_the_groups_is_refused_by_name_when_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_separate_reduce_scatter_group", raising=False)
    with pytest.raises(ValueError, match=r"comm.reduce_scatter_group='own' needs torch 2.15 or newer"):
        plan(TinyLM(), {"shard": 2}, Policy(comm=OVERLAPPED))


def run_symmetric_memory() -> None:
    with pytest.raises(ValueError, match=r"symmetric memory is NCCL's|needs torch 2.12"):
        plan(TinyLM(), mesh_for("fsdp"), Policy(comm=Comm(symmetric_memory=True))).apply(TinyLM())


def test_symmetric_memory_without_cuda_is_refused() -> None:
    run_ranks(run_symmetric_memory, 1)


def run_first_collectives(reshard: Any) -> tuple[list[str], set[str]]:
    """Groups of all-reduces and "symmetric", in their order; and the groups of the units."""
    from titan_fsdp.wrapping import apply

    order: list[str] = []
    all_reduce = dist.all_reduce

    def noting(tensor: Tensor, group: Any) -> None:
        order.append(group.group_name)
        all_reduce(tensor, group=group)

    apply._check_mesh = lambda *unused: None  # which refuses the CPU
    dist.all_reduce = noting
    FSDPModule.set_symm_mem_for_comm = lambda module: order.append("symmetric")
    policy = Policy(mode="hsdp", reshard=reshard, comm=Comm(symmetric_memory=True, reduce_scatter_group="own"))
    model = plan(TinyLM(), mesh_for("hsdp"), policy).apply(TinyLM())
    groups = [g for m in fsdp_modules(model) for g in m._get_fsdp_state()._fsdp_param_groups]
    infos = [info for g in groups for info in (g.mesh_info, g.post_forward_mesh_info) if info is not None]
    found = [g for i in infos for g in (i.shard_process_group, i.reduce_scatter_process_group) if g is not None]
    return order, {group.group_name for group in found}


@needs_2_15
@pytest.mark.parametrize(("ranks", "reshard", "groups"), [(4, "always", 2), (8, 2, 3)])
def test_ranks_of_each_group_meet_before_its_memory_is_symmetric(ranks: int, reshard: Any, groups: int) -> None:
    for order, expected in run_ranks(run_first_collectives, ranks, reshard):
        met = order[: order.index("symmetric")]
        assert sorted(met) == sorted(expected)
        assert len(met) >= groups
        assert set(order[len(met) :]) == {"symmetric"}


def run_two_stages(shared: bool) -> tuple[list[Tensor], bool]:
    """Gradients of two stages whose backwards alternate as in an interleaved pipeline; whether their streams are one's."""
    torch.manual_seed(0)
    mesh = mesh_for("fsdp")
    blocks = [torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]) for _ in range(2)]
    policy = Policy(units=[torch.nn.Linear], reshard="always")
    stages: list[Any] = [plan(block, mesh, policy).apply(block) for block in blocks]
    if shared:
        share_streams(stages)
    inputs = torch.randn(4, 2, 8)
    middle: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def forward(m: int) -> None:
        first = stages[0](inputs[m])
        second = first.detach().requires_grad_()
        middle[m] = (first, second, stages[1](second))

    def backward(stage: int, m: int) -> None:
        stages[stage].set_is_last_backward(m == 3)
        stages[stage].set_requires_gradient_sync(m == 3)
        first, second, last = middle[m]
        last.sum().backward() if stage else first.backward(second.grad)

    for m in range(3):
        forward(m)
    for stage, m in ((1, 0), (0, 0), (1, 1)):
        backward(stage, m)
    forward(3)
    for stage, m in ((1, 2), (1, 3), (0, 1), (0, 2), (0, 3)):
        backward(stage, m)
    contexts = [stage._get_fsdp_state()._comm_ctx for stage in stages]
    same = all(getattr(contexts[0], name) is getattr(contexts[1], name) for name in _STREAMS)
    return [p.grad.full_tensor() for stage in stages for p in stage.parameters()], same


def test_stages_share_streams_and_keep_their_gradients() -> None:
    """torch's own share_comm_ctx ends this with an IndexError: the first stage's last backward clears the other's order."""
    for (alone, _), (together, same) in zip(
        run_ranks(run_two_stages, 2, False), run_ranks(run_two_stages, 2, True), strict=True
    ):
        assert same
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def run_unit_on_its_own_mesh(mode: Literal["fsdp", "hsdp"]) -> None:
    """The second block is sharded, and its gradient averaged, over pairs of ranks instead of all four."""
    world, rank = dist.get_world_size(), dist.get_rank()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "within"))
    policy = Policy(mode=mode, units=["layers.0", Unit("layers.1", mesh="experts")])
    decided = plan(TinyLM(), mesh_for(mode), policy, meshes={"experts": pairs["within"]})
    model = materialize(decided.apply(TinyLM()), "cpu", fill)
    seen = verify(decided, model, lambda: step(model, 1, "sharded"))
    assert seen.ok, seen.report()
    tokens, targets = batches(world, 1)
    mine = slice(rank // 2 * 2, rank // 2 * 2 + 2)
    got = gradients(model)
    for part, ranks in (("layers.1.", mine), ("", slice(None))):
        single = materialize(TinyLM(), "cpu", fill)
        loss_of(single, tokens[0, ranks], targets[0, ranks]).backward()
        want = {n: p.grad for n, p in single.named_parameters() if n.startswith(part)}
        if not part:
            want = {n: g for n, g in want.items() if not n.startswith("layers.1.")}
        assert worst({n: got[n] for n in want}, want) <= TOLERANCE


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
def test_a_unit_on_its_own_mesh_is_reduced_over_that_mesh(mode: str) -> None:
    run_ranks(run_unit_on_its_own_mesh, 4, mode, timeout_s=150)


class Sharing(torch.nn.Module):
    """Three blocks; a submodule is also that of the root, of the other blocks, or a block stands twice in the list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        one = torch.nn.Linear(8, 8)
        if kind == "root first":
            self.shared = one
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8) if kind == "block twice" else one)
            for _ in range(3)
        )
        if kind == "block twice":
            self.blocks[1] = self.blocks[0]
        if kind == "root last":
            self.shared = one

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.shared(x) if hasattr(self, "shared") else x


def run_sharing(kind: str, mode: str) -> list[str]:
    torch.manual_seed(0)
    model = Sharing(kind)
    single = Sharing(kind)
    single.load_state_dict(model.state_dict())
    decided = plan(model, mesh_for(mode), Policy(mode=mode))
    decided.apply(model)
    x = torch.randn(2 * dist.get_world_size(), 8)
    model(x[2 * dist.get_rank() :][:2]).square().mean().backward()
    single(x).square().mean().backward()
    assert worst(gradients(model), {n: p.grad for n, p in single.named_parameters()}) <= TOLERANCE
    return [unit.name for unit in decided.units if unit.params]


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
@pytest.mark.parametrize(
    ("kind", "units"),
    [
        ("root first", ["root"]), ("root last", ["root"]), ("between blocks", ["blocks.0+blocks.1+blocks.2"]),
        ("block twice", ["blocks.0", "blocks.2"]),
    ],
)  # fmt: skip
def test_submodules_that_several_modules_share_are_wrapped_once_and_match_the_single_process(
    kind: str, units: list[str], mode: str
) -> None:
    assert run_ranks(run_sharing, 2, kind, mode)[0] == units


def run_checkpointed_blocks() -> None:
    world = dist.get_world_size()
    for policy in (Policy(), Policy(mode="ddp"), Policy(reshard="always", prefetch="recorded")):
        model: Any = TinyLM()
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
        decided = plan(model, mesh_for(policy.mode), policy)
        model = materialize(decided.apply(model), "cpu", fill)
        seen = verify(decided, model, lambda m=model: step(m, 1, "sharded"))
        assert seen.ok, seen.report()
        assert worst(gradients(model), reference(world, 1)) <= TOLERANCE


def test_checkpointed_blocks_match_the_single_process_under_their_plain_names() -> None:
    run_ranks(run_checkpointed_blocks, 2, timeout_s=150)


def test_gradient_divide_is_right_on_one_rank() -> None:
    check([(Policy(mode=m, grad_divide=d), "sharded") for m in ("fsdp", "ddp") for d in ("mean", "sum", 3.0)], 1)


def test_prefetch_changes_neither_gradients_nor_counts() -> None:
    policies = [Policy(prefetch="recorded"), Policy(prefetch=Prefetch(forward=2, backward=2))]
    check([(p, "sharded") for p in policies] + [(replace(policies[0], mode="hsdp"), "hsdp-ar")], 4, steps=2)


def test_tied_embeddings_match_the_single_process() -> None:
    cases: list[tuple[Policy, Accumulate]] = [
        (Policy(mode=mode, units=units), "sharded")
        for mode in ("fsdp", "hsdp", "ddp")
        for units in ("auto", ["layers.*"], [Unit(["embed", "norm", "head"]), "layers.*"])
    ]
    check(cases, 4, tied=True)


def test_explicit_units_overrides_and_shard_dims_match_the_single_process() -> None:
    policies = [
        Policy(
            units=[Unit("layers.*", shard_dim="auto"), "head"], reshard_overrides={"layers.0": "never", "root": True}
        ),
        Policy(units=["layers.*.up", "layers.*"], pp=True),
        Policy(units=["layers.0", Unit(["layers.1", "norm"], reshard=2)], offload="cpu-nopin"),
    ]
    check([(p, keep) for p in policies for keep in ("sharded", "unsharded")], 4)


def test_ddp_hooks_match_within_their_precision() -> None:
    cases: list[tuple[Policy, Accumulate]] = [
        (Policy(mode="ddp", comm=Comm(ddp_hook=hook), grad_divide=divide), keep)
        for hook in ("fp16", "bf16", "powersgd")
        for divide in ("mean", 3.0)
        for keep in ("sharded", "unsharded")
    ]
    # Relative to gradients of order 0.3: one rounding to bfloat16 (2^-9), or float16 (2^-12), on each rank;
    # PowerSGD still all-reduces exactly in its first steps.
    allowed = {"fp16": 2e-4, "bf16": 2e-3, "powersgd": TOLERANCE}
    for results in run_ranks(run_policies, 2, cases, timeout_s=150):
        for (policy, _), (error, _, _) in zip(cases, results, strict=True):
            assert error <= allowed[str(policy.comm.ddp_hook)], f"{policy}: {error}"


def run_after_a_dropped_step(mode: str, keep: Accumulate) -> float:
    """The largest gradient error of a step after one that was not finished."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model: Any = TinyLM()
    model = materialize(plan(model, mesh_for(mode), Policy(mode=mode)).apply(model), "cpu", fill)
    optimizer = torch.optim.SGD(model.parameters())
    tokens, targets = batches(world, MICROBATCHES)
    with accumulate(model, 0, MICROBATCHES, keep):
        loss_of(model, tokens[0, rank], targets[0, rank]).backward()
    optimizer.zero_grad()
    step(model, MICROBATCHES, "sharded" if keep == "hsdp-ar" else keep)
    return worst(gradients(model), reference(world, MICROBATCHES))


@pytest.mark.parametrize(
    ("mode", "keep"), [("fsdp", "unsharded"), ("fsdp", "zero1"), ("ddp", "unsharded"), ("hsdp", "hsdp-ar")]
)
def test_a_dropped_step_leaves_nothing_to_the_next(mode: str, keep: Accumulate) -> None:
    assert max(run_ranks(run_after_a_dropped_step, 4, mode, keep)) <= TOLERANCE
