"""The plans that people ask for: each is found and fits, passes `titan-train check`, and its page says the same."""

import json
import random
import re
from pathlib import Path

import pytest
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.models import build_model
from titan_train.parallel.layout.run import plan_run
from titan_train.planner import find_shape, load_machine
from titan_train.planner.memory.ranks import estimate_ranks, rehearse
from titan_train.planner.search.search import search
from titan_train.planner.search.space import PlanRequest
from titan_train.planner.translate import config_toml
from titan_train.planner.view.page import Plan, page
from titan_train.planner.view.tables import ranking_text

PLANS = {
    "8B on 8 at 8k": ("llama3_8b", 8, "h100", 8192, 64),
    "8B on 8 at 128k": ("llama3_8b", 8, "h100", 131_072, 8),
    "70B on 256": ("llama3_70b", 256, "h100", 8192, 512),
    "405B on 512": ("llama3_405b", 512, "h100", 8192, 512),
    "DeepSeek-V3 on 1,024": ("deepseek_v3", 1024, "h100", 4096, 8192),
    "30B-A3B on 8": ("qwen3_30b_a3b", 8, "h100", 4096, 512),
    "1B on one of 24 GB": ("llama3_1b", 1, "rtx4090", 2048, 64),
    "FLUX on 64": ("flux_dev", 64, "h100", 4608, 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_passes_check_as_it_was_written(name: str, tmp_path, capsys) -> None:
    model, gpus, machine, seq_len, batch = PLANS[name]
    words = ["plan", model, "--devices", gpus, "--hardware", machine, "--seq-len", seq_len, "--global-batch", batch]
    assert main([*map(str, words), "--out", str(tmp_path / "plan")]) == 0
    printed = capsys.readouterr().out
    assert "takes" in printed or "as fast" in printed  # why the second loses
    assert main(["check", str(tmp_path / "plan.toml")]) == 0
    checked = capsys.readouterr().out
    peak = max(float(value) for line in checked.splitlines() if line.startswith("  peak ") for value in _numbers(line))
    usable = {"h100": 79.1, "rtx4090": 23.5}[machine]
    assert peak <= usable


def _numbers(line: str) -> list[str]:
    return [word for word in line.split() if word.replace(".", "").isdecimal()]


def ranked(name: str):
    """What `titan-train plan` finds for one of the shipped plans."""
    model, devices, machine, seq_len, batch = PLANS[name]
    request = PlanRequest(
        shape=find_shape(model), machine=load_machine(machine), gpus=devices, seq_len=seq_len, global_batch=batch,
        precisions=("bf16", "tensorwise"), fixed={"tp": 1} if model.startswith("flux") else {},
    )  # fmt: skip
    return search(request)


LONG = ("8B on 8 at 128k", "405B on 512", "DeepSeek-V3 on 1,024")  # seconds of search each, for a page like the others


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in PLANS])
def test_the_pages_figures_are_the_texts(name: str) -> None:
    ranking = ranked(name)
    plan = Plan(ranking.best[0], ranking.request.limit_bytes)
    html = page(plan)
    data = json.loads(re.search(r"const DATA = (.*);", html)[1])
    shown = data["grid"]["|".join(str(control["first"]) for control in data["controls"])]
    assert shown == data["first"]
    row = next(line for line in ranking_text(ranking).splitlines() if line.startswith("  1 "))
    speed, interval, mfu, gib, hours, setup = re.split(r" +", row.strip(), maxsplit=6)[1:]
    facts = dict(shown["facts"])
    assert shown["speed"] == f"{speed} tokens/s/device"
    assert facts["80 % interval"] == interval.replace("-", " to ")
    assert (facts["MFU"], facts["1 B tokens"]) == (mfu, f"{hours} device-hours")
    assert shown["verdict"].startswith(f"Fits: {gib} GiB of ")
    assert shown["setup"] == setup
    assert len(html) < 500_000


def fuzzed(number: int) -> tuple[str, PlanRequest]:
    """A model, devices, a length, a batch and a precision, drawn by number."""
    draw = random.Random(number)
    name = draw.choice(("llama3_1b", "qwen3_0.6b", "llama3_8b", "qwen3_30b_a3b", "gpt3_175b"))
    devices = draw.choice((8, 16, 24, 64))
    seq_len = 2048 if name.startswith("gpt") else draw.choice((2048, 8192, 16_384))
    precision = draw.choice(("bf16", "bf16", "tensorwise", "rowwise"))
    batch = devices * draw.choice((1, 2, 4))
    fixed = draw.choice(({}, {}, {"tp": 2}, {"microbatch": 1}))
    machine = load_machine(draw.choice(("h100", "h200")))
    return name, PlanRequest(
        shape=find_shape(name), machine=machine, gpus=devices, seq_len=seq_len, global_batch=batch,
        precisions=(precision,), fixed=fixed,
    )  # fmt: skip


def agree(number: int, tmp_path: Path, *, rehearsed: bool) -> None:
    """The first plan, check, and a rehearsal where it is asked for, need the same memory."""
    name, request = fuzzed(number)
    ranking = search(request)
    if not ranking.best:
        pytest.skip("nothing fits")
    best = ranking.best[0]
    file = tmp_path / "plan.toml"
    file.write_text(config_toml(name, best.setup, nproc=8))
    config = load_config(str(file))
    plan, model = plan_run(config, request.gpus), build_model(config.model, vocab_size=None)
    found = estimate_ranks(config, model, layout=plan.layout, mode=plan.mode, batch=plan.batch, schedule=plan.schedule)
    assert max(rank.peak for rank in found) == pytest.approx(best.memory.allocated, rel=0.05), best.setup.describe()
    if rehearsed:
        try:
            found = rehearse(config, request.gpus)
        except ValueError as why:  # a search knows no balance loss
            pytest.skip(f"a run refuses it: {why}")
        assert not found[0].left_out
        assert max(rank.peak for rank in found) == pytest.approx(best.memory.allocated, rel=0.05), best.setup.describe()


@pytest.mark.parametrize("number", [1, 2, 5, 12])
def test_a_plan_and_check_agree_within_5_percent(number: int, tmp_path: Path) -> None:
    agree(number, tmp_path, rehearsed=False)


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute; experts on busy cores took three
@pytest.mark.parametrize("number", range(50))
def test_a_plan_check_and_a_rehearsal_agree_within_5_percent(number: int, tmp_path: Path) -> None:
    agree(number, tmp_path, rehearsed=True)
