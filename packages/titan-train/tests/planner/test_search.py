"""The search: legal, deterministic, right about what fits, and clear about what does not."""

import dataclasses
import itertools
from dataclasses import replace
from importlib import resources

import pytest
import titan_cp
import torch
from titan_pipeline import FAMILIES, build_schedule, simulate, verify
from titan_train.config import load_config
from titan_train.optim.compact_adamw import CompactAdamW
from titan_train.parallel.layout.run import plan_run
from titan_train.planner import Setup, estimate, find_shape, load_machine
from titan_train.planner.calibrate.defaults import constants_for
from titan_train.planner.cost.constants import prior
from titan_train.planner.cost.links import gather_seconds, reduce_seconds, span
from titan_train.planner.cost.products import rates
from titan_train.planner.cost.schedules import SEARCHED, schedule_cost, schedules_for
from titan_train.planner.cost.step import STATES_PASSES, rank_parameters, step_time
from titan_train.planner.memory.peak import in_flight, memory_peak
from titan_train.planner.search.refuse import exchanges, refuse_search, refuse_setup
from titan_train.planner.search.search import outside, search
from titan_train.planner.search.space import PlanRequest, degrees
from titan_train.planner.shapes import shape_of_config
from titan_train.planner.translate import config_toml, setup_of_config
from titan_train.planner.view.tables import ranking_text
from titan_train.tasks.diffusion.context import plan_joint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def request(model: str, gpus: int, seq_len: int, batch: int, machine: str = "h100", **rest: object) -> PlanRequest:
    rest = {"precisions": ("bf16", "tensorwise") if machine == "h100" else ("bf16",), **rest}
    return PlanRequest(
        shape=find_shape(model), machine=load_machine(machine), gpus=gpus, seq_len=seq_len, global_batch=batch, **rest,
    )  # type: ignore[arg-type]  # fmt: skip


AUTHORS = {
    # what the tables' authors chose, with torchtitan or its like
    ("llama3_8b", 8, 8192, 16): {"dp_shard": 8, "microbatch": 2, "recompute": "selective", "precision": "tensorwise"},
    ("llama3_8b", 8, 131_072, 8): {"cp": 8, "recompute": "full", "precision": "tensorwise"},
    ("llama3_70b", 256, 8192, 512): {
        "dp_shard": 32, "tp": 8, "microbatch": 16, "recompute": "full", "precision": "tensorwise",
    },
    ("llama3_405b", 512, 8192, 256): {
        "dp_shard": 8, "tp": 8, "pp": 8, "stages_per_rank": 2, "schedule": "interleaved_1f1b", "microbatch": 4,
        "recompute": "full", "precision": "tensorwise", "async_tp": True,
    },
    # Megatron-Bridge's and Automodel's, with the trainer's own software
    ("deepseek_v3", 1024, 4096, 8192): {
        "dp_shard": 64, "tp": 2, "pp": 8, "ep": 64, "stages_per_rank": 4, "schedule": "interleaved_1f1b",
        "recompute": "selective", "precision": "tensorwise", "imbalance": 1.1,
    },
    ("qwen3_30b_a3b", 8, 4096, 512): {"dp_shard": 8, "ep": 8, "microbatch": 8, "recompute": "full", "imbalance": 1.1},
}  # fmt: skip


@pytest.mark.parametrize(("asked", "chosen"), AUTHORS.items(), ids=lambda x: str(x)[:40])
def test_a_plan_beats_or_equals_the_layout_that_the_tables_authors_chose(asked: tuple, chosen: dict) -> None:
    model, gpus, seq_len, batch = asked
    ranking = search(request(model, gpus, seq_len, batch))
    theirs = Setup(seq_len=seq_len, global_batch=batch, **chosen)
    assert theirs.world_size == gpus
    machine = ranking.request.machine
    constants = constants_for(machine, theirs, routed=ranking.request.shape.moe)
    reference = estimate(ranking.request.shape, machine, theirs, constants)
    assert max(e.tokens_per_s for e in ranking.best) >= reference.tokens_per_s
    assert ranking.best[0].tokens_per_s >= 0.98 * reference.tokens_per_s
    assert all(e.memory.allocated <= ranking.request.limit_bytes for e in ranking.best)


