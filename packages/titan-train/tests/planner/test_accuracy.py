"""Predictions against the published measurements, with the bounds that the README states."""

import math
import statistics
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from titan_train.planner.calibrate.defaults import TORCH_FIT_ROWS, torch_set, without_factor
from titan_train.planner.calibrate.fit import fit_constants, predicted
from titan_train.planner.calibrate.rows import load_rows
from titan_train.planner.calibrate.software import choose_rows, leave_layout_out
from titan_train.planner.cost.constants import prior
from titan_train.planner.estimate import estimate
from titan_train.planner.hardware.machine import load_machine
from titan_train.planner.memory.peak import memory_peak
from titan_train.planner.model.families import find_shape
from titan_train.planner.setup import Setup

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
    # the same layout moves by 57 % between two releases of the table: no bound on the worst row is promised beyond this one
    assert max(map(abs, errors)) <= 0.80


def test_a_scan_gains_nothing_from_newer_matrix_units() -> None:
    shape, setup = find_shape("nemotron3_nano"), Setup(seq_len=8192, global_batch=8, dp_shard=8, stack="te_graphs")
    h100, b200 = (replace(load_machine(name), bf16=1e15, bandwidth=4e12) for name in ("h100", "b200"))
    seconds = [estimate(shape, machine, setup).time.terms["attention"] for machine in (h100, b200)]
    assert seconds[0] / seconds[1] == pytest.approx(b200.vector / h100.vector, rel=0.05)


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
