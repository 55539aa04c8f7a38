"""Predictions against the published measurements, with the bounds that the README states."""

import csv
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from titan_train.planner.calibrate.defaults import MACHINES, TORCH, other_spread
from titan_train.planner.calibrate.fit import fit_constants, predicted
from titan_train.planner.cost.constants import prior
from titan_train.planner.estimate import estimate
from titan_train.planner.hardware.machine import load_machine
from titan_train.planner.memory.peak import memory_peak
from titan_train.planner.setup import Setup
from titan_train.planner.shapes import find_shape

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from published_rows import (
    SIMUMAX_FIT_ROWS,
    TABLES,
    TORCH_CONSTANTS,
    TORCH_FIT_ROWS,
    cut,
    fit_torch,
    load_rows,
    measured_machines,
    parse_row,
    predict_other,
    simumax_set,
)


def test_the_shipped_constants_and_machines_are_those_of_the_published_rows() -> None:
    fit = fit_torch([row for row in load_rows("published_throughput.csv") if row.number in TORCH_FIT_ROWS])
    for stack, found in fit.items():
        shipped = {name: getattr(TORCH[stack], name) for name in TORCH_CONSTANTS}
        # libraries of linear algebra round otherwise
        assert {name: getattr(found, name) for name in shipped} == pytest.approx(shipped, rel=1e-9)
        assert replace(found, **shipped, source=TORCH[stack].source) == TORCH[stack]
    assert measured_machines([r for r in load_rows("measured_rows.csv") if r.collection != "simumax"]) == MACHINES


def test_a_cut_model_keeps_one_dense_block() -> None:
    assert [b.count for b in cut(find_shape("deepseek_v3"), 4).blocks] == [1, 3]


def test_torchtitan_rows_within_five_percent_median_and_fifteen_worst() -> None:
    rows = load_rows("published_throughput.csv")
    assert len(TORCH_FIT_ROWS) <= 4
    errors = [abs(predicted(row, TORCH[row.setup.stack]) / row.tokens_per_s - 1) for row in rows]
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.15
    memory = [abs(memory_peak(r.shape, r.setup).allocated_gib / r.memory_gib - 1) for r in rows if r.memory_gib]
    assert statistics.median(memory) <= 0.04
    assert max(memory) <= 0.10


def test_simumax_rows_within_three_percent_median_and_thirteen_worst() -> None:
    rows = [row for row in load_rows("measured_rows.csv") if row.collection == "simumax"]
    fit = simumax_set()
    errors = {row.number: abs(predicted(row, fit) / row.tokens_per_s - 1) for row in rows}
    assert statistics.median(errors.values()) <= 0.03
    assert statistics.median(e for number, e in errors.items() if number not in SIMUMAX_FIT_ROWS) <= 0.03
    assert max(errors.values()) <= 0.13
    memory = [abs(memory_peak(r.shape, r.setup).allocated_gib / r.memory_gib - 1) for r in rows if r.memory_gib]
    assert statistics.median(memory) <= 0.01
    assert max(memory) <= 0.03


@pytest.mark.parametrize(
    "left",
    [
        lambda row: row.shape.name,
        lambda row: (row.collection, row.release),
        lambda row: "bridge" if row.collection == "skills" else row.collection,
    ],
    ids=["model", "release", "stack"],
)
def test_other_stacks_within_eight_percent_median_and_four_of_five_inside_the_interval(left: Any) -> None:
    rows = [row for row in load_rows("measured_rows.csv") if row.collection != "simumax"]
    found = [
        predict_other(row, measured_machines([other for other in rows if left(other) != left(row)])) for row in rows
    ]
    errors = [speed / row.tokens_per_s - 1 for row, (speed, _) in zip(rows, found, strict=True)]
    assert statistics.median(map(abs, errors)) <= 0.08
    inside = [abs(math.log1p(e)) <= 1.2816 * spread for e, (_, spread) in zip(errors, found, strict=True)]
    assert 0.75 <= statistics.mean(inside) <= 0.85


def test_an_interval_widens_for_a_new_machine_and_for_settings_that_no_page_states() -> None:
    text = (TABLES / "measured_rows.csv").read_text()
    record = list(csv.DictReader(text.splitlines()))[5]
    stated, unstated = (parse_row(given) for given in (record, record | {"graphs": "", "dispatcher": ""}))
    assert stated is not None
    assert unstated is not None
    assert [len(row.alternatives) for row in (stated, unstated)] == [1, 4]
    seen = measured_machines([stated])
    known, new = (other_spread(machine, routed=True, measured=seen) for machine in ("gb300", "h100"))
    assert predict_other(stated, seen)[1] == known < new
    assert predict_other(unstated, seen)[1] > known


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
    plain = tuple(replace(b, attention=b.attention and replace(b.attention, fused=False)) for b in shape.blocks)
    fused, written = (
        estimate(found, machine, setup).time.terms["attention"] for found in (shape, replace(shape, blocks=plain))
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


def test_a_constant_that_no_row_identifies_keeps_its_prior() -> None:
    rows = [row for row in load_rows("measured_rows.csv") if row.number == 89 and row.collection == "simumax"]
    fit = fit_constants(rows, ["exchange"], prior("te"))  # a dense model sends no tokens to experts
    assert fit.exchange == prior("te").exchange


def test_a_row_with_an_unknown_model_is_left_out_with_a_warning(tmp_path: Path) -> None:
    shipped = (TABLES / "published_throughput.csv").read_text()
    table = tmp_path / "rows.csv"
    table.write_text(shipped.replace("llama3.1-405b", "unheard-of-1b"))
    with pytest.warns(UserWarning, match="no shape is known"):
        rows = load_rows(str(table))
    assert len(rows) == 10


def test_a_row_whose_batch_leaves_ranks_without_a_sequence_is_left_out(tmp_path: Path) -> None:
    shipped = (TABLES / "published_throughput.csv").read_text()
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