@pytest.mark.parametrize(("schedule", "v"), [
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("looped_bfs", 2), ("zb_h1", 1),
    ("zb_h2", 1), ("interleaved_zb", 2), ("interleaved_zb", 4), ("zbv", 2), ("v_half", 2), ("v_min", 2), ("1f1b_v", 2),
    ("dualpipe_v", 2),
])  # fmt: skip
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (6, 18), (8, 16)])
def test_bubble_and_microbatches_in_flight_are_those_of_the_simulator(
    schedule: str, v: int, ranks: int, microbatches: int
) -> None:
    built = build_schedule(schedule, ranks, microbatches, num_chunks=v if v > 1 else None)
    setup = Setup(
        seq_len=4096, global_batch=microbatches, pp=ranks, schedule=schedule, stages_per_rank=v, equal_stages=True
    )
    # a model whose layers divide, without a head: all stages are equal
    llama = find_shape("llama3_8b")
    shape = dataclasses.replace(llama, vocab=0, blocks=(replace(llama.blocks[0], count=96),))
    terms = estimate(shape, load_machine("h100"), setup, prior("compile")).time.terms
    busy = sum(terms[name] for name in ("products", "attention", "pointwise"))
    splits = built.splits_backward
    assert schedule_cost(schedule, ranks, v, microbatches).splits is splits
    waiting = simulate(built).makespan_bubble
    assert (terms["bubble"] - 0.03 * busy * splits) / busy == pytest.approx(waiting / (1 - waiting), rel=1e-9)
    peaks = verify(built).peak
    held = in_flight(setup, 0.0), in_flight(setup, 1.0)
    if schedule in ("zb_h1", "interleaved_zb"):
        assert held == pytest.approx((peaks[0], peaks[-1]), abs=0.01)
    if splits:  # released bit by bit: the closed form bounds it
        assert max(peaks) <= max(held) + 1e-9 < max(peaks) + 1
    else:
        assert held[0] == pytest.approx(peaks[0]) or schedule == "1f1b_v"
        assert max(held) == pytest.approx(max(peaks))
        assert held[1] == pytest.approx(peaks[-1])


@pytest.mark.parametrize(("name", "v", "p", "m"), [
    ("interleaved_zb", 2, 4, 6), ("interleaved_1f1b", 3, 4, 7), ("zbv", 2, 5, 5), ("zbv", 2, 5, 7), ("zbv", 2, 8, 9),
    ("zb_h2", 1, 4, 5),
    ("1f1b", 1, 4, 2), ("v_min", 2, 9, 9), ("v_half", 2, 5, 6),
])  # fmt: skip
def test_numbers_that_a_schedule_does_not_divide_are_simulated(name: str, v: int, p: int, m: int) -> None:
    waiting = simulate(build_schedule(name, p, m, num_chunks=v if v > 1 else None)).makespan_bubble
    assert schedule_cost(name, p, v, m).bubble == pytest.approx(m * waiting / (1 - waiting), rel=1e-9)


def test_a_schedule_from_a_file_counts_as_it_is_simulated(tmp_path) -> None:
    file = tmp_path / "own.json"
    file.write_text(build_schedule("zbv", 4, 8).to_json())
    assert schedule_cost(str(file), 4, 2, 8).bubble == pytest.approx(schedule_cost("zbv", 4, 2, 8).bubble)
    assert schedule_cost(str(file), 4, 2, 8).on_a_v
    with pytest.raises(ValueError, match=r"is for 4 ranks and 8 microbatches; this run has parallel\.pp=4 and 16"):
        schedule_cost(str(file), 4, 2, 16)
    with pytest.raises(ValueError, match="neither a family"):
        schedule_cost("1f2b", 4, 1, 8)


