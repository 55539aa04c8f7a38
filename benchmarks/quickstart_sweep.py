"""Which configuration of the quick start reaches the fewest bits per byte in a given time on CPUs?

Method: each candidate is the shipped configuration with a few settings changed. It trains in one process on one thread for
as many steps as fit in ``--cpu-seconds`` of processor time, measured on its own first steps, with the whole schedule inside
that budget; then it is validated once on at least ``--tokens`` held-out tokens. Processor time and not wall time, so that
a busy machine ranks the candidates alike. Tokenizer and shards are made before the clock starts.
Output: a line per candidate as it ends; the last line is one JSON object.
Limits: one seed; a small budget favours small models. Confirm the winner with the command itself, on an idle machine:
``titan-train run quickstart``, which takes all cores and some four minutes. Windows of another length than the shipped one see
more or less context in their validation too.

    python benchmarks/quickstart_sweep.py --cpu-seconds 60
    python benchmarks/quickstart_sweep.py --cpu-seconds 300 --only shipped,wide
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from titan_train import Trainer, load_config
from titan_train.config import Config
from titan_train.inputs import prepare_inputs


def shape(dim: int, layers: int, heads: int, ffn: int, vocab: int, more: str = "") -> list[str]:
    """Settings of a model's size."""
    heads_and_keys = f"num_heads = {heads}, num_kv_heads = {max(1, heads // 2)}"
    args = f"{{ dim = {dim}, num_layers = {layers}, {heads_and_keys}, ffn_dim = {ffn}{more} }}"
    return ["--model.args", args, "--tokenizer.vocab-size", str(vocab)]


CANDIDATES: dict[str, list[str]] = {
    "shipped": [],
    "cool": ["--optimizer.lr", "2e-3"],
    "hot": ["--optimizer.lr", "6e-3"],
    "cosine": ["--schedule.name", "cosine"],
    "long-decay": ["--schedule.decay-steps", "{60 % of the steps}"],
    "adamw": ["--optimizer.name", "adamw"],
    "normuon": ["--optimizer.muon.normuon", "true", "--optimizer.muon.coefficients", "polar_express"],
    "batch-4": ["--train.global-batch", "4"],
    "batch-16": ["--train.global-batch", "16"],
    "short": ["--model.seq-len", "64", "--train.global-batch", "16"],
    "long": ["--model.seq-len", "256", "--train.global-batch", "4"],
    "unmasked": ["--data.document-mask", "false"],
    "tied": shape(128, 4, 4, 384, 4096, ", tied_embeddings = true"),
    "theta": shape(128, 4, 4, 384, 4096, ", rope_theta = 10000.0"),
    "vocab-2048": shape(128, 4, 4, 384, 2048),
    "deep": shape(128, 6, 4, 384, 4096),
    "wide": shape(192, 4, 4, 512, 4096),
}
WARM_UP, TIMED = 3, 8


def configure(words: list[str], folder: Path, steps: int, tokens: int) -> Config:
    """The candidate for so many steps, validated at the end only."""
    fixed = [
        "--run.dir", str(folder), "--train.steps", str(steps), "--launch.device", "cpu", "--launch.nproc", "1",
        "--schedule.warmup-steps", str(max(1, min(20, steps // 10))), "--checkpoint.every", "0",
        "--metrics.progress", "off", "--metrics.report", "false", "--validation.sample-tokens", "0",
        "--validation.every", str(steps),
    ]  # fmt: skip
    words = [word.replace("{60 % of the steps}", str(6 * steps // 10)) for word in words]
    config = load_config("quickstart", [*words, *fixed])
    batch = config.train.global_batch * config.model.seq_len
    return load_config("quickstart", [*words, *fixed, "--validation.steps", str(-(-tokens // batch))])


def cpu_seconds_a_step(words: list[str], folder: Path) -> float:
    """Processor time of a step, after the first few."""
    with Trainer(configure(words, folder, WARM_UP + TIMED + 1, 1)) as trainer:
        trainer.fit(until=WARM_UP)
        started = time.process_time()
        trainer.fit(until=WARM_UP + TIMED)
        return (time.process_time() - started) / TIMED


def try_one(words: list[str], budget: float, tokens: int) -> dict[str, Any]:
    """Train a candidate within its budget and validate it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_inputs(configure(words, folder, 1, 1), quiet=True)
        steps = max(10, int(budget / cpu_seconds_a_step(words, folder / "timing")))
        config = configure(words, folder / "run", steps, tokens)
        with Trainer(config) as trainer:
            started = time.process_time()
            trainer.fit(until=steps - 1)
            spent = time.process_time() - started
            trainer.fit()
            lines = (trainer.run_dir / "metrics.jsonl").read_text().splitlines()
            parameters = trainer.model.report.num_parameters
        (validation,) = [line for line in map(json.loads, lines) if line["kind"] == "validation"]
    batch = config.train.global_batch * config.model.seq_len
    return {
        "parameters": parameters,
        "steps": steps,
        "tokens": steps * batch,
        "cpu_s": round(spent, 1),
        "bits_per_byte": validation["bits_per_byte"],
        "loss": validation["loss"],
        "validated_on": validation["tokens"],
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--only", default="", help="names of candidates, with commas; all without")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.only.split(",") if arguments.only else list(CANDIDATES)
    if unknown := [name for name in names if name not in CANDIDATES]:
        parser.error(f"no candidate is called {unknown[0]!r}. There are {', '.join(CANDIDATES)}.")
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = try_one(CANDIDATES[name], arguments.cpu_seconds, arguments.tokens)
        print(f"{name:<18} " + " ".join(f"{key}={value}" for key, value in found[name].items()), flush=True)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    config = {"cpu_seconds": arguments.cpu_seconds, "tokens": arguments.tokens}
    print(json.dumps({"versions": versions, "device": "cpu", "config": config, "candidates": found}))


if __name__ == "__main__":
    main()
