"""Planning: units found, tables, closed forms. Pure: no process group anywhere in this file."""

import time
from typing import Any

import pytest
import torch
from model_for_tests import Block, TinyLM
from titan_fsdp import Collectives, Comm, MixedPrecision, Policy, Prefetch, Unit, clean_fqn, plan
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


def names(model: nn.Module, policy: Policy | None = None, **sizes: int) -> list[str]:
    return [unit.name for unit in plan(model, sizes or {"shard": 4}, policy).units]


def test_auto_finds_embedding_blocks_and_head() -> None:
    assert names(TinyLM()) == ["embed", "layers.0", "layers.1", "norm+head", "root"]


def test_auto_leaves_tied_embedding_and_head_to_the_root() -> None:
    assert names(TinyLM(tied=True)) == ["layers.0", "layers.1", "root"]


def test_auto_sees_through_checkpoint_wrappers_and_pipeline_stages() -> None:
    model: Any = TinyLM()
    model.layers = nn.ModuleDict({"7": checkpoint_wrapper(Block(6))})
    model.embed = None
    assert names(model) == ["layers.7", "norm+head", "root"]


def test_auto_finds_sibling_blocks_without_a_container() -> None:
    model = nn.Module()
    model.first, model.second, model.bias = Block(4), Block(4), nn.Linear(4, 4)
    assert names(model) == ["first", "second", "bias", "root"]


def test_a_model_without_blocks_is_one_unit_with_a_warning() -> None:
    decided = plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"shard": 2})
    assert [u.name for u in decided.units] == ["root"]
    assert "no repeated block was found" in decided.explain()


@pytest.mark.parametrize(
    ("reshard", "pp", "want"),
    [
        ("default", False, [True, True, True, False, False]),
        ("default", True, [False] * 5),
        ("always", True, [True] * 5),
        ("never", False, [False] * 5),
        (2, False, [2] * 5),
        (1, False, [False] * 5),
        (4, False, [True] * 5),
    ],
)
def test_reshard_table(reshard: Any, pp: bool, want: list[Any]) -> None:
    assert [u.reshard for u in plan(TinyLM(), {"shard": 4}, Policy(reshard=reshard, pp=pp)).units] == want


@pytest.mark.parametrize(("shards", "want"), [(8, 4), (4, True), (2, True), (6, True)])
def test_a_number_of_ranks_holds_on_a_units_own_mesh_where_it_divides_its_shards(shards: int, want: Any) -> None:
    policy = Policy(units=["auto", Unit("layers.0", mesh="experts")], reshard=4)
    units = plan(TinyLM(), {"shard": 8}, policy, meshes={"experts": {"shard": shards}}).units
    assert [u.reshard for u in units[:3]] == [4, want, 4]
    own = Policy(units=["auto", Unit("layers.0", mesh="experts", reshard=4)])
    if shards % 4:
        with pytest.raises(ValueError, match=rf"must divide its {shards} shards. Use 'always' or 'never'"):
            plan(TinyLM(), {"shard": 8}, own, meshes={"experts": {"shard": shards}})


def test_overrides_and_unit_settings_win_over_the_policy() -> None:
    policy = Policy(
        units=[Unit(Block, reshard="always"), Unit(["norm", "head"])],
        reshard="never",
        reshard_overrides={"layers.1": 2, "root": "always"},
    )
    assert [u.reshard for u in plan(TinyLM(), {"shard": 4}, policy).units] == [True, 2, False, True]


def test_explain_has_a_line_for_every_unit_and_the_steps_collectives() -> None:
    policy = Policy(mode="hsdp", mp=bf16("layers.*.norm"), reshard_overrides={"layers.0": 2})
    text = plan(TinyLM(), {"shard": 4, "replicate": 2}, policy).explain()
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert "kept over 2 ranks" in rows["layers.0"]
    assert "freed" in rows["layers.1"]
    assert "kept" in rows["norm+head"]
    assert rows["layers.0.norm"].count("fp32") == 2
    assert rows["layers.0"].count("fp32") == 1
    assert " bf16 " in rows["layers.0"]
    assert "shard 4 × replicate 2" in text
    step = plan(TinyLM(), {"shard": 4, "replicate": 2}, policy).collectives()
    assert isinstance(step, Collectives)
    assert f"{step.all_gather} all-gather" in text
    assert f"{step.all_reduce} all-reduce" in text


def test_a_unit_is_reduced_over_replicas_where_its_own_mesh_has_them() -> None:
    policy = Policy(mode="hsdp", units=[Unit("layers.*", mesh="experts")])
    for own, each in (({"shard": 2}, 0), ({"shard": 2, "replicate": 1}, 1), ({"shard": 2, "replicate": 2}, 1)):
        decided = plan(TinyLM(layers=3), {"shard": 4, "replicate": 2}, policy, meshes={"experts": own})
        counted = [decided.collectives(mesh=mesh) for mesh in ("experts", None)]
        assert [c and c.all_reduce for c in counted] == [each * 3, 1]


