"""Kernels of experts and weights that differ from the reference at their first call are left for plain torch."""

import logging

import pytest
import torch
from titan_fp8 import dispatch, ops, reference
from titan_fp8.first_call import COMPARED, compared_at_first

E4M3 = torch.float8_e4m3fn
OFFS = torch.tensor([3, 3, 40], dtype=torch.int32)


def product_operands(rows=40):
    x, w = torch.randn(rows, 64), torch.randn(3, 96, 64)
    q, scale, *_ = reference.cast_grouped(x, OFFS, E4M3, True, "block1x128")
    return (q, scale, *reference.cast_weight_rows(w, E4M3, True), OFFS, "block1x128", "block128", torch.float32)


def operands_of(op):
    x = torch.randn(40, 64)
    if op == "cast_grouped":
        return x, OFFS, E4M3, True, "block1x128"
    if op.startswith("cast_weight"):
        return torch.randn(3, 96, 64), E4M3, True
    if op == "grouped_scaled_mm":
        return product_operands()
    _, _, xt, scale, ends = reference.cast_grouped(x, OFFS, E4M3, True, "block1x128")
    return xt, scale, xt, scale, ends, "block1x128", torch.float32


@pytest.mark.parametrize("op", COMPARED)
def test_a_right_kernel_runs_and_the_reference_only_once(op, caplog):
    calls = []
    plain = getattr(reference, op)

    def counted(*operands):
        calls.append(1)
        return plain(*operands)

    run = compared_at_first(op, plain, counted)
    operands = operands_of(op)
    for _ in range(3):
        run(*operands)
    assert calls == [1]
    assert not caplog.records


@pytest.mark.parametrize("op", COMPARED)
def test_a_wrong_kernel_is_said_once_and_left(op, caplog):
    plain, ran = getattr(reference, op), []

    def wrong(*operands):
        ran.append(1)
        results = plain(*operands)
        first = results if isinstance(results, torch.Tensor) else results[0]
        first.view(torch.uint8).view(-1)[:4] = 0x7F
        if first.dtype == torch.float32:
            first.view(-1)[0] = float("nan")
        return results

    run, operands = compared_at_first(op, wrong, plain), operands_of(op)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            got, want = run(*operands), plain(*operands)
            got, want = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, want))
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got[:1], want[:1], strict=True)
            )
    assert ran == [1]
    assert [record.message.split(":")[0] for record in caplog.records] == [op]


def test_other_sizes_and_a_tile_of_rows_are_kinds_of_their_own():
    kinds = []
    plain = reference.grouped_scaled_mm

    def counted(*operands):
        kinds.append(operands[0].shape)
        return plain(*operands)

    run = compared_at_first("grouped_scaled_mm", plain, counted)
    for rows in (40, 60, 140, 300):
        run(*product_operands(rows))
    assert [shape[0] for shape in kinds] == [40, 140]


def test_large_operands_are_not_compared(monkeypatch):
    monkeypatch.setattr("titan_fp8.first_call._MOST", 100)
    run = compared_at_first("grouped_scaled_mm", reference.grouped_scaled_mm, lambda *_: 1 / 0)
    run(*product_operands())


def test_a_comparison_that_fails_is_said_and_stops_nothing(caplog):
    run, operands = (
        compared_at_first("grouped_scaled_mm", reference.grouped_scaled_mm, lambda *_: 1 / 0),
        product_operands(),
    )
    for _ in range(2):
        assert torch.equal(run(*operands), reference.grouped_scaled_mm(*operands))
    assert [record.message for record in caplog.records] == [
        "grouped_scaled_mm could not be compared with plain torch: ZeroDivisionError: division by zero"
    ]


def test_what_was_not_finite_is_no_fault_of_the_kernel(caplog):
    q, scale, *rest = product_operands()
    run = compared_at_first("grouped_scaled_mm", reference.grouped_scaled_mm, reference.grouped_scaled_mm)
    run(q, torch.full_like(scale, float("nan")), *rest)
    assert not caplog.records


def test_a_kernel_that_is_asked_for_by_name_is_not_watched(monkeypatch):
    monkeypatch.setattr(dispatch, "_problem", lambda candidate, device, case: None)
    dispatch.implementation.cache_clear()
    plain = dispatch._load("cast_grouped", 0, torch.device("cpu"))
    assert dispatch.implementation("cast_grouped", torch.device("cpu"), "triton") is plain
    assert dispatch.implementation("cast_grouped", torch.device("cpu"), "auto") is not plain
    dispatch.implementation.cache_clear()


def test_the_weight_of_a_linear_is_compared_too(caplog):
    # of float32 weights a compiler got the transpose wrong, and gradients were finite: nothing else would have said it
    def wrong(*operands):
        q, scale, qt, scale_t = reference.cast_weight_block(*operands)
        return q, scale, qt.roll(1, 0), scale_t

    run = compared_at_first("cast_weight_block", wrong, reference.cast_weight_block)
    w = torch.randn(96, 64)
    assert torch.equal(run(w, E4M3, True)[2].float(), reference.cast_weight_block(w, E4M3, True)[2].float())
    assert [record.name for record in caplog.records] == ["titan_fp8.first_call"]


def test_every_compared_op_has_a_kernel_and_a_reference():
    assert all([c.name for c in dispatch._CANDIDATES[op]] == ["triton", "reference"] for op in COMPARED)
    assert all(hasattr(ops, op) for op in COMPARED)


def test_scales_in_another_memory_order_are_the_same(caplog):
    def by_columns(*operands):
        q, scale, *rest = reference.cast_grouped(*operands)
        return q, scale.t().clone(memory_format=torch.contiguous_format).t(), *rest

    compared_at_first("cast_grouped", by_columns, reference.cast_grouped)(*operands_of("cast_grouped"))
    row = torch.randn(40, 64), OFFS, E4M3, True, "row"
    compared_at_first("cast_grouped", by_columns, reference.cast_grouped)(*row)
    assert not caplog.records
