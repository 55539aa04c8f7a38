"""The planner's shapes are those of the shipped models."""

import tomllib
from importlib import resources

import pytest
from titan_train.models.registry import families
from titan_train.planner.shapes import find_shape


def test_the_shape_of_a_model_has_one_definition() -> None:
    shipped = [name for family in families().values() for name in family.configs]
    published = tomllib.loads(resources.files("titan_train.planner").joinpath("shapes.toml").read_text())
    assert len(set(shipped)) == len(shipped)
    assert published.keys() & set(shipped) == set()


def test_flux_has_a_shape_with_nearly_all_of_its_parameters() -> None:
    shape = find_shape("flux_dev")
    assert shape.parameters() == pytest.approx(11_901_000_000, rel=0.006)  # without embedders and the final layer
    assert find_shape("flux_tiny").num_layers == 4


def test_a_token_of_flux_meets_one_stream_of_a_double_block() -> None:
    shape = find_shape("flux_dev")
    # 57 blocks of 12 d^2 weights, forward and backward, and attention over all tokens
    expected = 6 * 57 * (12 * 3072**2) + 57 * 12 * 4608 * 3072
    assert shape.flops_per_token(4608, causal=False) == pytest.approx(expected, rel=0.01)


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="Did you mean 'llama3_"):
        find_shape("llama3_71b")


@pytest.mark.parametrize(
    ("name", "known"), [("llama3.1-8b", "llama3_8b"), ("kimi_k2_1t", "kimi_k2"), ("DeepSeek-V3-671B", "deepseek_v3")]
)
def test_dashes_point_releases_and_sizes_are_accepted(name: str, known: str) -> None:
    assert find_shape(name).name == known


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("moonlight-16b", 16.0), ("glm4.5", 355.0), ("glm4.5-air", 106.0), ("minimax-m2", 230.0), ("qwen3-next-80b-a3b", 80.0),
        ("kimi-linear-48b", 49.1), ("glm-5", 744.0), ("glm-4.5", 355.0), ("qwen3.5-9b", 9.0), ("qwen-3.5-27b", 27.0),
        ("qwen3.5-35b-a3b", 34.66), ("qwen3.5-397b-a17b", 397.0),
    ],
)  # fmt: skip
def test_a_published_shape_has_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert find_shape(name).parameters() / 1e9 == pytest.approx(billions, rel=0.01)
