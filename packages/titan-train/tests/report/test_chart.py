import math

import pytest
from titan_train.report.chart import Series, build_chart
from titan_train.report.series import MOST_POINTS, smooth, thin


def test_smoothing_keeps_a_straight_line_and_does_not_lag():
    line = [float(i) for i in range(1000)]
    smoothed = smooth(line)
    # Centred windows reproduce a line exactly, up to where the end cuts them.
    assert smoothed[:980] == pytest.approx(line[:980])
    assert smoothed[-1] == pytest.approx(999, abs=10)


def test_smoothing_skips_what_is_not_finite_and_reduces_noise():
    noisy = [1.0 + (-1) ** i for i in range(1000)]
    noisy[500] = math.nan
    noisy[501] = math.inf
    smoothed = smooth(noisy)
    assert all(math.isfinite(v) for v in smoothed[1:])
    assert max(smoothed[200:]) - min(smoothed[200:]) < 0.25
    assert math.isnan(smooth([math.nan])[0])


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("count", [1, 2, MOST_POINTS, MOST_POINTS + 1, 20_000])
def test_thinning_keeps_the_extremes_the_mean_and_the_last_step(count, log_x):
    x = [float(i + 1) for i in range(count)]
    y = [math.sin(i / 7) for i in range(count)]
    thinned = thin(x, y, log_x=log_x)
    assert len(thinned.x) <= MOST_POINTS
    assert thinned.x == sorted(thinned.x)
    assert thinned.x[-1] == count
    assert min(thinned.low) == min(y)
    assert max(thinned.high) == max(y)
    if count <= MOST_POINTS:
        assert thinned.mean == y


def test_thinning_nothing_gives_nothing():
    assert thin([], []).x == []


def test_a_bucket_without_a_finite_value_is_a_gap():
    assert math.isnan(thin([1.0, 2.0], [1.0, math.nan]).mean[1])
    chart = build_chart("t", "", [Series("s", [1, 2, 3], [1.0, math.nan, 2.0])])
    assert chart is not None
    line = next(path.d for path in chart.paths if path.role == "line train")
    assert line.count("M") == 2
    assert "L" not in line


def test_a_chart_without_a_finite_value_is_none():
    assert build_chart("t", "", [Series("s", [1, 2], [math.nan, math.inf])]) is None
    assert build_chart("t", "", [Series("s", [], [])]) is None


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 5.0], ["0", "1", "2", "3", "4", "5"]),
        ([0.0, 10_000.0], ["0", "2k", "4k", "6k", "8k", "10k"]),
        ([0.0, 0.003], ["0", "0.001", "0.002", "0.003"]),
    ],
)
def test_y_ticks_stand_at_round_values(values, labels):
    chart = build_chart("t", "", [Series("s", [1, 2], values)], zero=True)
    assert chart is not None
    got = [tick.label for tick in chart.y_ticks]
    assert got == labels
    assert all(0 <= tick.at <= 100 for tick in chart.y_ticks)


def test_a_log_axis_spreads_powers_of_ten_evenly():
    chart = build_chart("t", "", [Series("s", [1, 10, 100, 1000], [4.0, 3.0, 2.0, 1.0])], log_x=True)
    assert chart is not None
    places = {tick.label: round(tick.at, 1) for tick in chart.x_ticks}
    assert places == {"1": 0, "10": 33.3, "100": 66.7, "1k": 100}


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9, 1e12])
def test_a_constant_series_has_a_scale_of_its_own_size(value):
    chart = build_chart("t", "", [Series("s", [5, 6], [value, value])])
    assert chart is not None
    assert len(chart.y_ticks) >= 2
