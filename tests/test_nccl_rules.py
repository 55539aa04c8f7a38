"""titan's own code by NCCL's and CUDA's rules: a sample by default; with ``--slow`` all of `benchmarks/nccl_rules.py`, of its
pipelines every third.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "benchmarks" / "nccl_rules.py"
_spec = importlib.util.spec_from_file_location("nccl_rules", _FILE)
rules = importlib.util.module_from_spec(_spec)
sys.modules["nccl_rules"] = rules
_spec.loader.exec_module(rules)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("family", list(rules.FAMILIES))
def test_a_pipeline_step_keeps_the_rules_recorded_or_not(family, traced):
    schedule = rules.build_schedule(family, 3 if family != "dualpipe_v" else 2, 6)
    assert rules.verdict(rules.pipeline_case(schedule, traced=traced)) == ""


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_fails_ends_the_step_everywhere_and_the_next_one_is_whole(phase):
    schedule = rules.build_schedule("interleaved_1f1b", 3, 6)
    assert rules.verdict(rules.pipeline_case(schedule, traced=False, fails=(1, phase))) == ""


# in the last, ranks 2 and 3 have nothing to send or to receive
@pytest.mark.parametrize("bounds", [[0, 60, 70, 128], [0, 48, 64, 96, 128]])
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses", "usp"])
def test_packed_attention_keeps_the_rules(method, bounds):
    options = {"method": method, **({"ulysses_degree": 2} if method == "usp" else {})}
    if method == "ring":
        options["layout"] = "contiguous"
    assert rules.verdict(rules.context_case(bounds, 4, options)) == ""


@pytest.mark.parametrize("name", ["experts", "start with each axis", "loader's thread", "save during a step"])
def test_a_run_keeps_the_rules(name):
    cases = dict(rules.others(True))[name]
    assert {case: found for case, run in cases if (found := rules.verdict(run()))} == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("source", [rules.pipelines, rules.failures, rules.contexts, rules.others])
def test_everything_keeps_the_rules(source):
    found = {}
    step = {rules.pipelines: 3, rules.contexts: 2}.get(source, 1)
    for number, (family, cases) in enumerate(source(False)):
        tried = cases[number % step :: step]
        found |= {f"{family}: {case}": text for case, run in tried if (text := rules.verdict(run()))}
    assert found == {}
