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


CASES = [(kind, layout) for kind in KINDS for layout in (*LAYOUTS, *MORE) if works(kind, layout)]


@pytest.fixture(scope="module")
def single(folder):
    known = {}

    def reference(kind, depth):
        if kind not in known:
            tree = tree_of(folder, kind, depth, {})
            known[kind] = run_ranks(hf_runs.run, 1, folder, "single", tree, init=False, timeout_s=170)[0]
        return known[kind]

    return reference


def tree_of(folder, kind, depth, settings):
    tree = hf_runs.sections(hf_runs.publish(folder, kind), STEPS | settings, init=False)
    tree["model"]["args"] = tree["model"]["args"] | {"mtp_depth": depth}
    return tree | {"mtp": {"late_from": 0.5}}


@pytest.mark.parametrize(
    ("kind", "layout"), [c if c in DEFAULT else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_a_decoder_of_transformers_trains_several_tokens_as_in_one_process(folder, single, kind, layout):
    ranks, settings = (LAYOUTS | MORE)[layout]
    depth = 1 if kind in ROUTED else 2
    wanted = single(kind, depth)
    of_modules = [box for name, box in wanted[3].items() if name.startswith("mtp.")]
    assert len(of_modules) >= 8 * depth
    assert any(part.any() for _, _, part in of_modules)
    results = run_ranks(hf_runs.run, ranks, folder, "layout", tree_of(folder, kind, depth, settings), timeout_s=240)
    errors, weights = hf_runs.errors(wanted, results)
    assert not failures(errors, float8=False), errors
    assert weights <= WEIGHTS
