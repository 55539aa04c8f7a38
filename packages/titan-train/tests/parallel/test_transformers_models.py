"""Models of the transformers library as plain modules under data parallelism: what one process gives."""

import pytest
from composition_check import compare, failures
from test_own_models import run, sections
from titan_testing import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

CASES = {
    "tied Llama, fsdp, selective": (
        "HFLlama", {"tied": True}, {}, {"activations": {"checkpoint": "selective"}, "train": {"microbatch": 2}},
    ),
    "GPT-2, ddp": ("HFGPT2", {}, {"mode": "ddp"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_transformers_model_gives_what_one_process_does(folder, case):
    name, args, parallel, more = CASES[case]
    trees = [sections(args), sections(args, parallel, more)]
    for tree in trees:
        tree["model"]["name"] = f"published_models:{name}"
    (single,) = run_ranks(run, 1, folder, "single", trees[0], init=False, timeout_s=120)
    errors = compare(single, run_ranks(run, 2, folder, "ranks", trees[1], timeout_s=120))
    assert not failures(errors, float8=False), errors
