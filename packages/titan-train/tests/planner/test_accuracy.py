"""Predictions against the published measurements, with the bounds that the README states."""

import csv
import math
import statistics
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from titan_train.planner.calibrate.defaults import TORCH_FIT_ROWS, torch_set, without_factor
from titan_train.planner.calibrate.fit import fit_constants, predicted
from titan_train.planner.calibrate.rows import load_rows, parse_row
from titan_train.planner.calibrate.software import SoftwareKey, SoftwareModel, choose_rows, leave_layout_out
from titan_train.planner.cost.constants import prior
from titan_train.planner.estimate import estimate
from titan_train.planner.hardware.machine import load_machine
from titan_train.planner.memory.peak import memory_peak
from titan_train.planner.setup import Setup
from titan_train.planner.shapes import find_shape

_RECIPE = ("graphs", "ep_overlap", "mtp", "bf16_blocks", "recipe", "activation_checkpointing", "dispatcher", "offload")
SIMUMAX_FIT = (98, 100, 101, 102, 105, 108)
SIMUMAX_CONSTANTS = ("matmul", "attention", "local", "expert_scale", "exchange", "pointwise")


def test_torchtitan_rows_within_five_percent_median_and_fifteen_worst() -> None:
    rows = load_rows("published_throughput.csv")
    assert len(TORCH_FIT_ROWS) <= 4
    errors = [abs(predicted(row, torch_set().of(row.setup)) / row.tokens_per_s - 1) for row in rows]
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.15
    memory = [abs(memory_peak(r.shape, r.setup).allocated_gib / r.memory_gib - 1) for r in rows if r.memory_gib]
    assert statistics.median(memory) <= 0.04
    assert max(memory) <= 0.10


def test_simumax_rows_within_five_percent_median_and_thirteen_worst() -> None:
    rows = [row for row in load_rows("measured_rows.csv") if row.collection == "simumax"]
    fit = fit_constants([r for r in rows if r.number in SIMUMAX_FIT], SIMUMAX_CONSTANTS, prior("te"), pull=0.02)
    errors = [abs(predicted(row, fit) / row.tokens_per_s - 1) for row in rows]
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.13
    memory = [abs(memory_peak(r.shape, r.setup).allocated_gib / r.memory_gib - 1) for r in rows if r.memory_gib]
    assert statistics.median(memory) <= 0.01
    assert max(memory) <= 0.03


def test_other_stacks_within_ten_percent_median_without_the_layout_that_is_predicted() -> None:
    rows = [row for row in load_rows("measured_rows.csv") if row.collection != "simumax"]
    found = leave_layout_out(rows, without_factor)
    errors = [speed / row.tokens_per_s - 1 for row, (speed, _) in zip(rows, found, strict=True)]
    assert statistics.median(map(abs, errors)) <= 0.10
    assert abs(statistics.mean(errors)) <= 0.02
    inside = [abs(math.log1p(e)) <= 1.2816 * spread for e, (_, spread) in zip(errors, found, strict=True)]
    assert 0.75 <= statistics.mean(inside) <= 0.85
    assert max(map(abs, errors)) <= 0.25


