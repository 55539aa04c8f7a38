"""Does titan-train's own Trainer train on this device, and does it keep its promises there?

Question: a run in bf16 with checkpoints; the same run stopped and resumed; with CUDA graphs, recomputation, offload, compile,
float8 and experts; as the command starts it; and an 8B-shaped model through the whole path from data to optimizer. With
``--ranks N``: the same run on N GPUs under each kind of parallelism.

Method: every variant trains on Python's standard library in bytes, packed, four micro-batches a step, with deterministic kernels
where the device has them for all. Its losses are compared with those of the first variant: equal where only the way of computing
differs, within a bound that is said where the arithmetic differs. The 8B shape is timed, and nothing is compared.

Output: a row per variant as soon as it is there, each followed by one JSON object with all so far; exit code 1 if any failed.

    python benchmarks/gpu/product.py --device cuda
    python benchmarks/gpu/product.py --device cuda --ranks 2
    python benchmarks/gpu/product.py --device cpu --tiny
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Sections = dict[str, dict[str, Any]]
EQUAL = 0.0
OTHER_ORDER = 0.02  # nats: bf16 products summed in another order
OTHER_FORMAT = 0.3  # nats: float8 products; a run that diverges is nats away

VARIANTS: dict[str, tuple[Sections, float]] = {
    "full recomputation": ({"activations": {"checkpoint": "full"}}, EQUAL),
    "activation offload": ({"activations": {"offload": True}}, EQUAL),
    "CUDA graphs": ({"compile": {"cudagraphs": True}}, EQUAL),
    "compiled blocks": ({"compile": {"enabled": True}}, OTHER_ORDER),
    "compiled, CUDA graphs": ({"compile": {"enabled": True, "cudagraphs": True}}, OTHER_ORDER),
    "float8 blockwise": ({"float8": {"recipe": "blockwise", "min_speedup": 0.0}}, OTHER_FORMAT),
    "float8 tensorwise": ({"float8": {"recipe": "tensorwise", "min_speedup": 0.0}}, OTHER_FORMAT),
    "parameters in host memory": ({"parallel": {"offload": "cpu"}}, OTHER_ORDER),
}
ONLY_CUDA = (
    "CUDA graphs",
    "compiled, CUDA graphs",
    "activation offload",
    "parameters in host memory",
    "compiled blocks",
)

LAYOUTS: dict[str, Sections] = {
    "fsdp": {},
    "fsdp, own reduce-scatter group": {"parallel": {"reduce_scatter_group": "own", "reduce_scatter_buffers": 2}},
    "ddp": {"parallel": {"mode": "ddp", "dp_replicate": -1, "dp_shard": 1}, "train": {"dtype": "fp32"}},
    "tp": {"parallel": {"tp": 2}},
    "cp ring": {"parallel": {"cp": 2}, "context": {"method": "ring"}},
    "cp direct": {"parallel": {"cp": 2}, "context": {"method": "auto"}},
    "pp 1f1b, every step recorded": {"parallel": {"pp": 2}, "metrics": {"split_every": 1}},
    "pp zbv, every step recorded": {
        "parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}, "metrics": {"split_every": 1},
    },
    "pp interleaved, every step recorded": {
        "parallel": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}, "metrics": {"split_every": 1},
    },
}  # fmt: skip


class Runs:
    """Runs of one shape in one folder."""

    def __init__(self, folder: Path, device: str, tiny: bool) -> None:
        self.folder, self.device, self.tiny = folder, device, tiny
        self.steps = 4 if tiny else 24
        self.deterministic = True

    def sections(self, name: str, changes: Sections) -> Sections:
        """The configuration of a variant, as of a TOML file."""
        sizes = {} if self.tiny else {"dim": 1024, "num_heads": 16, "num_kv_heads": 4, "ffn_dim": 4096}
        tree: Sections = {
            "run": {"dir": str(self.folder / "runs"), "name": name, "seed": 7, "deterministic": self.deterministic},
            "model": {"name": "llama3_debug", "seq_len": 64 if self.tiny else 1024, "args": {"num_layers": 4, **sizes}},
            "tokenizer": {"kind": "bytes"},
            "data": {
                "sources": [{"name": "stdlib", "kind": "stdlib", "exclude": ["[b-z]*"]}],
                "cache_dir": str(self.folder / "cache"),
                "validation_fraction": 0.0,
            },
            "train": {"steps": self.steps, "global_batch": 8, "microbatch": 2, "dtype": "bf16"},
            "optimizer": {"lr": 1e-3},
            "schedule": {"warmup_steps": 2},
            "checkpoint": {"every": self.steps // 2},
            "metrics": {"progress": "off"},
            "launch": {"device": self.device},
        }
        for section, values in changes.items():
            tree[section] = tree.get(section, {}) | values
        return tree

    def train(self, name: str, changes: Sections, until: int | None = None) -> list[float]:
        """Losses of a run in this process, or of the rest of it where a checkpoint is there."""
        from titan_train.config import parse_config
        from titan_train.train import Trainer

        with Trainer(parse_config(self.sections(name, changes))) as trainer:
            trainer.fit(until)
            return list(trainer.losses)

    def command(self, name: str, changes: Sections, ranks: int) -> list[float]:
        """Losses of a run by the command, with the launcher's ranks."""
        import tomli_w

        sections = self.sections(name, changes)
        sections["launch"] = sections["launch"] | {"nproc": ranks, "timeout_s": 60.0}
        sections["metrics"] = sections["metrics"] | {"log_every": 1}
        config = self.folder / f"{name}.toml".replace(" ", "_").replace(",", "")
        config.write_text(tomli_w.dumps(sections))
        subprocess.run([sys.executable, "-m", "titan_train", "run", str(config)], check=True, timeout=200)
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "step"]