def test_the_search_has_every_family_that_no_other_dominates() -> None:
    names = {name for name, _ in schedules_for(8, 32, 80, (2, 4))}
    assert names == {"1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "v_half", "v_min", "1f1b_v"}
    # without a multiple of the ranks nothing can be interleaved, and the V with the smallest bubble is left
    assert "zbv" in {name for name, _ in schedules_for(8, 36, 80, (2, 4))}
    assert {*SEARCHED, "zb_auto"} == set(FAMILIES)


@pytest.mark.parametrize(
    ("model", "gpus", "seq_len", "batch", "machine"),
    [
        ("deepseek_v3", 1024, 4096, 8192, "h100"),
        ("qwen3_30b_a3b", 8, 4096, 512, "h100"),
        ("llama3_1b", 1, 2048, 8, "rtx4090"),
        ("flux_dev", 64, 4608, 256, "h100"),
    ],
)
def test_a_plan_is_found(model: str, gpus: int, seq_len: int, batch: int, machine: str) -> None:
    ranking = search(request(model, gpus, seq_len, batch, machine))
    assert ranking.best
    assert ranking.best[0].setup.world_size == gpus


def test_the_order_is_the_same_each_time() -> None:
    asked = request("llama3_8b", 16, 8192, 64)
    assert [e.setup for e in search(asked).best] == [e.setup for e in search(asked).best]


def test_fixed_degrees_and_the_memory_limit_are_kept() -> None:
    ranking = search(request("llama3_8b", 16, 8192, 64, fixed={"tp": 4}, max_memory_gib=40.0))
    assert {e.setup.tp for e in ranking.best} == {4}
    assert max(e.memory.allocated_gib for e in ranking.best) <= 40.0


def test_what_cannot_fit_is_refused_with_the_term_and_the_smallest_change() -> None:
    asked = request("llama3_405b", 8, 8192, 64)
    ranking = search(asked)
    assert not ranking.best
    text = refuse_search(asked, ranking.closest)
    assert "Largest use: optimizer" in text
    assert "Smallest number of devices that fits: 128, or 64 with optimizer.states = 'int8'." in text


def test_a_batch_that_no_layout_shares_evenly_is_refused_with_the_nearest() -> None:
    asked = request("llama3_8b", 3, 8192, 64)
    ranking = search(asked)
    assert ranking.closest is None
    assert "evenly: 63 or 66." in refuse_search(asked, ranking.closest)
    assert search(replace(asked, global_batch=66)).best
    shared = request("llama3_8b", 8, 8192, 64, fixed={"ep": 7})
    assert "nearest" not in refuse_search(shared, search(shared).closest)


def test_a_fixed_degree_that_no_layout_has_is_refused_with_those_that_are() -> None:
    asked = request("llama3_8b", 8, 8192, 64, fixed={"tp": 3})
    assert "no legal layout has tp=3. With the other choices tp may be 1, 2, 4, 8." in refuse_search(asked, None)


def test_the_best_in_bf16_is_named_where_float8_wins() -> None:
    ranking = search(request("llama3_8b", 8, 8192, 64))
    assert ranking.best[0].setup.precision == "tensorwise"
    assert {e.setup.precision for e in ranking.kinds["bf16"]} == {"bf16"}
    text = ranking_text(ranking)
    assert "MFU is over the bf16 peak" in text
    assert "float8 changes the numbers" in text


def test_what_experts_over_ranks_buy_is_listed_and_experts_are_outside_the_measured_rows() -> None:
    ranking = search(request("qwen3_30b_a3b", 8, 4096, 64))
    kinds = ranking.kinds
    assert all(e.setup.ep > 1 for e in kinds["experts over ranks (ep)"])
    assert all(e.setup.ep == 1 for e in kinds["experts on every rank"])
    assert all("experts on torch's own stack" in outside(e) for e in ranking.best)  # with ep and without


def test_degrees_need_not_be_powers_of_two() -> None:
    found = list(degrees(request("llama3_8b", 24, 8192, 48)))
    assert {chosen["pp"] for chosen in found} >= {1, 2, 3, 4, 6, 8, 12, 24}
    assert {chosen["dp_shard"] for chosen in found} >= {3, 6, 12, 24}


def test_each_fourth_block_is_recomputed_where_that_is_enough() -> None:
    shape, limit = find_shape("llama3_8b"), 60.0
    shares: dict[float, set[str]] = {}
    for gib in range(36, 60, 2):
        found = search(replace(request("llama3_8b", 8, 8192, 64), max_memory_gib=float(gib), fixed={"microbatch": 1}))
        for e in found.best:
            shares.setdefault(e.setup.recompute_share, set()).add(e.setup.recompute)
    assert shares[0.25] == {"full"}
    setup = replace(found.best[0].setup, recompute="full", recompute_share=0.25)
    config = config_toml("llama3_8b", setup, nproc=8)
    assert 'checkpoint = "every"\nevery = 4' in config
    assert memory_peak(shape, setup).allocated_gib < limit


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_a_machine_without_units_for_scaled_blocks_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match=f"no units for precision {precision!r}"):
        rates(load_machine("h100"), prior("compile"), precision)
    assert rates(load_machine("b200"), prior("compile"), precision).products > 0


def test_many_devices_share_parameters_in_groups_because_rings_grow_with_their_members() -> None:
    best = search(request("llama3_8b", 4096, 8192, 8192)).best[0].setup
    assert 8 <= best.dp_shard * best.cp <= 512
    machine = load_machine("h100")
    groups = [span(machine, n, 1, 0.8, 0.8) for n in (8, 128, 2048)]
    assert groups[2].ring_s == pytest.approx(8.4e-6 + 1792 * 3.4e-6 + 255 * 14e-6)
    assert gather_seconds(1e6, groups[2], calls=2) - gather_seconds(1e6, groups[2]) == pytest.approx(groups[2].ring_s)
    assert reduce_seconds(64, groups[2]) < 0.1 * gather_seconds(64, groups[2])
    assert groups[0].ring_s == groups[0].tree_s
    across = span(machine, 128, 8, 0.8, 0.8)  # one member a node
    assert across.ring_s == across.tree_s