def test_closed_forms_of_three_blocks_and_a_root() -> None:
    """The counts measured on torch's own wrapping: 2G-1, 2G and G all-gathers for G = 4."""
    model = TinyLM(layers=3)

    def counts(reshard: Any) -> tuple[int, int]:
        # the root's own group keeps its parameters, as torch does by default
        policy = Policy(units=[Block], reshard=reshard, reshard_overrides={} if reshard != "always" else {"root": True})
        step = plan(model, {"shard": 4}, policy).collectives()
        assert step is not None
        return step.all_gather, step.reduce_scatter

    assert counts("always") == (8, 4)
    assert counts("never") == (4, 4)
    assert counts(2) == (8, 4)
    root_kept = Policy(units=[Block], reshard="always", reshard_overrides={"root": False})
    step = plan(model, {"shard": 4}, root_kept).collectives()
    assert step is not None
    assert (step.all_gather, step.reduce_scatter) == (7, 4)


def test_an_8b_sized_model_on_1024_ranks_plans_in_a_second_and_accounts_for_every_byte() -> None:
    with torch.device("meta"):
        model = TinyLM(layers=32, dim=4096)
    start = time.perf_counter()
    decided = plan(model, {"shard": 1024}, Policy(mp=MixedPrecision(param="bf16")))
    text = decided.explain()
    took = time.perf_counter() - start
    assert took < 1.0, took
    assert "32 x 100,679,680" in text
    total = sum(p.numel() for p in model.parameters())
    assert sum(unit.numel for unit in decided.units) == total
    largest = max(sum(p.shard_numel(1024) for p in u.params) for u in decided.units)
    assert largest < total / 32


def test_padding_is_warned_about_and_auto_shard_dim_avoids_it() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1024, 2), nn.Linear(1024, 2)])})
    assert "some hold nothing" in plan(model, {"shard": 4}, Policy(units=["experts.*"])).explain()
    decided = plan(model, {"shard": 4}, Policy(units=[Unit("experts.*", shard_dim="auto")]))
    assert decided.units[0].params[0].shard_dim == 1
    assert "experts.0.weight" not in decided.explain()


def test_names_are_those_of_the_plain_model() -> None:
    assert clean_fqn("layers.0._checkpoint_wrapped_module._orig_mod.up.weight") == "layers.0.up.weight"


def test_plan_leaves_the_model_alone() -> None:
    model = TinyLM()
    before = {n: (id(p), type(p)) for n, p in model.named_parameters()}
    plan(model, {"shard": 8})
    assert before == {n: (id(p), type(p)) for n, p in model.named_parameters()}
    assert plan(model, {"shard": 1}).apply(model) is model


def bf16(*keep: str) -> MixedPrecision:
    return MixedPrecision(param="bf16", keep_fp32=keep)