def test_releases_near_in_time_and_rows_of_the_same_model_tell_more_about_a_routed_model() -> None:
    known = SoftwareKey("bridge", "mxfp8", "gb200", True, "qwen3_30b_a3b", "26.04")
    fitted = SoftwareModel((known,), np.array([0.3]))
    speeds = [
        fitted.factor(key)[0]
        for key in (
            known,
            replace(known, release="26.08"),
            replace(known, release="24.08"),
            replace(known, release="24.08", model="gpt_oss_120b"),
        )
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[1] > speeds[2] > speeds[3]
    dense = replace(known, routed=False)
    assert SoftwareModel((dense,), np.array([0.3])).factor(dense) == SoftwareModel((dense,), np.array([0.3])).factor(
        replace(dense, model="another", release="24.08")
    )


@pytest.mark.parametrize("release", ["", "main", "26"])
def test_a_release_that_is_not_a_date_has_no_place_in_time(release: str) -> None:
    assert SoftwareKey("bridge", "bf16", "h100", True, release=release).years == 0


def test_a_scan_gains_nothing_from_newer_matrix_units() -> None:
    shape, setup = find_shape("nemotron3_nano"), Setup(seq_len=8192, global_batch=8, dp_shard=8, stack="te_graphs")
    h100, b200 = (replace(load_machine(name), bf16=1e15, bandwidth=4e12) for name in ("h100", "b200"))
    seconds = [estimate(shape, machine, setup).time.terms["attention"] for machine in (h100, b200)]
    assert seconds[0] / seconds[1] == pytest.approx(b200.vector / h100.vector, rel=0.05)


def test_torch_recomputes_no_products_whose_results_backward_does_not_need() -> None:
    shape, machine = find_shape("llama3_8b"), load_machine("h100")
    setup = Setup(seq_len=8192, global_batch=8, dp_shard=8, recompute="full")
    early, whole = (
        estimate(shape, machine, replace(setup, early_stop=stop)).time.terms["recompute"] for stop in (True, False)
    )
    down = 14_336 * 4096
    products = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * down
    assert 1 - early / whole == pytest.approx(down / products, rel=0.35)  # attention and norms are repeated as well


def test_attention_that_is_not_fused_moves_its_scores_eleven_times() -> None:
    shape, machine = find_shape("gpt_oss_120b"), load_machine("gb200")
    setup = Setup(seq_len=4096, global_batch=4, microbatch=4, stack="te")
    fused, written = (
        estimate(shape, machine, replace(setup, fused_attention=fused)).time.terms["attention"]
        for fused in (True, False)
    )
    scores = 4 * 64 * 4096**2 * 2 * 36
    assert written - fused == pytest.approx(11 * scores / (machine.bandwidth * prior("te").bandwidth), rel=0.01)


def test_blocks_in_bf16_cost_their_share() -> None:
    shape, machine = find_shape("llama3_70b"), load_machine("b200")
    setup = Setup(seq_len=8192, global_batch=64, dp_shard=64, precision="nvfp4", stack="te_graphs")
    seconds = {
        share: estimate(shape, machine, replace(setup, bf16_share=share)).time.terms["products"]
        for share in (0.0, 0.25, 1.0)
    }
    assert seconds[0.25] == pytest.approx(0.75 * seconds[0.0] + 0.25 * seconds[1.0])
    bf16 = estimate(shape, machine, replace(setup, precision="bf16")).time.terms["products"]
    assert seconds[1.0] == pytest.approx(bf16)


def test_rows_without_recipe_columns_take_the_settings_of_their_release() -> None:
    row = next(r for r in load_rows("measured_rows.csv") if r.number == 44)
    assert (row.setup.stack, row.setup.dispatcher, row.setup.ep_overlap) == ("te", "alltoall", True)
    table = resources.files("titan_train.planner.data").joinpath("measured_rows.csv").read_text()
    plain = [{k: "" if k in _RECIPE else v for k, v in r.items()} for r in csv.DictReader(table.splitlines())]
    setups = {number: parse_row(plain[number], number) for number in (0, 5, 33, 44, 46, 75)}
    found = {n: (r.setup.stack, r.setup.dispatcher, r.setup.ep_overlap) for n, r in setups.items() if r is not None}
    assert found == {
        0: ("te_full", "hybridep", True),
        5: ("te_full", "hybridep", True),
        33: ("te_graphs", "alltoall", False),
        44: ("te", "alltoall", True),
        46: ("te", "alltoall", False),
        75: ("compile", "alltoall", False),
    }
    assert setups[33] is not None
    assert not setups[33].setup.fused_attention
    assert setups[75] is not None
    assert setups[75].setup.recompute == "full"


def test_a_set_is_fitted_on_two_rows_at_most() -> None:
    chosen = choose_rows([row for row in load_rows("measured_rows.csv") if row.collection != "simumax"])
    sets = [row.set_key for row in chosen]
    assert max(sets.count(key) for key in sets) <= 2


def test_a_constant_that_no_row_identifies_keeps_its_prior() -> None:
    rows = [row for row in load_rows("measured_rows.csv") if row.number == 89 and row.collection == "simumax"]
    fit = fit_constants(rows, ["exchange"], prior("te"))  # a dense model sends no tokens to experts
    assert fit.exchange == prior("te").exchange


def test_a_row_with_an_unknown_model_is_left_out_with_a_warning(tmp_path: Path) -> None:
    shipped = resources.files("titan_train.planner.data").joinpath("published_throughput.csv").read_text()
    table = tmp_path / "rows.csv"
    table.write_text(shipped.replace("llama3.1-405b", "unheard-of-1b"))
    with pytest.warns(UserWarning, match="no shape is known"):
        rows = load_rows(str(table))
    assert len(rows) == 10


def test_a_row_whose_batch_leaves_ranks_without_a_sequence_is_left_out(tmp_path: Path) -> None:
    shipped = resources.files("titan_train.planner.data").joinpath("published_throughput.csv").read_text()
    header, *lines = shipped.splitlines()
    row = dict(zip(header.split(","), next(csv.reader(lines[:1])), strict=True)) | {
        "global_batch": "4",
        "local_batch": "1",
    }
    with (tmp_path / "rows.csv").open("w") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    with pytest.warns(UserWarning, match="a batch of 4 leaves some of 8 data-parallel ranks without a sequence"):
        assert load_rows(str(tmp_path / "rows.csv")) == []
