"""Bubbles and peak memory of every family equal their formulas; the paper's table comes out digit for digit."""

import itertools
import math
from dataclasses import replace

import pytest
from titan_pipeline import FAMILIES, Costs, build_schedule, lower_bound, simulate, verify

RANKS = (2, 3, 4, 5, 8)
ALL_RANKS = range(2, 17)


def _cases(name, ranks):
    chunks = {"interleaved_1f1b": (1, 2, 4), "looped_bfs": (2, 3), "interleaved_zb": (1, 2, 4)}.get(name, (None,))
    for p, v in itertools.product(ranks, chunks):
        for m in (p, 2 * p, 4 * p, 4 * p + 3):
            if name in ("interleaved_1f1b", "interleaved_zb") and m % p:
                continue  # larger groups, with more memory; see the last test
            if name == "dualpipe_v" and m < 2 * p:
                continue
            yield p, m, v


def _expected(name, p, m, v):
    """(stage idle, makespan idle, peak) with T_F = T_B = T_W = 2 a rank; peak in microbatches of a rank."""
    t = 2.0
    whole = (p - 1) * 3 * t
    if name in ("gpipe", "1f1b"):
        return whole, whole, m if name == "gpipe" else p
    if name == "looped_bfs":
        return whole / v, whole / v, m
    if name == "interleaved_1f1b":
        return whole / v, whole / v, min(m, ((v - 1) * p + 2 * (p - 1) + 1) / v if v > 1 else p)
    if name in ("zb_h1", "interleaved_zb"):
        idle = (p - 1) * t / (v or 1)
        return idle, idle, p
    if name in ("zb_h2", "zb_auto"):  # zb_auto without a limit
        late = (p - 1) * t
        if m == p:  # too few microbatches to fill either side
            return late, late if name == "zb_auto" else late + t * ((p - 1) // 2), p
        return 0.0, late, m if name == "zb_auto" else 2 * p - 1
    if name == "zbv":
        return ((p - 1) * t,) * 2 + (p,) if m == p else (0.0, (p - 1) * t / 2, p)
    if name == "dualpipe_v":
        return (p - 1) * t / 2, (p - 1) * t / 2, p + 0.5
    if name == "v_half":
        idle = 3 * (p - 1) if p % 2 == 0 else 3 * p - 4
        return idle, idle, (p + 2) // 2
    if name == "v_min":
        idle = 4 * p - 3 if p % 3 == 0 else 4 * p - 5
        return idle, idle, (p + 4) // 3
    assert name == "1f1b_v"
    idle = 6 * (p - 1) + (p - 1) % 3
    return idle, idle, 2 * p // 3 + 1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks", [RANKS, pytest.param(ALL_RANKS, marks=pytest.mark.slow)], ids=["few", "all"])
def test_bubbles_and_peak_memory_equal_the_closed_forms(name, ranks):
    for p, m, v in _cases(name, ranks):
        schedule = build_schedule(name, p, m, num_chunks=v)
        # the V family's papers count an activation until its W
        context = 1.0 if name in ("v_half", "v_min", "zb_auto") else 0.43
        costs = Costs.uniform(
            schedule.num_stages, forward=2, input_grad=2, weight_grad=2, weight_context=context,
            num_chunks=schedule.num_chunks,
        )  # fmt: skip
        proof = verify(schedule, costs=costs)
        result = simulate(schedule, costs)
        stage, makespan, peak = _expected(name, p, m, v)
        case = f"{name} p={p} m={m} v={v}"
        assert result.work == pytest.approx(6 * m), case
        assert result.span - result.work == pytest.approx(stage), case
        assert result.makespan - result.work == pytest.approx(makespan), case
        assert max(proof.peak) == pytest.approx(peak), case
        assert result.peak_memory == pytest.approx(proof.peak), case


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_holds_what_the_definition_says(name):
    """Rank by rank for the schedules whose papers give it."""
    p, m = 6, 24
    schedule = build_schedule(name, p, m)
    context = 0.25
    costs = Costs.uniform(schedule.num_stages, weight_context=context, num_chunks=schedule.num_chunks)
    peaks = verify(schedule, costs=costs).peak
    per_rank = {
        "gpipe": [float(m)] * p,
        "1f1b": [float(p - r) for r in range(p)],
        "zb_h1": [p - r + r * context for r in range(p)],
        "zb_h2": [2 * (p - r) - 1 + 2 * r * context for r in range(p)],
        "zbv": [float(p)] * p,
    }
    if name in per_rank:
        assert peaks == pytest.approx(per_rank[name])
    else:
        assert all(0 < x <= max(peaks) for x in peaks)


# Zero Bubble Pipeline Parallelism (arXiv 2401.10241): table 9 gives T_F, T_B, T_W, T_comm in ms, table 3 the models
# (memory: M_B = 34h + 5as, M_W = 32h, s = 1024), table 5 the bubble rates of 1F1B, ZB-1p and ZB-2p.
TABLE_5 = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 2304, 24, (0.2431, 0.1585, 0.0433)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 2304, 24, (0.1985, 0.1242, 0.0039)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 4096, 32, (0.2347, 0.1323, 0.0029)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 5120, 40, (0.2552, 0.1397, 0.0066)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), 6144, 48, (0.2646, 0.1421, 0.0038)),
]


