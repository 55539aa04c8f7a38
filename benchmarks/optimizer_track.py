"""Which optimizer reaches a fixed loss in the fewest steps, with data, batch and model fixed?

Method: a byte-level Llama of 0.5 M parameters on Python's standard library, 16 rows of 128 bytes a step, one process and thread.
Each entry first tries the same number of learning rates with seed 0, for as many steps as every run has; its best goes on with
every seed, of weights and of the order of the data. A run is validated every 20 steps on the same 16 k bytes; the steps to the
target are interpolated between two validations. Processor time of a step is that of the median step without validation.
The target is what AdamW at its best rate reaches with every seed.
``--pair`` measures the time of a step alone: turns of five steps of each entry, in changing order, in one process.
Output: a line for each run as it ends, kept in ``--results``, so that the command goes on where it was stopped; a table with
intervals (95 %, Student's t, over seeds); ``--page`` writes all curves; the last line is one JSON object.
Limits: a small model and short runs; no entry's momentum or weight decay is tuned. Newton-Schulz is 1.1 GFLOP of a step's 7: far
more than the 1 % of a large batch (its share falls with tokens a step over the width, here 2048 / 96).

    nice -n 19 python benchmarks/optimizer_track.py --results track.jsonl --seeds 5
    python benchmarks/optimizer_track.py --results track.jsonl --only adamw,muon --seeds 2 --page track.svg
    python benchmarks/optimizer_track.py --results try.jsonl --steps 8 --seeds 2 --page try.svg   # does it run?
    python benchmarks/optimizer_track.py --pair adamw,muon,normuon   # ratios of processor time to the first entry's
"""

import argparse
import contextlib
import itertools
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from titan_train import Trainer, load_config
from titan_train.config import Config
from titan_train.inputs import prepare_inputs
from titan_train.train.observer import Observer

ENTRIES = {
    "adamw": ["--optimizer.name", "adamw"],
    "muon": ["--optimizer.name", "muon"],
    "normuon": [
        "--optimizer.name", "muon", "--optimizer.muon.normuon", "true", "--optimizer.muon.coefficients", "polar_express",
    ],
    "schedule_free": ["--optimizer.name", "schedule_free", "--schedule.name", "constant"],
}  # fmt: skip
"""Settings of each entry."""
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Learning rates that each entry tries."""
STEPS, EVERY, TARGET = 300, 20, 1.80
TURN = 5
"""Steps of a turn of ``--pair``."""
T95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95 % by degrees of freedom, from 0."""
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")