def rejections() -> list[Any]:
    tied = TinyLM(tied=True)
    cases: list[tuple[str, Any, str]] = [
        (
            "pattern",
            lambda: plan(TinyLM(), {"shard": 2}, Policy(units=["layer.*"])),
            r"'layer\.\*' matches no module.*layers",
        ),
        ("container", lambda: plan(TinyLM(), {"shard": 2}, Policy(units=["layers"])), r"ModuleList.*Use 'layers\.\*'"),
        ("root", lambda: plan(TinyLM(), {"shard": 2}, Policy(units=["root"])), "always wrapped"),
        ("class", lambda: plan(TinyLM(), {"shard": 2}, Policy(units=[nn.Conv2d])), "Conv2d.*matches no module"),
        ("twice", lambda: plan(TinyLM(), {"shard": 2}, Policy(units=[Block, "layers.0"])), "claimed by two units"),
        (
            "tied",
            lambda: plan(tied, {"shard": 2}, Policy(units=["embed", "head"])),
            r"tied.*Unit\(\['embed', 'head'\]\)",
        ),
        ("divisor", lambda: plan(TinyLM(), {"shard": 6}, Policy(reshard=4)), r"must divide its 6 shards.*\[2, 3\]"),
        ("override", lambda: plan(TinyLM(), {"shard": 2}, Policy(reshard_overrides={"x": True})), "matches no unit"),
        ("ddp", lambda: plan(TinyLM(), {"shard": 2}, Policy(mode="ddp")), "ddp replicates"),
        ("fsdp", lambda: plan(TinyLM(), {"replicate": 2}, Policy()), "use mode='hsdp'"),
        ("size", lambda: plan(TinyLM(), {"shard": 0}), "not a number of ranks"),
        ("axis", lambda: plan(TinyLM(), {"tp": 2}), "only 'shard' and 'replicate'"),
        (
            "mesh",
            lambda: plan(TinyLM(), {"shard": 2}, Policy(units=[Unit("layers.*", mesh="ep")])),
            r"Pass meshes=\{'ep'",
        ),
        ("dim", lambda: plan(TinyLM(), {"shard": 4}, Policy(units=[Unit("head", shard_dim=1)])), "not divisible by 4"),
        ("no mesh", lambda: plan(TinyLM(), {"shard": 2}).apply(TinyLM()), "apply needs a mesh"),
        ("alone", lambda: plan(TinyLM(), {}, Policy(mp=MixedPrecision(param="bf16"))).apply(TinyLM()), "world size 1"),
        ("other", lambda: plan(TinyLM(), {}).apply(TinyLM(layers=3)), "not the one that was planned"),
        (
            "half",
            lambda: plan(TinyLM(), {}, Policy(mp=MixedPrecision(param="bf16", keep_fp32=["*.bias"]))),
            "dtypes go by module",
        ),
        ("hook", lambda: Policy(comm=Comm(ddp_hook="bf16")), "hooks are for ddp"),
        (
            "hook mp",
            lambda: Policy(mode="ddp", comm=Comm(ddp_hook="fp16"), mp=MixedPrecision(param="bf16")),
            "float32 model",
        ),
        ("hook offload", lambda: Policy(mode="ddp", comm=Comm(ddp_hook="fp16"), offload="cpu"), "cannot offload"),
        ("buffers", lambda: Comm(reduce_scatter_buffers=0), "Use 1 or more"),
        (
            "ddp group",
            lambda: Policy(mode="ddp", comm=Comm(reduce_scatter_group="own")),
            "neither gathers nor scatters",
        ),
        ("symmetric", lambda: Comm(symmetric_memory=True, reduce_scatter_buffers=2), "one buffer only"),
        ("ddp rs", lambda: Policy(mode="ddp", comm=Comm(reduce_scatter="bf16")), "has no reduce-scatter"),
        (
            "rs bf16",
            lambda: Policy(comm=Comm(reduce_scatter="bf16"), mp=MixedPrecision(reduce="bf16")),
            "reduce='fp32'",
        ),
        ("reshard", lambda: Policy(reshard="sometimes"), "'default', 'always', 'never'"),
        ("mode", lambda: Policy(mode="zero"), "'fsdp', 'hsdp', 'ddp'"),
        ("divide", lambda: Policy(grad_divide=0.0), "must be positive"),
        (
            "divide alone",
            lambda: plan(TinyLM(), {"shard": 1}, Policy(grad_divide=3.0)).apply(TinyLM()),
            "grad_divide=3: without a process group .* grad_divide='sum'",
        ),
        ("patterns", lambda: Policy(ignore="lora"), "list of FQN patterns"),
        ("units", lambda: Policy(units="all"), "'auto'"),
        ("prefetch", lambda: Prefetch(forward=-1), "negative"),
        ("powersgd", lambda: Comm(powersgd_start_step=0), "Use 2 or more"),
        ("unit", lambda: Unit([]), "names no module"),
        ("type", lambda: Unit(dict), "not a torch.nn.Module"),
    ]
    return [pytest.param(make, message, id=name) for name, make, message in cases]


@pytest.mark.parametrize(("make", "message"), rejections())
def test_rejects_with_the_cause_and_the_way_out(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_scalar_parameter_is_named() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="'scale' is a scalar"):
        plan(model, {"shard": 2})


@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "head.*"])
def test_a_tied_weight_is_ignored_by_any_of_its_names(name: str) -> None:
    assert plan(TinyLM(tied=True), {"shard": 4}, Policy(ignore=[name])).ignored == ("embed.weight",)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.ones(2, dtype=torch.complex64), r"'scale' is complex64.*view_as_real"),
        (torch.empty(0, 4), r"'scale', shape \(0, 4\), has no elements.*requires_grad_\(False\)"),
    ],
    ids=["complex", "empty"],
)
def test_a_parameter_whose_gradient_cannot_be_reduced_is_named_unless_it_is_frozen_or_ignored(
    values: torch.Tensor, words: str
) -> None:
    model = nn.Module()
    model.scale = nn.Parameter(values)
    with pytest.raises(ValueError, match=words):
        plan(model, {"shard": 2})
    assert plan(model, {"shard": 2}, Policy(ignore=["scale"])).ignored == ("scale",)
    model.scale.requires_grad_(False)
    plan(model, {"shard": 2})