def compared(got: list[float], want: list[float], bound: float) -> dict[str, Any]:
    """How far two runs' losses are apart, and the verdict.

    Bits are equal in every step. Where the arithmetic differs, the first loss and the mean of the last four are held to the
    bound: while a loss falls by nats in a few steps, a small difference is a step ahead or behind for a while.
    """
    apart = [abs(a - b) for a, b in zip(got, want, strict=True)]
    judged = (
        {"first": apart[0], "last four": abs(sum(got[-4:]) - sum(want[-4:])) / 4} if bound else {"worst": max(apart)}
    )
    row = {"last loss": round(got[-1], 4), "worst": max(apart), "at step": apart.index(max(apart)) + 1, "bound": bound}
    return row | judged | {"outcome": "ok" if max(judged.values()) <= bound else "failed: the losses differ"}


def one_rank(runs: Runs) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Each variant's name, and what trains it."""
    whole: list[float] = []
    start = "tiny" if runs.tiny else "bf16"

    def first() -> dict[str, Any]:
        try:
            whole.extend(runs.train(start, {}))
        except RuntimeError as err:  # torch names the kernel that has no deterministic form
            if "determinis" not in str(err):
                raise
            print(f"without deterministic kernels: {str(err).splitlines()[0]}", flush=True)
            runs.deterministic = False
            whole.extend(runs.train("bf16 again", {}))
        return compared(whole, whole, EQUAL) | {
            "outcome": "ok" if whole[-1] < whole[0] else "failed: the loss does not fall"
        }

    def again(until: int) -> dict[str, Any]:
        losses = runs.train("resumed", {}, until) + runs.train("resumed", {})
        return against(losses, EQUAL)

    def against(losses: list[float], bound: float) -> dict[str, Any]:
        return compared(losses, whole, bound if runs.deterministic else max(bound, OTHER_ORDER))

    def experts() -> dict[str, Any]:
        model = {"model": {"name": "qwen3_moe_debug", "seq_len": 64, "args": {}}}
        want, half = runs.train("moe", model), runs.steps // 2
        return compared(runs.train("moe resumed", model, half) + runs.train("moe resumed", model), want, OTHER_ORDER)

    yield "bf16", first
    yield "stopped and resumed", lambda: again(runs.steps // 2)
    yield "by the command", lambda: against(runs.command("command", {}, 1), EQUAL)
    for name, (changes, bound) in VARIANTS.items():
        if not (runs.tiny and name in ONLY_CUDA):
            yield name, lambda n=name, c=changes, b=bound: against(runs.train(n, c), b)
    yield "mixture of experts, resumed", experts
    yield "8B shape", lambda: shape_8b(runs)


def shape_8b(runs: Runs) -> dict[str, Any]:
    """Tokens/s, MFU and memory of blocks of Llama 3 8B, from the run's own metrics."""
    sizes = {"dim": 64, "ffn_dim": 128, "num_heads": 4, "num_kv_heads": 2} if runs.tiny else {}
    changes: Sections = {
        "run": {"deterministic": False},
        "model": {
            "name": "llama3_8b",
            "seq_len": 64 if runs.tiny else 8192,
            "args": {"num_layers": 2 if runs.tiny else 8, **sizes},
        },
        "train": {"steps": 6 if runs.tiny else 12, "global_batch": 2, "microbatch": 1},
        "metrics": {"log_every": 1},
        "checkpoint": {"every": 0},
    }
    losses = runs.train("8B shape", changes)
    lines = (runs.folder / "runs" / "8B shape" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["kind"] == "step"][-4:]
    named = ("tokens_per_s", "mfu", "peak_mem_gib", "step_time_s")
    row = {name: sorted(step[name] or 0.0 for step in steps)[len(steps) // 2] for name in named}
    return {"last loss": round(losses[-1], 4), **row, "outcome": "ok"}


def several_ranks(runs: Runs, ranks: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The run on several devices, layout by layout, against one."""
    whole: dict[str, list[float]] = {}

    def one(dtype: str) -> list[float]:
        if dtype not in whole:
            whole[dtype] = runs.command(f"one {dtype}", {"train": {"dtype": dtype}}, 1)
        return whole[dtype]

    from torch.distributed.fsdp import FSDPModule

    for name, changes in LAYOUTS.items():
        if "own" in name and not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
            continue  # torch < 2.15
        dtype = changes.get("train", {}).get("dtype", "bf16")
        yield name, lambda n=name, c=changes, d=dtype: compared(runs.command(n, c, ranks), one(d), OTHER_ORDER)


def main() -> int:
    """Run every variant; 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs; more than one compares layouts")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--only", nargs="+", help="words of the variants to run beside the first")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), arguments.device, arguments.tiny)
        variants = one_rank(runs) if arguments.ranks == 1 else several_ranks(runs, arguments.ranks)
        for number, (name, train) in enumerate(variants):
            if arguments.only and number and not any(word in name for word in arguments.only):
                continue
            began = time.perf_counter()
            try:
                row = train()
            except Exception as err:  # the other variants are still worth their time
                lines = str(err).splitlines() or [""]
                row = {"outcome": f"failed: {type(err).__name__}: {lines[0][:300]}"}
            rows[name] = row | {"s": round(time.perf_counter() - began, 1)}
            print(f"{name:32} {rows[name]}", flush=True)
            print(json.dumps({"benchmark": "product", "ranks": arguments.ranks, "rows": rows}), flush=True)
    return int(any(row["outcome"] != "ok" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