class Curve(Observer):
    """The held-out loss by step, and the processor time of steps."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.seconds: list[float] = []
        self._last = 0.0

    def on_validation(self, record: Any, sample: str | None) -> None:
        """Keep it; the next step is not timed."""
        self.points.append((record.step, record.loss))
        self.pause()

    def pause(self) -> None:
        """Do not time the next step."""
        self._last = 0.0

    def on_step(self, info: Any) -> None:
        """Take the time since the last step."""
        now = time.process_time()
        if self._last:
            self.seconds.append(now - self._last)
        self._last = now


def configure(entry: str, lr: float, seed: int, steps: int, folder: Path, cache: Path, every: int = EVERY) -> Config:
    """One run; with ``every`` 0 it is not validated."""
    between, warmup = str(min(every, max(1, steps // 4))), str(min(20, steps // 4))
    args = "{ dim = 96, num_layers = 4, num_heads = 4, num_kv_heads = 4, ffn_dim = 256 }"
    return load_config("quickstart", [
        "--model.args", args, "--model.seq-len", "128", "--tokenizer.kind", "bytes", "--tokenizer.train", "false",
        "--data.cache-dir", str(cache), "--run.dir", str(folder), "--run.seed", str(seed), "--train.steps", str(steps),
        "--train.global-batch", "16", "--schedule.warmup-steps", warmup, "--validation.every", between,
        "--validation.steps", "8", "--validation.sample-tokens", "0", "--checkpoint.every", "0", "--metrics.progress", "off",
        "--metrics.report", "false", "--launch.device", "cpu", "--launch.nproc", "1", "--optimizer.lr", str(lr),
        *ENTRIES[entry],
    ])  # fmt: skip


def run(entry: str, lr: float, seed: int, steps: int, cache: Path) -> dict[str, Any]:
    """Train once."""
    with tempfile.TemporaryDirectory() as name:
        config = configure(entry, lr, seed, steps, Path(name), cache)
        prepare_inputs(config, quiet=True)
        curve = Curve()
        with Trainer(config, callbacks=[curve]) as trainer:
            trainer.fit()
            parameters = trainer.model.report.num_parameters
    return {
        "entry": entry, "lr": lr, "seed": seed, "steps": steps, "parameters": parameters, "curve": curve.points,
        "cpu_ms_a_step": round(1e3 * statistics.median(curve.seconds), 2),
    }  # fmt: skip


def pair(names: Sequence[str], turns: int, cache: Path) -> dict[str, Any]:
    """Processor time of a step of each entry, in turns, and its ratio to the first entry's in the same turn."""
    times: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        trainers: dict[str, tuple[Trainer, Curve]] = {}
        for name in names:
            folder, curve = Path(stack.enter_context(tempfile.TemporaryDirectory())), Curve()
            config = configure(name, RATES[0], 0, (turns + 1) * (TURN + 1), folder, cache, every=0)
            prepare_inputs(config, quiet=True)
            trainers[name] = stack.enter_context(Trainer(config, callbacks=[curve])), curve
        for turn in range(turns + 1):  # the first warms up
            for name in names if turn % 2 else reversed(names):
                trainer, curve = trainers[name]
                curve.pause()
                trainer.fit(until=(turn + 1) * (TURN + 1))
                times[name] += [1e3 * statistics.mean(curve.seconds[-TURN:])] * (turn > 0)
    found: dict[str, Any] = {}
    for name in names:
        low, middle, high = statistics.quantiles(
            (a / b for a, b in zip(times[name], times[names[0]], strict=True)), n=4
        )
        found[name] = {"cpu_ms_a_step": statistics.median(times[name]), "ratio_quartiles": [low, middle, high]}
        print(f"{name:<14} {found[name]['cpu_ms_a_step']:.1f} ms  ratio {middle:.3f} (quartiles {low:.3f}, {high:.3f})")
    return found


def steps_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """The step at which the loss falls to the target, between two validations; None if it never does."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= target < high:
            return before + (after - before) * (high - target) / (high - low)
    return None


def interval(values: Sequence[float]) -> str:
    """Mean and the half width of its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else "-"
    half = T95[min(len(values) - 1, 9)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.4g} ± {half:.2g}"