def test_an_inner_rank_of_a_v_holds_blocks_with_experts_alone() -> None:
    shape = find_shape("deepseek_v3")
    setup = Setup(seq_len=4096, global_batch=256, pp=16, schedule="v_min", stages_per_rank=2, dp_shard=8, ep=8)
    routed = sum(n * experts for n, _, experts in shape.block_sizes)
    assert rank_parameters(shape, setup, first=False, share=4 / 61)[1] == pytest.approx(4 / 58 * routed / 8)
    assert rank_parameters(shape, setup, first=False, share=1.0)[1] == pytest.approx(routed / 8)


def test_float32_sends_twice_the_bytes_of_bf16() -> None:
    shape, machine = find_shape("llama3_8b"), load_machine("h100")
    instant = {name: replace(getattr(machine, name), latency_s=0.0) for name in ("local", "network")}
    machine = replace(machine, **instant)
    setup = Setup(seq_len=8192, global_batch=16, dp_shard=2, tp=2, cp=2, pp=2, overlap=False, cp_method="allgather")
    wide, narrow = (estimate(shape, machine, replace(setup, precision=p)).time.terms for p in ("fp32", "bf16"))
    assert [wide[axis] / narrow[axis] for axis in ("tp", "cp", "pp")] == pytest.approx([2.0] * 3, rel=0.1)
    assert 1.2 < wide["dp"] / narrow["dp"] < 1.6  # gathers alone: gradients are reduced in float32 either way
    assert wide["pointwise"] == 2 * narrow["pointwise"]


def test_one_setup_that_does_not_fit_names_a_change_that_fits() -> None:
    shape, machine = find_shape("llama3_8b"), load_machine("h100")
    setup = Setup(seq_len=32_768, global_batch=8, dp_shard=8)
    text = refuse_setup(shape, setup, memory_peak(shape, setup), machine.memory_bytes)
    assert "Largest use: activations" in text
    assert "Smallest change that fits: " in text
    assert memory_peak(shape, replace(setup, recompute="full")).allocated < machine.memory_bytes


def test_a_long_sequence_is_refused_with_the_cut_that_fits() -> None:
    shape, limit = find_shape("llama3_70b"), 72.0 * 2**30
    setup = Setup(seq_len=131_072, global_batch=64, dp_shard=64, recompute="full", loss="chunked")
    peak = memory_peak(shape, setup)
    text = refuse_setup(shape, setup, peak, limit)
    assert "Largest use: activations" in text
    assert "Smallest change that fits on these devices: cp=8, dp_shard=8" in text
    named = replace(setup, cp=8, dp_shard=8)
    assert (
        memory_peak(shape, named).allocated <= limit < memory_peak(shape, replace(setup, cp=4, dp_shard=16)).allocated
    )


def test_the_configuration_that_is_written_is_the_setup_that_was_found(tmp_path) -> None:
    ranking = search(request("llama3_70b", 64, 8192, 512))
    for e in ranking.best:
        file = tmp_path / "plan.toml"
        file.write_text(config_toml("llama3_70b", e.setup, nproc=8))
        config = load_config(str(file))
        assert shape_of_config(config).parameters() == 70_553_706_496
        read = setup_of_config(config, 64)
        assert replace(read, async_tp=e.setup.async_tp, cp_method=e.setup.cp_method) == e.setup


