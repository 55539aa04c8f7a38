"""Selective checkpointing around experts that FSDP shards by themselves: hooks inside the region may differ."""

import composition
import pytest
from composition_check import compare, failures
from composition_matrix import MOE
from titan_testing import run_ranks

SELECTIVE = MOE | {"activations": {"checkpoint": "selective"}}
LAYOUTS = {
    "ep2 of 2": (2, {"ep": 2}),
    "ep4 of 4": (4, {"ep": 4}),
    "cp2 x dp2 x ep4": (4, {"cp": 2, "ep": 4}),
}


@pytest.fixture(scope="module")
def single(folder):
    return run_ranks(composition.run, 1, folder, "single", MOE, init=False, timeout_s=170)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selective_checkpointing_works_with_any_number_of_ranks_for_an_expert(folder, single, layout):
    ranks, parallel = LAYOUTS[layout]
    results = run_ranks(composition.run, ranks, folder, "selective", SELECTIVE | {"parallel": parallel}, timeout_s=170)
    errors = compare(single, results)
    assert not failures(errors, float8=False), errors
