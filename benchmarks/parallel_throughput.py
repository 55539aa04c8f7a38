"""What does each parallelism cost on the same four CPU ranks?

Question: steps/s of the trainer under each layout, over plain FSDP on the same ranks and the same global batch, and how
much of a step its process groups are at work.

Method: one set of four ranks trains under FSDP and under the layout in turn, a few steps each; each pair of turns gives
one ratio. The share of communication is read from a profile of two more steps on rank 0: the summed time of gloo's
operations over the time of the steps. They may overlap with computing, so it is an upper bound of what they cost.

Layouts with expert parallelism train a mixture of experts, as does the FSDP beside them.

Output: a table of median ratios with quartiles; the last line is one JSON object. ``--out PREFIX`` also writes
PREFIX.json and PREFIX.md.

Limits: four ranks on two cores share memory and processors, so nothing is gained by cutting work; what shows is the
overhead of each layout. Gloo over loopback has some 0.1 ms a collective and no transport beside computing.

    OMP_NUM_THREADS=1 python benchmarks/parallel_throughput.py --pairs 5
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from titan_testing import preload, run_ranks
from titan_train.config import parse_config
from titan_train.inputs import prepare_inputs
from titan_train.train import Trainer

RANKS = 4
DENSE = {
    "name": "llama3_debug",
    "args": {"dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 768},
}
MIXTURE = {
    "name": "qwen3_moe_debug",
    "args": {"dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "expert_ffn_dim": 384},
}
LAYOUTS = {
    "hsdp 2 x 2": {"parallel": {"dp_replicate": 2}},
    "ddp": {"parallel": {"mode": "ddp"}},
    "tp 2": {"parallel": {"tp": 2, "sequence_parallel": False}},
    "tp 2 + sp": {"parallel": {"tp": 2}},
    "tp 2 + sp, async": {"parallel": {"tp": 2, "async_tp": True}},
    "tp 4 + sp": {"parallel": {"tp": 4}},
    "cp 2 ring": {"parallel": {"cp": 2}, "context": {"method": "ring"}},
    "cp 2 ulysses": {"parallel": {"cp": 2}, "context": {"method": "ulysses"}},
    "pp 2 1f1b": {"parallel": {"pp": 2}},
    "pp 4 1f1b": {"parallel": {"pp": 4}},
    "pp 4 zb_h1": {"parallel": {"pp": 4}, "pipeline": {"schedule": "zb_h1"}},
    "pp 2 zbv": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}},
    "ep 2": {"model": MIXTURE, "parallel": {"ep": 2}},
    "ep 4": {"model": MIXTURE, "parallel": {"ep": 4}},
    "ep 4, tp 2 + sp": {"model": MIXTURE, "parallel": {"ep": 4, "tp": 2}},
    "full checkpointing": {"activations": {"checkpoint": "full"}},
    "selective checkpointing": {"activations": {"checkpoint": "selective"}},
}


def configure(folder, **sections):
    tree = {
        "run": {"dir": f"{folder}/runs"},
        "model": DENSE | {"seq_len": 128},
        "tokenizer": {"kind": "bytes"},
        "data": {
            "sources": [{"name": "corpus", "kind": "text", "paths": [f"{folder}/*.txt"]}],
            "cache_dir": f"{folder}/cache",
            "validation_fraction": 0.0,
        },
        "train": {"steps": 10_000, "global_batch": 16, "microbatch": 2},
        "checkpoint": {"every": 0},
        "metrics": {"progress": "off", "report": False},
        "launch": {"device": "cpu"},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return parse_config(tree)


def measure(folder, sections, pairs, steps):
    """Seconds a step of every turn under FSDP and under the layout, and the layout's share of communication."""
    with tempfile.TemporaryDirectory() as scratch:
        alone = {"model": sections["model"]} if "model" in sections else {}
        one = Trainer(configure(folder, **alone), run_dir=Path(scratch) / "fsdp")
        other = Trainer(configure(folder, **sections), run_dir=Path(scratch) / "layout")
        times = {one: [], other: []}
        for trainer in (one, other):
            trainer.fit(until=2)
        for turn in range(pairs):
            for trainer in (one, other) if turn % 2 else (other, one):
                torch.distributed.barrier()
                started = time.perf_counter()
                trainer.fit(until=trainer.step + steps)
                times[trainer].append((time.perf_counter() - started) / steps)
        started = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            other.fit(until=other.step + 2)
        elapsed = time.perf_counter() - started
        share = sum(e.cpu_time_total for e in profile.key_averages() if e.key.startswith("gloo:")) / 1e6 / elapsed
        if other.model.pipeline is not None:  # its receives wait in threads of their own, several at once
            share = None
        one.close()
        other.close()
        return times[one], times[other], share


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="turns of each")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a turn")
    parser.add_argument("--out", help="write PREFIX.json and PREFIX.md")
    parser.add_argument("--only", default="", help="layouts whose name holds this")
    arguments = parser.parse_args()
    preload("titan_train.train.trainer")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(64):
            lines = [f"def f{i}_{j}(x, y):\n    return x + {i * j % 97} * y\n" for j in range(200)]
            (Path(folder) / f"{i:02}.txt").write_text("".join(lines))
        prepare_inputs(configure(folder), quiet=True)
        print(f"{'layout':<26}{'of FSDP steps/s':>16}{'quartiles':>18}{'communication':>15}")
        for name, sections in LAYOUTS.items():
            if arguments.only not in name:
                continue
            ranks = run_ranks(measure, RANKS, folder, sections, arguments.pairs, arguments.steps, timeout_s=570)
            fsdp_s, layout_s, share = ranks[0]
            ratios = [a / b for a, b in zip(fsdp_s, layout_s, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            results[name] = {"ratio": middle, "low": low, "high": high, "communication": share}
            print(f"{name:<26}{middle:>16.2f}{f'{low:.2f} to {high:.2f}':>18}{percent(share):>15}", flush=True)
    report = {
        "benchmark": "parallel_throughput",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[1], 2),
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
        "ranks": RANKS,
        "pairs": arguments.pairs,
        "steps": arguments.steps,
        "layouts": results,
    }
    print(json.dumps(report))
    if arguments.out:
        Path(f"{arguments.out}.json").write_text(json.dumps(report, indent=1) + "\n")
        Path(f"{arguments.out}.md").write_text(page(report))


def percent(share):
    return "" if share is None else f"{share:.0%}"


def page(report):
    """The result as a page."""
    setup = f"{report['cpus']} cores, Python {report['python']}, torch {report['torch']}, load {report['load']}"
    lines = [
        "# Steps/s of each parallelism against FSDP on the same ranks",
        "",
        f"{report['date']}, {report['ranks']} gloo ranks on {setup}; {report['pairs']} pairs of {report['steps']} steps.",
        "",
        "```bash",
        f"OMP_NUM_THREADS=1 python benchmarks/parallel_throughput.py --pairs {report['pairs']} --steps {report['steps']}",
        "```",
        "",
        "| layout | steps/s over FSDP's, median | quartiles | share of communication |",
        "| --- | --- | --- | --- |",
    ]
    for name, found in report["layouts"].items():
        quartiles = f"{found['low']:.2f} to {found['high']:.2f}"
        lines.append(f"| {name} | {found['ratio']:.2f} | {quartiles} | {percent(found['communication'])} |")
    lines += [
        "",
        "The share is the time of gloo's operations on rank 0, waiting for the other ranks included, over the time of two",
        "steps; transfers that overlap with computing count too, and a pipeline has none, as its receives wait in threads of",
        "their own. Four ranks share two cores, so cutting work gains nothing here: what shows is each layout's overhead.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
