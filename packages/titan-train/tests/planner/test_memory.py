"""The planner's memory against that of `titan-train check`, whose activations equal a run on fake tensors byte for byte."""

import pytest
from titan_train.config import load_config
from titan_train.models import build_model
from titan_train.parallel.estimate import estimate_ranks
from titan_train.plan.run import plan_run
from titan_train.planner.memory.peak import memory_peak
from titan_train.planner.translate import setup_of_config, shape_of_config

CASES = {
    "llama, one device": ("llama3_1b", 1, {}),
    "llama": ("llama3_8b", 8, {}),
    "llama, pipeline": ("llama3_8b", 16, {"parallel.tp": 2, "parallel.pp": 2}),
    "gpt": ("gpt3_175b", 64, {"parallel.tp": 8, "model.seq_len": 2048}),
    "qwen3, experts": ("qwen3_30b_a3b", 8, {"parallel.ep": 8}),
    "deepseek, latent attention": ("deepseek_v2_lite", 8, {"parallel.ep": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_planner_and_check_agree_within_5_percent(case):
    """Eager, nothing recomputed: the planner's other constants are fitted to measured runs, this one is arithmetic."""
    name, gpus, settings = CASES[case]
    given = {"model.name": name, "model.seq_len": 4096, "train.dtype": "bf16", "train.global_batch": 2 * gpus}
    given |= {"train.microbatch": 1, "compile.enabled": "false", "launch.nproc": min(gpus, 8)}
    given |= {"launch.nnodes": max(1, gpus // 8), **settings}
    config = load_config("llama3_1b", [word for key, value in given.items() for word in (f"--{key}", str(value))])
    plan = plan_run(config, gpus)
    model = build_model(config.model, vocab_size=None)
    ranks = estimate_ranks(config, model, layout=plan.layout, mode=plan.mode, batch=plan.batch, schedule=plan.schedule)
    planned = memory_peak(shape_of_config(config), setup_of_config(config, gpus)).allocated
    assert planned == pytest.approx(max(rank.peak for rank in ranks), rel=0.05)