@pytest.mark.parametrize(("p", "m", "times", "hidden", "heads", "rates"), TABLE_5)
def test_bubble_rates_equal_table_5_of_the_zero_bubble_paper(p, m, times, hidden, heads, rates):
    activation = 34 * hidden + 5 * heads * 1024
    costs = Costs.uniform(
        p, forward=times[0], input_grad=times[1], weight_grad=times[2], latency=times[3],
        activation=activation, weight_context=32 * hidden,
    )  # fmt: skip
    limits = (None, p * activation, 2 * p * activation)
    for rate, limit in zip(rates, limits, strict=True):
        schedule = (
            build_schedule("1f1b", p, m)
            if limit is None
            else build_schedule("zb_auto", p, m, costs=costs, mem_limit=limit)
        )
        verify(schedule, costs=costs, mem_limit=limit)
        assert round(simulate(schedule, costs).stage_bubble, 4) == rate


def test_interleaved_zb_reaches_the_makespan_bound_for_equal_times():
    for p, v, k in itertools.product((2, 3, 4, 8), (1, 2, 4), (1, 2, 4)):
        schedule = build_schedule("interleaved_zb", p, k * p, num_chunks=v)
        costs = Costs.uniform(p * v, num_chunks=v)
        bound = lower_bound(costs, num_microbatches=k * p, placement=schedule.placement)
        assert simulate(schedule, costs).makespan == pytest.approx(bound)
        assert bound == pytest.approx((p - 1) / v + 3 * k * p)


def test_no_family_beats_the_lower_bound():
    for name in FAMILIES:
        for p, m in ((2, 4), (4, 8), (5, 20)):
            schedule = build_schedule(name, p, m)
            costs = Costs.uniform(
                schedule.num_stages, input_grad=0.98, weight_grad=0.66, latency=0.018, num_chunks=schedule.num_chunks
            )
            peak = verify(schedule, costs=costs).peak
            result = simulate(schedule, costs)
            for limit in (None, peak):
                assert result.makespan >= (1 - 1e-9) * lower_bound(
                    costs, num_microbatches=m, placement=schedule.placement, mem_limit=limit
                )
                assert result.span >= (1 - 1e-9) * lower_bound(
                    costs, num_microbatches=m, placement=schedule.placement, mem_limit=limit, objective="stage_span"
                )


def test_breakdown_adds_up_to_all_idle_time():
    for name in FAMILIES:
        schedule = build_schedule(name, 4, 8)
        uneven = Costs.uniform(schedule.num_stages, latency=0.1, num_chunks=schedule.num_chunks)
        forward = [f * (1.4 if s == schedule.num_stages - 1 else 1) for s, f in enumerate(uneven.forward)]
        uneven = replace(uneven, forward=tuple(forward))
        result = simulate(schedule, uneven)
        b = result.breakdown
        total = b.warm_up + b.steady + b.drain + b.communication + b.imbalance
        assert total == pytest.approx(result.makespan - result.work)
        assert b.communication > 0
        assert min(b.warm_up, b.steady, b.drain) >= -1e-9
        assert result.makespan_bubble == pytest.approx(1 - result.work / result.makespan)
        assert not math.isclose(b.imbalance, 0)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb"])
def test_interleaved_families_take_any_number_of_microbatches(name):
    for p, v, m in itertools.product((1, 2, 3, 4, 5), (1, 2, 3), range(1, 12)):
        verify(build_schedule(name, p, m, num_chunks=v))
    for m in (6, 7, 10):  # no multiple of 4: still better than 1F1B
        schedule = build_schedule(name, 4, m, num_chunks=2)
        alone = simulate(build_schedule("1f1b", 4, m)).makespan_bubble
        assert simulate(schedule).makespan_bubble < 0.62 * alone
