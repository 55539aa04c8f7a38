"""Recipes are plain values that refuse what no device multiplies."""

import pytest
import torch
from titan_fp8 import RECIPES, Recipe, Scaling

E5M2 = torch.float8_e5m2


def test_recipes_are_found_by_name_and_by_torchaos_name() -> None:
    for name, recipe in RECIPES.items():
        assert Recipe.get(name) is recipe
        assert Recipe.get(recipe) is recipe
    assert Recipe.get("rowwise_with_gw_hp") is RECIPES["rowwise_gw_hp"]
    with pytest.raises(ValueError, match="'delayed' is unknown; choose one of tensorwise"):
        Recipe.get("delayed")


def test_recipes_compare_and_hash_by_value() -> None:
    copy = Recipe("tensorwise", Scaling("tensor"), Scaling("tensor"), Scaling("tensor", E5M2))
    assert copy == RECIPES["tensorwise"]
    assert hash(copy) == hash(RECIPES["tensorwise"])
    assert all(s.pow2 for r in RECIPES.values() for s in (r.x, r.w, r.g))


def test_what_no_device_multiplies_is_refused() -> None:
    tensor, row, wide = Scaling("tensor"), Scaling("row"), Scaling("tensor", E5M2)
    with pytest.raises(ValueError, match="no matrix product supports"):
        Recipe("mixed", tensor, row, tensor)
    with pytest.raises(ValueError, match="e5m2 by e5m2"):
        Recipe("wide", wide, tensor, wide)
    with pytest.raises(ValueError, match="e5m2 by e5m2"):
        Recipe("wide", tensor, wide, wide)
    with pytest.raises(ValueError, match="not a granularity"):
        Scaling("column")
    with pytest.raises(ValueError, match="not a float8 format"):
        Scaling("row", torch.bfloat16)
    with pytest.raises(ValueError, match="pow2=False cannot be kept"):
        Scaling("mx32", pow2=False)
