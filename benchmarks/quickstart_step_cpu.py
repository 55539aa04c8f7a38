"""How much faster is a training step of the quick start in one checkout than in another?

Question: CPU time of an optimizer step of the quick start's model (one rank, one thread), of two commits.

Method: both train the same configuration, which is written here: the shipped quick start's model and batch, or with
``--shape first`` those that it had first (the checkouts' own files differ). Each trains in a process of its own, which imports
only that checkout's packages; they take turns, a few steps each, in alternating order, and a pair of turns gives one ratio. A
turn's figure is the process's CPU time, all threads (the loader's among them), so that other load on the machine costs
neither side.

Output: medians, the median ratio and its quartiles. The last line is one JSON object. ``--profile`` prints where one
checkout's step spends its time instead.

Limits: one rank, so nothing is communicated. CPU time says nothing about waiting.

    git worktree add /tmp/before COMMIT
    python benchmarks/quickstart_step_cpu.py --before /tmp/before --pairs 15
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


_SHAPES = {
    "now": "{ dim = 192, num_layers = 4, num_heads = 4, num_kv_heads = 2, ffn_dim = 512 }",
    "first": "{ dim = 256, num_layers = 4, num_heads = 4, ffn_dim = 704 }",
}
_CONFIG = """
[model]
name = "llama3_small"
args = ARGS
seq_len = 256

[tokenizer]
kind = "sentencepiece"
train = true
vocab_size = 4096

[[data.sources]]
name = "stdlib"
kind = "stdlib"

[train]
steps = 400
global_batch = 8

[optimizer]
lr = 3e-3

[schedule]
warmup_steps = 20
"""


def build(folder: str, shape: str):
    """The quick start's trainer, without saving and validating."""
    import torch
    from titan_train.config import load_config
    from titan_train.inputs import prepare_inputs
    from titan_train.train import Trainer

    torch.set_num_threads(1)
    file = Path(folder) / "step.toml"
    file.write_text(_CONFIG.replace("ARGS", _SHAPES[shape]))
    config = load_config(str(file), ["--launch.device", "cpu", "--run.dir", folder, "--metrics.progress", "off"])
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=10**6),
        checkpoint=dataclasses.replace(config.checkpoint, every=0),
        validation=dataclasses.replace(config.validation, every=0),
    )
    prepare_inputs(config)
    return Trainer(config)


def serve(shape: str) -> None:
    """Train as many steps as each line on stdin says; answer with the CPU milliseconds of one."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(folder, shape)
        for line in sys.stdin:
            steps = int(line)
            began = time.process_time()
            trainer.fit(until=trainer.step + steps)
            print("ms", (time.process_time() - began) * 1e3 / steps, trainer.losses[-1], flush=True)
        trainer.abandon()


def profile(steps: int, shape: str) -> None:
    """Print the operators of a few steps of this checkout by their own time."""
    from torch.profiler import profile as record

    with tempfile.TemporaryDirectory() as folder:
        trainer = build(folder, shape)
        trainer.fit(until=3)
        with record() as seen:
            trainer.fit(until=3 + steps)
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60))
        trainer.abandon()


class Checkout:
    """A process that trains with the packages of one checkout."""

    def __init__(self, root: Path, shape: str) -> None:
        sources = [str(path) for pattern in ("packages/*/src", "testing/*/src") for path in root.glob(pattern)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--shape", shape], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=root,
        )  # fmt: skip
        self.commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
        ).stdout.strip()

    def turn(self, steps: int) -> tuple[float, float]:
        """CPU milliseconds of one step, and the last step's loss."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ms "):
                _, milliseconds, loss = line.split()
                return float(milliseconds), float(loss)
        raise RuntimeError("the process of a checkout ended; its error is above.")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="root of the other checkout")
    parser.add_argument("--after", type=Path, default=HERE, help="root of this one")
    parser.add_argument("--pairs", type=int, default=15, help="turns of each")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps a turn")
    parser.add_argument("--shape", choices=_SHAPES, default="now", help="the quick start's model now, or at first")
    parser.add_argument("--profile", action="store_true", help="where the steps of this checkout spend their time")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.shape)
        return
    if arguments.profile or arguments.before is None:
        profile(arguments.steps, arguments.shape)
        return
    pair = [Checkout(root.resolve(), arguments.shape) for root in (arguments.before, arguments.after)]
    for checkout in pair:
        checkout.turn(3)  # warm up
    taken: tuple[list[float], list[float]] = ([], [])
    losses = [0.0, 0.0]
    for turn in range(arguments.pairs):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            milliseconds, losses[index] = pair[index].turn(arguments.steps)
            taken[index].append(milliseconds)
    for checkout in pair:
        checkout.close()
    low, middle, high = statistics.quantiles([b / a for b, a in zip(*taken, strict=True)], n=4)
    before, after = (statistics.median(values) for values in taken)
    print(f"before {pair[0].commit}  {before:8.1f} ms of CPU time a step, loss {losses[0]:.4f}")
    print(f"after  {pair[1].commit}  {after:8.1f} ms of CPU time a step, loss {losses[1]:.4f}")
    print(f"ratio  {middle:.3f} (quartiles {low:.3f} and {high:.3f}, {arguments.pairs} pairs)")
    print(
        json.dumps(
            {
                "benchmark": Path(__file__).stem,
                "before": {"commit": pair[0].commit, "ms": round(before, 2), "loss": losses[0]},
                "after": {"commit": pair[1].commit, "ms": round(after, 2), "loss": losses[1]},
                "ratio_median": round(middle, 4),
                "ratio_quartiles": [round(low, 4), round(high, 4)],
                "shape": arguments.shape,
                "pairs": arguments.pairs,
                "steps_per_turn": arguments.steps,
            }
        )
    )


if __name__ == "__main__":
    main()
