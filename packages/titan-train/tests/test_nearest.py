import pytest
from titan_train.models.registry import list_models
from titan_train.nearest import did_you_mean, nearest_divisor, nearest_name

SHIPPED_MODELS = list_models()


@pytest.mark.parametrize(
    ("word", "near"),
    [("llama4_8b", "llama3_8b"), ("LLAMA3-8B", "llama3_8b"), ("deepseekv3", "deepseek_v3"), ("qwen_8b", "qwen3_8b")],
)
def test_a_misspelt_name_suggests_the_nearest(word, near):
    assert nearest_name(word, SHIPPED_MODELS) == near
    assert did_you_mean(word, SHIPPED_MODELS) == f"Did you mean {near!r}? "


@pytest.mark.parametrize("word", ["mistral_7b", "olmo_7b", "gemma_2b", "phi3", "mixtral_8x7b", ""])
def test_a_name_of_something_else_suggests_nothing(word):
    assert nearest_name(word, SHIPPED_MODELS) is None
    assert did_you_mean(word, SHIPPED_MODELS) == ""


@pytest.mark.parametrize(("n", "wanted", "near"), [(12, 5, 4), (12, 7, 6), (7, 3, 1), (8, 100, 8)])
def test_the_nearest_divisor_is_the_smaller_of_two_as_near(n, wanted, near):
    assert nearest_divisor(n, wanted) == near
