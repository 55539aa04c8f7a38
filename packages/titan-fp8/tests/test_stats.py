"""Statistics say what float8 costs each layer."""

import math

import pytest
import titan_fp8
import torch
from titan_fp8 import Scaling, tensor_stats
from torch import nn


def test_normal_data_keeps_the_decibels_that_the_format_has() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    # 31.5 and 25.6 dB for normal data: 3 and 2 bits of mantissa
    assert tensor_stats(x, Scaling("row")).sqnr_db == pytest.approx(31.5, abs=0.3)
    assert tensor_stats(x, Scaling("tensor", torch.float8_e5m2)).sqnr_db == pytest.approx(25.6, abs=0.3)
    assert tensor_stats(x, Scaling("row")).amax == x.abs().max().item()


def test_underflow_saturation_and_non_finite_values_are_counted() -> None:
    x = torch.zeros(2, 128)
    x[0, :4] = torch.tensor([448.0, 448.0, 1e-9, float("nan")])
    found = tensor_stats(x, Scaling("tensor"))
    assert found.underflow == pytest.approx(1 / 3)
    assert found.saturation == pytest.approx(2 / 256)
    assert found.non_finite == pytest.approx(1 / 256)
    assert found.amax == 448.0
    exact = tensor_stats(torch.ones(4, 4), Scaling("row"))
    assert exact.sqnr_db == math.inf
    assert tensor_stats(torch.zeros(0, 4), Scaling("row")).amax == 0.0


def test_finer_scales_lose_less_to_an_outlier() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[3, 5] = 1e4
    by_gran = [tensor_stats(x, Scaling(gran)).underflow for gran in ("tensor", "row", "block1x128", "mx32")]
    assert by_gran[0] > 0.9
    assert by_gran == sorted(by_gran, reverse=True)


def test_each_layer_is_judged_by_name_on_its_weight_input_and_gradient() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    titan_fp8.convert_to_float8(model, min_speedup=0)
    assert list(titan_fp8.stats(model)) == ["0", "2"]
    with titan_fp8.record_stats(model) as found:
        model(torch.randn(2, 8, 64)).square().sum().backward()
    assert {name: set(entry) for name, entry in found.items()} == {n: {"input", "weight", "grad"} for n in ("0", "2")}
    assert all(entry["grad"].sqnr_db > 20 for entry in found.values())
    assert found["0"]["weight"] == titan_fp8.stats(model)["0"]
    count = len(found)
    model(torch.randn(2, 64))
    assert len(found) == count
    assert not model[0]._forward_hooks


def test_a_vector_and_an_input_by_name_are_judged() -> None:
    layer = titan_fp8.Float8Linear(64, 32)
    for call in (lambda: layer(torch.randn(64)), lambda: layer(input=torch.randn(3, 64))):
        with titan_fp8.record_stats(layer) as found:
            call().sum().backward()
        assert set(found[""]) == {"input", "weight", "grad"}
