"""The planner's shapes are those of the shipped models."""

import pytest
from titan_train.models.registry import find_model, list_models
from titan_train.planner.model.families import find_shape, shapes
from titan_train.planner.model.flops import flops_per_token
from titan_train.planner.translate import shape_named

EXACT = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352,
    "gpt3_175b": 174_604_259_328,
}


@pytest.mark.parametrize(("name", "parameters"), EXACT.items())
def test_parameter_counts_are_exact(name: str, parameters: int) -> None:
    assert find_shape(name).parameters() == parameters


def test_every_shipped_model_has_a_shape() -> None:
    text = {n for n in list_models() if find_model(n)[0].task == "text"}
    assert {n for n in text if "debug" not in n and "small" not in n} <= set(shapes())


def test_flux_has_a_shape_with_nearly_all_of_its_parameters() -> None:
    shape = shape_named("flux_dev")
    assert shape == find_shape("flux_dev")
    assert shape.parameters() == pytest.approx(11_901_000_000, rel=0.006)  # without embedders and the final layer
    assert shape_named("flux_tiny").num_layers == 4


def test_a_token_of_flux_meets_one_stream_of_a_double_block() -> None:
    shape = find_shape("flux_dev")
    # 57 blocks of 12 d^2 weights, forward and backward, and attention over all tokens
    expected = 6 * 57 * (12 * 3072**2) + 57 * 12 * 4608 * 3072
    assert flops_per_token(shape, 4608, causal=False) == pytest.approx(expected, rel=0.01)


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="Did you mean 'llama3_"):
        find_shape("llama3_71b")


def test_a_cut_model_keeps_one_dense_block() -> None:
    cut = find_shape("deepseek_v3").cut(4)
    assert [b.count for b in cut.blocks] == [1, 3]