def test_more_of_a_resource_never_slows_a_step_and_more_shards_never_need_more_memory() -> None:
    machine = load_machine("h100")
    faster = [
        replace(machine, bf16=2 * machine.bf16),
        replace(machine, bandwidth=2 * machine.bandwidth),
        replace(machine, network=replace(machine.network, bytes_per_s=2 * machine.network.bytes_per_s)),
        replace(machine, local=replace(machine.local, bytes_per_s=2 * machine.local.bytes_per_s)),
    ]
    for model, tp, cp, pp, recompute in itertools.product(
        ("llama3_8b", "qwen3_30b_a3b"), (1, 4), (1, 4), (1, 4), ("none", "full")
    ):
        ep = 4 if model != "llama3_8b" else 1
        setup = Setup(seq_len=16_384, global_batch=256, dp_shard=16, tp=tp, cp=cp, pp=pp, ep=ep, recompute=recompute)  # type: ignore[arg-type]
        shape = find_shape(model)
        base = estimate(shape, machine, setup)
        assert all(seconds >= 0 for seconds in base.time.terms.values())
        for better in faster:
            # overlap costs compute a share of the hidden seconds, so a term may shift, but the step may not slow
            assert estimate(shape, better, setup).time.total <= base.time.total * (1 + 1e-9)
        more = replace(setup, dp_shard=32)
        assert memory_peak(shape, more).allocated <= memory_peak(shape, setup).allocated


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gb_s = 50.0", "must be positive"),
        ("host_gb_s = 55", "must be positive"),
        ("ranks = 8", "must be positive"),
        ("fp8_tflops = 1979", "must not be negative"),
        ("latency_us = 25", "must not be negative"),
    ],
)
def test_a_hardware_file_with_a_negative_figure_is_refused(tmp_path, line: str, said: str) -> None:
    shipped = resources.files("titan_train.planner.hardware").joinpath("h100.toml").read_text()
    assert line in shipped
    file = tmp_path / "own.toml"
    file.write_text(shipped.replace(line, line.replace("= ", "= -")))
    with pytest.raises(ValueError, match=said):
        load_machine(str(file))


def test_an_eager_plan_of_long_sequences_moves_activations_to_the_host_instead_of_computing_them_again(
    tmp_path,
) -> None:
    ranking = search(request("llama3_1b", 1, 65_536, 8, stack="eager"))
    best = next(entry for entry in ranking.best if entry.setup.precision == "bf16")
    assert best.setup.offload_activations == 1.0
    assert best.setup.recompute == "none"
    again = dataclasses.replace(best.setup, recompute="full", offload_activations=0.0)
    assert estimate(best.shape, best.machine, again, best.constants).tokens_per_s < best.tokens_per_s
    whole = memory_peak(best.shape, dataclasses.replace(best.setup, offload_activations=0.0)).parts["activations"]
    assert best.memory.parts["activations"] == pytest.approx(whole * 2 / 16)  # two blocks stay
    assert ranking.request.limit_bytes < whole < 128 * 2**30
    file = tmp_path / "plan.toml"
    file.write_text(config_toml("llama3_1b", best.setup, nproc=1))
    config = load_config(str(file))
    assert config.activations.offload
    assert setup_of_config(config, 1).offload_activations == 1.0


def test_small_optimizer_states_have_lists_of_their_own_and_are_first_only_where_nothing_else_fits(tmp_path) -> None:
    ranking = search(request("llama3_1b", 1, 2048, 64, "rtx4090"))
    assert not any(e.setup.states == "fp32" for e in ranking.best)
    assert "Nothing fits with AdamW's states in float32" in ranking_text(ranking)
    file = tmp_path / "plan.toml"
    file.write_text(config_toml("llama3_1b", ranking.best[0].setup, nproc=1))
    config = load_config(str(file))
    assert config.optimizer.states == ranking.best[0].setup.states
    assert setup_of_config(config, 1) == ranking.best[0].setup

    ranking = search(request("llama3_8b", 8, 8192, 64, max_memory_gib=40.0))
    assert {e.setup.states for e in ranking.best} == {"fp32"}
    small = ranking.kinds["optimizer states in int8"][0]
    assert memory_peak(small.shape, small.setup).allocated == pytest.approx(small.memory.allocated)
    assert small.memory.allocated_gib <= 40.0
    gained = 1 - small.time.total / ranking.best[0].time.total
    said = f"optimizer.states = 'int8' buys {gained:.1%} of the time"
    assert said in ranking_text(ranking) if gained > 0 else "buys no time here" in ranking_text(ranking)
    assert (
        search(replace(ranking.request, states=("fp32",)))
        .kinds.keys()
        .isdisjoint({"optimizer states in int8", "optimizer states in bf16"})
    )


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_an_update_with_small_states_moves_the_bytes_that_the_planner_counts(states: str) -> None:
    """Each operator reads its arguments and writes its results; views move nothing."""
    moved = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal moved
            out = func(*args, **(kwargs or {}))
            given, made = (
                {id(t): t for t in tree_leaves(x) if isinstance(t, torch.Tensor)} for x in ((args, kwargs), out)
            )
            where = {t.untyped_storage()._cdata for t in given.values()}
            if func._schema.is_mutable or not any(t.untyped_storage()._cdata in where for t in made.values()):
                moved += sum(t.nbytes for t in (*given.values(), *made.values()))
            return out

    weight = torch.nn.Parameter(torch.randn(256, 2048))
    weight.grad = torch.randn(256, 2048)
    group = {"params": [weight], "param_names": ["w"]}
    optimizer = CompactAdamW([group], states=states, names={}, shards={})  # type: ignore[arg-type]
    with Count():
        optimizer.step()
    assert moved / weight.numel() == pytest.approx(STATES_PASSES[states], rel=0.05)