def draw(chosen: dict[str, list[dict[str, Any]]], target: float) -> str:
    """All curves as one SVG: a line for each seed, the mean in front."""
    ends = [point for runs in chosen.values() for one in runs for point in one["curve"][1:]]
    low, high = min([target, *(loss for _, loss in ends)]) - 0.05, max(loss for _, loss in ends)

    steps = max(step for runs in chosen.values() for one in runs for step, _ in one["curve"])

    def place(step: float, loss: float) -> tuple[float, float]:
        return 50 + 700 * step / steps, 20 + 360 * (high - loss) / (high - low)

    def path(points: Sequence[Sequence[float]]) -> str:
        return "M" + "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in points)

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 420" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="780" height="420" fill="white"/>')
    for fifth in range(math.ceil(5 * low), math.floor(5 * high) + 1):
        loss = fifth / 5
        parts.append(f'<path d="{path([(0, loss), (steps, loss)])}" stroke="#eee" fill="none"/>')
        parts.append(f'<text x="22" y="{place(0, loss)[1] + 4:.0f}" fill="#666">{loss:.1f}</text>')
    for step in range(0, steps + 1, max(1, steps // 6)):
        parts.append(f'<text x="{place(step, low)[0] - 10:.0f}" y="396" fill="#666">{step}</text>')
    parts.append(f'<path d="{path([(0, target), (steps, target)])}" stroke="#888" stroke-dasharray="4 4" fill="none"/>')
    parts.append(f'<text x="55" y="{place(0, target)[1] - 5:.0f}">target {target}</text>')
    for number, (entry, runs) in enumerate(chosen.items()):
        colour = COLOURS[number % len(COLOURS)]
        curves = [one["curve"][1:] for one in runs]
        parts += [f'<path d="{path(curve)}" stroke="{colour}" opacity=".3" fill="none"/>' for curve in curves]
        mean = [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*curves, strict=True)]
        parts.append(f'<path d="{path(mean)}" stroke="{colour}" stroke-width="2" fill="none"/>')
        reached = [found for one in runs if (found := steps_to(one["curve"], target)) is not None]
        parts.append(
            f'<text x="450" y="{35 + 16 * number}" fill="{colour}">{entry}, lr {runs[0]["lr"]:g}: '
            f"{interval(reached)} steps to the target</text>"
        )
    return "\n".join(
        [*parts, '<text x="380" y="414">steps</text><text x="5" y="12">held-out loss, nats a byte</text></svg>\n']
    )


def track(names: Sequence[str], arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run what is not done yet, and print the table; what was run, and of each entry what it reached."""
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = {
        (one["entry"], one["lr"], one["seed"]): one for one in map(json.loads, lines) if one["steps"] == arguments.steps
    }
    cache = arguments.results.resolve().with_suffix(".cache")

    def result(entry: str, lr: float, seed: int) -> dict[str, Any]:
        if (entry, lr, seed) not in done:
            done[entry, lr, seed] = one = run(entry, lr, seed, arguments.steps, cache)
            with arguments.results.open("a") as file:
                file.write(json.dumps(one) + "\n")
        one = done[entry, lr, seed]
        reached = steps_to(one["curve"], arguments.target)
        print(
            f"{entry:<10} lr={lr:<8g} seed={seed} loss={one['curve'][-1][1]:.4f} steps_to_target={reached}", flush=True
        )
        return one

    chosen: dict[str, list[dict[str, Any]]] = {}
    for entry in names:
        tried = [result(entry, lr, 0) for lr in RATES]
        best = min(tried, key=lambda one: (steps_to(one["curve"], arguments.target) or math.inf, one["curve"][-1][1]))[
            "lr"
        ]
        chosen[entry] = [result(entry, best, seed) for seed in range(arguments.seeds)]
    summary: dict[str, Any] = {}
    print(f"\n{'entry':<10} {'lr':>8}  {'steps to target':<18} {'last loss':<18} cpu ms a step")
    for entry, runs in chosen.items():
        reached = [steps_to(one["curve"], arguments.target) for one in runs]
        found = [steps for steps in reached if steps is not None]
        last = [one["curve"][-1][1] for one in runs]
        cpu = statistics.median(one["cpu_ms_a_step"] for one in runs)
        print(
            f"{entry:<10} {runs[0]['lr']:>8g}  {interval(found):<18} {interval(last):<18} {cpu:.1f}  {len(found)} of {len(runs)}"
        )
        summary[entry] = {"lr": runs[0]["lr"], "steps_to_target": reached, "last_loss": last, "cpu_ms_a_step": cpu}
    if arguments.page:
        arguments.page.write_text(draw(chosen, arguments.target))
    return {
        "steps": arguments.steps,
        "target": arguments.target,
        "seeds": arguments.seeds,
        "parameters": runs[0]["parameters"],
    }, summary


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="runs that are done, one JSON object a line")
    parser.add_argument(
        "--pair", default="", help="measure the time of a step of these entries, with commas, and nothing else"
    )
    parser.add_argument("--turns", type=int, default=16, help="of --pair")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--target", type=float, default=TARGET, help="nats a byte")
    parser.add_argument("--only", default="", help="names of entries, with commas; all without")
    parser.add_argument("--page", type=Path, help="an SVG of all curves")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in (arguments.pair or arguments.only).split(",") if name] or list(ENTRIES)
    if unknown := [name for name in names if name not in ENTRIES]:
        parser.error(f"no entry is called {unknown[0]!r}. There are {', '.join(ENTRIES)}.")
    if arguments.pair:
        with tempfile.TemporaryDirectory() as folder:
            config, entries = {"turns": arguments.turns}, pair(names, arguments.turns, Path(folder))
    elif arguments.results is None:
        parser.error("give --results, or --pair for the time of a step alone.")
    else:
        config, entries = track(names, arguments)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"versions": versions, "device": "cpu", "config": config, "entries": entries}))


if __name__ == "__main__":
    main()
