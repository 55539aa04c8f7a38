import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from titan_train.models.registry import list_models
from titan_train.values import Count, Range, check_values, did_you_mean, nearest_divisor, nearest_name

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


@dataclass(frozen=True, kw_only=True)
class Sample:
    steps: Count = 10
    share: Annotated[float, Range(0, 1)] = 0.5
    rate: Annotated[float, Range(above=0)] = 0.1
    decay: Annotated[int, Range(0, also=-1, note="-1 takes a fifth")] = -1
    reshard: Literal["always", "never"] | Annotated[int, Range(1)] = "never"
    scales: dict[str, Annotated[float, Range(0)]] = field(default_factory=dict)
    cuts: tuple[Annotated[int, Range(0)], ...] = ()

    def __post_init__(self) -> None:
        check_values("train", self)


@dataclass(frozen=True, kw_only=True)
class Wider(Sample):
    degree: Annotated[int, Range(1, below=2**31)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "train.steps=0 must be at least 1; the nearest valid choice is 1."),
        ({"share": 1.5}, "train.share=1.5 must be at least 0 and at most 1; the nearest valid choice is 1."),
        ({"rate": 0.0}, "train.rate=0.0 must be above 0; the default is 0.1."),
        ({"rate": float("nan")}, "train.rate=nan must be above 0; the default is 0.1."),
        ({"rate": float("inf")}, "train.rate=inf must be above 0; the default is 0.1."),
        ({"decay": -2}, "train.decay=-2 must be -1 or at least 0; -1 takes a fifth."),
        (
            {"reshard": 0},
            "train.reshard=0 must be at least 1, or one of 'always', 'never'; the nearest valid choice is 1.",
        ),
        ({"reshard": "alway"}, "train.reshard='alway' is not one of 'always', 'never'. Did you mean 'always'?"),
        ({"scales": {"a": 1.0, "b": -1.0}}, "train.scales.b=-1.0 must be at least 0; the nearest valid choice is 0."),
        ({"cuts": (1, -1)}, "train.cuts.1=-1 must be at least 0; the nearest valid choice is 0."),
        (
            {"share": -1.0},
            "train.share=-1.0 must be at least 0 and at most 1; the nearest valid choice is 0.",
        ),
    ],
)
def test_a_declared_range_or_choice_refuses_with_value_range_and_remedy(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Sample(**values)


def test_all_fields_with_a_wrong_value_are_reported_one_line_each():
    with pytest.raises(ValueError, match=r"^train\.steps=0 .*\ntrain\.share=-1\.0 .*\n.*'alway' is not one of .*$"):
        Sample(steps=0, share=-1.0, reshard="alway")


def test_values_inside_the_range_and_the_special_one_are_accepted():
    Sample(steps=1, share=1.0, rate=1e-9, decay=0, reshard=4, scales={"a": 0.0}, cuts=(0,))
    Sample(reshard="always")


def test_a_class_checks_the_declarations_of_its_bases():
    with pytest.raises(ValueError, match=r"train\.steps=0 must be at least 1"):
        Wider(degree=1, steps=0)
    with pytest.raises(ValueError, match=r"train\.degree=2147483648 must be at least 1 and below 2147483648"):
        Wider(degree=2**31)