ODD = {
    "parallel.mode": "ddp", "parallel.reshard": "never", "parallel.async_tp": "true", "parallel.offload": "cpu",
    "parallel.accumulate": "unsharded", "parallel.compress": "bf16", "activations.mlp_tiles": 4, "activations.offload": "true",
    "float8.recipe": "rowwise", "train.fused_loss": "false", "train.dtype": "fp32", "optimizer.states": "int8",
    "context.dynamic": "true", "activations.matmul_every": 0,
}  # fmt: skip
OTHER = {
    "parallel.sequence_parallel": "false", "context.method": "usp", "context.ulysses_degree": 2, "context.layout": "contiguous",
    "train.global_batch": 24, "train.ramp_from": 3, "train.ramp_tokens": 1_000_000,
}  # fmt: skip


@pytest.mark.parametrize("odd", [ODD, OTHER], ids=["odd", "other"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"precision": "fp32"},
        {"precision": "tensorwise", "tp": 2, "dp_shard": 4},
        {"cp": 2, "dp_shard": 4},
        {"recompute": "selective"},
    ],
    ids=str,
)
def test_what_was_planned_is_written_whatever_the_base_says(odd: dict, changed: dict, tmp_path) -> None:
    base, file = tmp_path / "base.toml", tmp_path / "plan.toml"
    sections: dict[str, list[str]] = {}
    for key, value in odd.items():
        section, name = key.split(".")
        text = str(value) if str(value) in ("true", "false") or isinstance(value, int) else f'"{value}"'
        sections.setdefault(section, []).append(f"{name} = {text}")
    tables = (f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items())
    base.write_text('extends = "llama3_1b"\n' + "\n".join(tables) + "\n")
    planned = Setup(seq_len=2048, global_batch=16, microbatch=1, dp_shard=8, loss="chunked").changed(**changed)
    planned = planned.changed(async_tp=planned.tp > 1)
    file.write_text(config_toml("llama3_1b", planned, nproc=8, base=str(base)))
    config = load_config(str(file))
    assert setup_of_config(config, 8) == planned
    assert config.parallel.accumulate == "sharded"
    assert config.activations.checkpoint != "selective" or config.activations.matmul_every == 2
    plan_run(config, 8)


