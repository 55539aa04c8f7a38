"""What does measuring where a step's time goes cost?

Method: one run on two gloo ranks (FSDP), in chunks of 20 steps, the measurement (`metrics.split_every = 20`: phases, every
collective, one gather and record per chunk) on in every second chunk. CPU time of the thread that trains, on each rank, over
a chunk, so that other work on the machine counts little; neighbouring chunks are paired, and the median of the ratios is the
cost.
Output: a line per model, then one JSON object. Limits: gloo on CPU; the collectives of a GPU step are as many, its step
longer. Example: python benchmarks/split_overhead.py
"""

import argparse
import dataclasses
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.inputs import prepare_inputs
from titan_train.train import Trainer

CHUNK = 20
MODELS = {
    "tiny (131,776 parameters)": ({"name": "llama3_debug", "seq_len": 64}, 8),
    "small": ({"name": "llama3_debug", "seq_len": 128, "args": {"dim": 256, "num_layers": 4}}, 8),
}


def configure(folder, model, batch):
    return parse_config(
        {
            "run": {"dir": f"{folder}/runs", "name": f"d{model['seq_len']}"},
            "model": model,
            "tokenizer": {"kind": "bytes"},
            "data": {
                "sources": [{"name": "text", "kind": "text", "paths": [f"{folder}/text.txt"]}],
                "cache_dir": f"{folder}/cache",
                "validation_fraction": 0.0,
            },
            "train": {"steps": 10_000, "global_batch": batch, "gc_every": 0},
            "schedule": {"warmup_steps": 2},
            "checkpoint": {"every": 0},
            "metrics": {"progress": "off", "split_every": CHUNK, "log_every": 10},
            "launch": {"device": "cpu"},
        }
    )


def measure(folder, model, batch, pairs):
    """CPU seconds of this rank for each chunk, off and on."""
    seconds = {False: [], True: []}
    with Trainer(configure(folder, model, batch)) as trainer:
        trainer.fit(until=CHUNK)
        for chunk in range(2 * pairs):
            on = (chunk + chunk // 2) % 2 == 0  # on off off on: a drift favours neither
            trainer._measure._every = CHUNK if on else 0
            metrics = dataclasses.replace(trainer.config.metrics, split_every=CHUNK if on else 0)
            trainer.config = dataclasses.replace(trainer.config, metrics=metrics)
            began = time.thread_time()
            trainer.fit(until=trainer.step + CHUNK)
            seconds[on].append(time.thread_time() - began)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=14, help="pairs of chunks per rank")
    pairs = parser.parse_args().pairs
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(
            "".join(f"{i} squared is {i * i}, its cube {i**3}.\n" for i in range(40_000))
        )
        for name, (model, batch) in MODELS.items():
            prepare_inputs(configure(folder, model, batch), quiet=True)
            ranks = run_ranks(measure, 2, folder, model, batch, pairs, timeout_s=1800)
            ratios = [on / off for rank in ranks for on, off in zip(rank[True], rank[False], strict=True)]
            step_ms = 1e3 * statistics.median(s for rank in ranks for s in rank[False]) / CHUNK
            quarters = statistics.quantiles(ratios, n=4)
            rows[name] = {"step_cpu_ms": step_ms, "ratio": statistics.median(ratios), "quartiles": quarters}
            print(f"{name}: {step_ms:.1f} ms of CPU per step, measured {statistics.median(ratios):.4f} times as much")
    about = {"torch": torch.__version__, "python": platform.python_version(), "device": "cpu", "pairs": 2 * pairs}
    print(json.dumps({**about, "chunk": CHUNK, "models": rows}))


if __name__ == "__main__":
    main()
