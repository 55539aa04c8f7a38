"""Several predicted tokens of transformers' decoders under every layout: one process's losses, gradients and weights."""

import hf_runs
import pytest
from composition_check import failures
from test_hf_models import LAYOUTS, WEIGHTS
from titan_testing import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

STEPS = {"train": {"steps": 5, "global_batch": 8, "max_grad_norm": 0.5, "microbatch": 2}}
MORE = {
    "cp tp": (4, {"parallel": {"cp": 2, "tp": 2}}),
    "cp pp": (4, {"parallel": {"cp": 2, "pp": 2}, "pipeline": {"schedule": "zbv"}}),
    "hsdp tp": (8, {"parallel": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}}),
}
KINDS = ("llama", "qwen2", "gemma3_text", "phi3", "gpt_neox", "olmo2", "deepseek_v3", "qwen3_moe", "glm4_moe")
ROUTED = ("deepseek_v3", "qwen3_moe", "glm4_moe")
DEFAULT = [("llama", "fsdp"), ("deepseek_v3", "tp pp")]


def works(kind, layout):
    if "kv" in layout or "float8" in layout:  # of the block, which the other tests are about
        return False
    return "ep" not in layout or kind in ROUTED


CASES = [pytest.param(layout, [kind], id=f"{kind}, {layout}") for kind, layout in DEFAULT]
CASES += hf_runs.in_thirds(
    {layout: [kind for kind in KINDS if works(kind, layout)] for layout in (*LAYOUTS, *MORE)}, "decoder"
)


def depth_of(kind):
    return 1 if kind in ROUTED else 2


@pytest.fixture(scope="module")
def single(folder):
    results_of = hf_runs.references(folder)
    return lambda kinds: results_of({kind: tree_of(folder, kind, {}) for kind in kinds})


def tree_of(folder, kind, settings):
    tree = hf_runs.sections(hf_runs.publish(folder, kind), STEPS | settings, init=False)
    tree["model"]["args"] = tree["model"]["args"] | {"mtp_depth": depth_of(kind)}
    return tree | {"mtp": {"late_from": 0.5}}


@pytest.mark.parametrize(("layout", "kinds"), CASES)
def test_a_decoder_of_transformers_trains_several_tokens_as_in_one_process(folder, single, layout, kinds):
    ranks, settings = (LAYOUTS | MORE)[layout]
    trees = [tree_of(folder, kind, settings) for kind in kinds]
    results = run_ranks(hf_runs.run_each, ranks, folder, "layout", trees, timeout_s=60 + 60 * len(trees))
    wrong = {}
    for number, (kind, wanted) in enumerate(zip(kinds, single(kinds), strict=True)):
        of_modules = [box for name, box in wanted[3].items() if name.startswith("mtp.")]
        assert len(of_modules) >= 8 * depth_of(kind)
        assert any(part.any() for _, _, part in of_modules)
        errors, weights = hf_runs.errors(wanted, [of_rank[number] for of_rank in results])
        if failures(errors, float8=False) or weights > WEIGHTS:
            wrong[kind] = errors, weights
    assert not wrong