@pytest.mark.parametrize(
    ("devices", "tp", "each"), [(12, 1, 6), (12, 2, 6), (20, 4, 4), (28, 1, 7), (16, 8, 8), (4, 2, 4)]
)
def test_any_number_of_devices_is_written_as_machines_that_fill_it(devices: int, tp: int, each: int, tmp_path) -> None:
    file = tmp_path / "plan.toml"
    setup = Setup(seq_len=2048, global_batch=devices, dp_shard=devices // tp, tp=tp, loss="chunked")
    file.write_text(config_toml("llama3_1b", setup, nproc=8))
    launch = load_config(str(file)).launch
    assert (launch.nproc, launch.nproc * launch.nnodes) == (each, devices)


@pytest.mark.parametrize(("model", "tp"), [("llama3_8b", 1), ("llama3_8b", 8), ("qwen3_14b", 1), ("flux_dev", 1)])
@pytest.mark.parametrize("cp", [2, 4, 16])
def test_context_parallelism_is_planned_by_the_method_that_the_run_takes(model: str, tp: int, cp: int) -> None:
    words = f"--model.name={model} --parallel.cp={cp} --parallel.tp={tp} --train.dtype=bf16"
    config = load_config("flux_dev" if model == "flux_dev" else "llama3_1b", words.split())
    widths = next(block.attention for block in shape_of_config(config).blocks)
    heads, kv_heads = max(1, widths.heads // tp), max(1, widths.kv_heads // tp)
    plan = plan_joint(config, heads, widths.head_dim, 0, torch.bfloat16) if model == "flux_dev" else titan_cp.plan(
        8192, size=cp, rank=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=widths.head_dim, dtype=torch.bfloat16,
        method="auto",
    )  # fmt: skip
    setup = setup_of_config(config, cp * tp)
    asked = ("ulysses", plan.ulysses_degree) if plan.method == "usp" else (plan.method, 0)
    assert (setup.cp_method, setup.ulysses_degree) == asked


def test_usp_takes_an_exchange_of_heads_among_neighbours_and_a_ring_between_them() -> None:
    machine, shape = load_machine("h100"), find_shape("llama3_8b")
    setup = Setup(seq_len=32_768, global_batch=1, cp=16, cp_method="ulysses")
    both, heads, ring = (
        estimate(shape, machine, replace(setup, **asked)).time.terms["cp"]
        for asked in ({"ulysses_degree": 8}, {}, {"cp_method": "ring"})
    )
    assert 0 < both < min(heads, ring)  # heads go inside a machine, and a ring of 2 hides behind attention


def test_the_memory_of_the_list_is_that_of_its_setups() -> None:
    """The method of context parallelism is chosen before memory is compared with the limit."""
    asked = request("flux_dev", 16, 4608, 64, fixed={"cp": 2, "tp": 1})
    found = search(asked, 100).best
    assert any(e.setup.cp_method == "ulysses" for e in found)
    for e in found:
        assert memory_peak(e.shape, e.setup).allocated == e.memory.allocated <= asked.limit_bytes


@pytest.mark.parametrize(
    ("model", "gpus", "seq_len", "batch", "how"),
    [
        ("llama3_8b", 64, 32768, 64, {}),
        ("llama3_70b", 64, 8192, 128, {"stack": "eager"}),
        ("qwen3_30b_a3b", 32, 4096, 512, {}),
        ("deepseek_v3", 512, 4096, 4096, {"precisions": ("bf16",)}),
        ("llama3_8b", 16, 8192, 64, {"precisions": ("fp32", "bf16")}),
    ],
)  # fmt: skip
def test_what_a_search_remembers_is_what_is_computed_anew(
    model: str, gpus: int, seq_len: int, batch: int, how: dict
) -> None:
    ranking = search(request(model, gpus, seq_len, batch, **how), 10_000)
    found = [*ranking.best, *(e for kind in ranking.kinds.values() for e in kind), *ranking.front]
    assert len({e.setup.microbatch for e in found}) > 1
    for e in found[:: 1 + len(found) // 400]:
        shape = replace(e.shape)  # which remembers nothing
        assert memory_peak(shape, e.setup).allocated == pytest.approx(e.memory.allocated, rel=1e-12)
        assert step_time(shape, e.machine, e.constants, e.setup).terms == e.time.terms


def test_adapters_are_predicted_as_adapters() -> None:
    config = load_config("lora")
    setup = setup_of_config(config, 1)
    assert setup.task == "lora"
    shape = find_shape("llama3_8b")
    whole, adapted = (memory_peak(shape, replace(setup, task=task)).parts for task in ("pretrain", "lora"))
    assert "gradients" not in adapted
    assert adapted["optimizer"] < whole["optimizer"] / 20
    assert adapted["parameters"] == whole["parameters"]  # frozen ones stay in float32
    spread = Setup(seq_len=2048, global_batch=8, dp_shard=8, task="lora")
    kept = memory_peak(shape, replace(spread, reshard=False)).allocated - memory_peak(shape, spread).allocated
    assert kept > shape.parameters()  # most of the gathered weights, in bf16


def test_adapters_are_planned_as_adapters() -> None:
    asked = request("llama3_8b", 1, 2048, 8, states=("fp32",))
    assert all(e.setup.offload_optimizer for e in search(asked).best)  # all states do not fit one H100
    best = search(replace(asked, task="lora")).best
    assert best
    assert {(e.setup.task, e.setup.offload_optimizer) for e in best} == {("lora", 0.0)}
    sharded = search(replace(asked, task="lora", gpus=8)).best
    assert any(e.setup.tp > 1 for e in sharded)
    assert not any(e.setup.async_tp for e in sharded)  # which adapters lack


def test_copies_that_do_not_fit_are_refused_with_the_shards_that_fit() -> None:
    shape, limit = find_shape("llama3_8b"), 72.0 * 2**30
    setup = Setup(seq_len=2048, global_batch=8, dp_replicate=8, sharding="ddp", loss="chunked")
    said = refuse_setup(shape, setup, memory_peak(shape, setup), limit)
    assert "Smallest change that fits on these devices: parallel.mode='fsdp' with dp_replicate=1, dp_shard=8 (" in said
    assert refuse_setup(shape, setup.changed(dp_replicate=2), memory_peak(shape, setup), 40 * 2**30).endswith(
        "it fits."
    )
    pairs = setup.changed(sharding="fsdp", dp_replicate=4, dp_shard=2)
    assert next(exchanges(shape, pairs))[1] == pairs.changed(dp_replicate=1, dp_shard=8)


def test_copies_on_all_data_parallel_ranks_are_planned_as_ddp(tmp_path) -> None:
    asked = request("llama3_1b", 8, 2048, 64, fixed={"dp_replicate": 8})
    found, file = search(asked).best, tmp_path / "plan.toml"
    assert {(e.setup.sharding, e.setup.dp_shard) for e in found} == {("ddp", 1)}
    file.write_text(config_toml("llama3_1b", found[0].setup, nproc=8))
    assert setup_of_config(load_config(str(file)), 8) == found[0].setup
    routed = list(degrees(request("qwen3_30b_a3b", 8, 2048, 64, fixed={"dp_replicate": 2})))
    assert {chosen["ep"] for chosen in routed if chosen["dp_shard"] * chosen["cp"] == 1} == {1}
    assert any(chosen["ep"] > 1 for chosen in routed)


def test_axes_that_a_model_lacks_are_no_choice_of_the_user() -> None:
    asked = request("llama3_8b", 8, 2048, 63, uncut=("tp", "cp", "pp", "ep"))
    assert {chosen["tp"] for chosen in degrees(replace(asked, global_batch=64))} == {1}
    said = refuse_search(asked, search(asked).closest)
    assert "no legal layout has" not in said
    assert "The nearest batch that all devices can share evenly: 56 or 64." in said


def test_given_numbers_are_kept_or_refused_by_name() -> None:
    asked = request("llama3_8b", 8, 8192, 64, fixed={"ep": 2})
    assert not search(asked).best
    assert "no legal layout has ep=2. With the other choices ep may be 1." in refuse_search(asked, None)
    wide = search(request("llama3_1b", 8, 512, 2048, fixed={"microbatch": 32})).best
    assert {e.setup.microbatch for e in wide} == {32}


def test_copies_that_follow_from_the_degrees_are_predicted_as_those_asked_for() -> None:
    words = ["--train.global_batch", "8", "--launch.nproc", "8"]
    asked = load_config("llama3_1b", [*words, "--parallel.mode", "ddp"])
    degrees = [*words, "--parallel.mode", "auto", "--parallel.dp_replicate", "8", "--parallel.dp_shard", "1"]
    assert setup_of_config(load_config("llama3_1b", degrees), 8) == setup_of_config(asked, 8)


def test_more_recomputation_than_of_each_fourth_block_is_named() -> None:
    shape = find_shape("llama3_8b")
    setup = Setup(seq_len=8192, global_batch=8, dp_shard=8, recompute="full", recompute_share=0.25, loss="chunked")
    said = refuse_setup(shape, setup, memory_peak(shape, setup), 35 * 2**30)
    assert "Smallest change that fits: full recomputation (" in said


def test_stages_inside_a_machine_send_at_the_rate_of_one_link() -> None:
    asked = request("llama3_8b", 8, 8192, 64)
    setup = Setup(seq_len=8192, global_batch=64, pp=8, stack="compile")
    found = estimate(asked.shape, asked.machine, setup)
    link = span(asked.machine, 8, 1, found.constants.local, found.constants.network)
    assert link.local
    sent = 2 * setup.tokens * asked.shape.dim / link.bytes_per_s + link.latency_s
    want = 0.5 * 2 * (setup.microbatches + 7) * sent
    assert found.time.terms["pp"] == pytest.approx(want)


def test_a_schedule_from_a_file_is_predicted_as_its_family(tmp_path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(build_schedule("v_half", 4, 8).to_json())
    words = ["--parallel.pp", "4", "--train.global_batch", "8", "--train.microbatch", "1", "--launch.nproc", "4"]
    mine, family = (
        setup_of_config(load_config("llama3_1b", [*words, "--pipeline.schedule", name]), 4)
        for name in (str(file), "v_half")
    )
    assert (mine.stages_per_rank, mine.head_on_first_rank) == (2, True)
    assert (
        memory_peak(find_shape("llama3_1b"), mine).parts.keys()
        == memory_peak(find_shape("llama3_1b"), family).parts.keys()
    )
    assert replace(mine, schedule="v_half", on_a_v=False) == family


def test_the_microbatch_of_a_growing_batch_is_the_runs() -> None:
    words = ["--train.global_batch", "512", "--train.ramp_from", "32", "--train.ramp_tokens", "1000000000"]
    config = load_config("llama3_8b", [*words, "--train.microbatch", "0", "--launch.nproc", "8"])
    assert setup_of_config(config, 8).microbatch == plan_run(config, 8).batch.microbatch < 512 // 8
