"""A model cut over ranks continues prompts, and is exported, as one process does."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exported_runs import trained
from titan_ckpt import Checkpointer, TrainState
from titan_testing import run_ranks
from titan_train.export import run as module
from titan_train.export.gate import Reference
from titan_train.export.run import export_run
from titan_train.generation import Sampling, generate, load_run
from titan_train.models import build_model
from titan_train.run_folder import read_config

PROMPTS = [[100, 101, 102, 32], [40], [9, 9, 9, 2, 60, 11, 7]]
SAMPLED = Sampling(temperature=0.8, top_k=50)


def on_ranks(run_dir: Path) -> tuple[list[list[int]], list[list[int]], int]:
    run = load_run(run_dir, device="cpu", group=dist.group.WORLD)
    if run.model.args.tied_embeddings:
        assert run.model.lm_head.weight is run.model.tok_embeddings.weight
    greedy = generate(run.model, PROMPTS, max_new_tokens=24)
    sampled = generate(run.model, PROMPTS, max_new_tokens=24, sampling=SAMPLED)
    return greedy, sampled, sum(parameter.numel() for parameter in run.model.parameters())


@pytest.mark.parametrize(
    "name", ["llama3_debug", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_debug", "qwen3_moe_debug"))]
)
def test_two_ranks_continue_prompts_as_one_process_does(name: str, folder: Path) -> None:
    args = {}
    if name == "llama3_debug":
        args = {"rope_factor": 8.0, "rope_original_seq_len": 16, "tied_embeddings": True}
    run_dir = trained(folder, name, **args)
    one = load_run(run_dir, device="cpu").model
    greedy = generate(one, PROMPTS, max_new_tokens=24)
    sampled = generate(one, PROMPTS, max_new_tokens=24, sampling=SAMPLED)
    size = sum(parameter.numel() for parameter in one.parameters())
    for ours in run_ranks(on_ranks, 2, run_dir):
        assert ours[0] == greedy
        assert ours[1] == sampled
        if name == "llama3_debug":
            assert ours[2] < 0.55 * size  # half of all but the norms


def largest_difference(run_dir: Path) -> float:
    tokens = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        want = load_run(run_dir, device="cpu").model(tokens)
        got = load_run(run_dir, device="cpu", group=dist.group.WORLD).model(tokens)
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.timeout(900)
def test_a_model_of_transformers_cut_over_ranks_keeps_its_rotary_table(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    name = f"hf:{tmp_path / 'base'}"
    run_dir = trained(folder, name, run="ranks-of-transformers", model={"init": name})
    # the gate's float32 sums, in another order
    assert max(run_ranks(largest_difference, 2, run_dir, timeout_s=280)) <= 1e-5


def export_on_ranks(run_dir: Path, out: Path, to: list[str], wrong: bool) -> str:
    if wrong:

        def other(*args: object, **kwargs: object) -> Reference:
            found = compute(*args, **kwargs)  # type: ignore[arg-type]
            return Reference(found.rows, found.logits * 1.01, found.prompts, found.texts, found.of_texts, found.layers)

        compute, module.compute_reference = module.compute_reference, other
    try:
        export_run(run_dir, out, to=to, dtype="bf16", max_shard_bytes=100_000, group=dist.group.WORLD)  # type: ignore[arg-type]
    except ValueError as err:
        return str(err)
    return ""


@pytest.mark.timeout(900)
def test_two_ranks_export_the_files_of_one_process_and_refuse_together(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = {"rope_factor": 8.0, "rope_original_seq_len": 16, "tied_embeddings": True}
    run_dir = trained(folder, "llama3_debug", **args)
    export_run(run_dir, tmp_path / "one", dtype="bf16", max_shard_bytes=100_000)
    assert run_ranks(export_on_ranks, 2, run_dir, tmp_path / "two", ["hf"], False, timeout_s=280) == ["", ""]
    files = {name: {path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two")}
    assert files["one"] == files["two"]
    assert len([name for name in files["one"] if name.endswith(".safetensors")]) > 2
    for name in files["one"] - {"parity.json", "README.md"}:  # which hold measured differences
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    parity = json.loads((tmp_path / "two" / "parity.json").read_text())
    assert [check["passed"] for check in parity["checks"]] == [True] * 4
    assert parity["checks"][2]["measured"] == "3 of 3 prompts equal"
    found = run_ranks(export_on_ranks, 2, run_dir, tmp_path / "wrong", ["hf"], True, timeout_s=280)
    assert all("does not compute what the run's model computes" in words for words in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.timeout(900)
def test_what_ranks_cannot_share_is_exported_by_the_first(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run_dir = trained(folder, "llama3_debug")  # 4 heads
    assert module._why_one_rank(None, None, ["dcp"], "bf16", gate=True) == "only --to hf is written by several ranks"  # type: ignore[arg-type]
    for ranks, to in ((2, ["hf", "dcp"]), (3, ["hf"])):
        one, several = (tmp_path / f"{words}-{ranks}-{'-'.join(to)}" for words in ("one", "several"))
        export_run(run_dir, one, to=to, max_shard_bytes=100_000)  # type: ignore[arg-type]
        assert run_ranks(export_on_ranks, ranks, run_dir, several, to, False, timeout_s=280) == [""] * ranks
        files = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
        assert files == {path.relative_to(several) for path in several.rglob("*") if path.is_file()}
        for name in files:
            if name.name not in ("parity.json", "README.md", ".metadata"):  # measured differences; a time
                assert (one / name).read_bytes() == (several / name).read_bytes(), name
        tables = [json.loads(file.read_text())["checks"] for file in several.rglob("parity.json")]
        assert len(tables) == len(to)
        assert all(check["passed"] for table in tables for check in table)


_WATCHED = """
import os, sys, threading, time
from pathlib import Path
import torch.distributed as dist
from titan_train.export.run import export_run
import accelerate, transformers, transformers.models.llama.modeling_llama

def taken():  # memory that is no file's
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

dist.init_process_group("gloo")
peak = before = taken()
def watch():
    global peak
    while True:
        peak = max(peak, taken())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
export_run(Path(sys.argv[1]), Path(sys.argv[2]), dtype="bf16", max_shard_bytes=40_000_000, group=dist.group.WORLD)
Path(sys.argv[2] + os.environ["RANK"]).write_text(str(peak - before))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_of_an_export_with_the_gate_holds_the_model(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run_dir = trained(folder, "llama3_debug", rope_factor=8.0, rope_original_seq_len=16)
    large = tmp_path / "large"
    shutil.copytree(run_dir, large, ignore=shutil.ignore_patterns("checkpoints"))
    config = (large / "config.toml").read_text()
    (large / "config.toml").write_text(config.replace("[model.args]", "[model.args]\ndim = 1024\nnum_layers = 24"))
    model = build_model(read_config(large).model, vocab_size=259, device="cpu")
    with Checkpointer(large / "checkpoints") as checkpointer:
        checkpointer.save(6, TrainState(model=model, rng=False))
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert size > 300_000_000
    (tmp_path / "watched.py").write_text(_WATCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "watched.py"), str(large), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    peaks = [int((tmp_path / f"out{rank}").read_text()) for rank in (0, 1)]
    print(size, peaks)
    assert max(peaks) < 0.8 * size  # half of the model in float32, buffers and code
