"""Bits per byte at one budget of processor time: the quick start beside nanoGPT's recipe and the Trainer of transformers.

Method: the same tokens to train on (the standard library's source), the same tokenizer of 4,096 tokens, one thread,
float32. A step of each contestant is timed in turns with all others' (processor time of the process; the median), which
gives the steps that fit ``--cpu-seconds``; its whole schedule lies inside them. Then all are scored on the same held-out
windows of 256 labels, 100 k that no seed changes, and the bytes of these; who was trained on shorter windows reads them in
blocks of its own length. ``shipped`` is the quick start as it is. Published defaults: ``nanogpt documented`` is the CPU recipe
of nanoGPT's README; ``hf course`` the recipe of chapter 7.6 of the Hugging Face course, batches of 16 for its 256 (which would
leave a handful of steps); ``hf defaults`` the ``TrainingArguments`` that the Trainer has by itself. Peers are 192 wide, but for
nanoGPT's documented recipe (128) and ``shape of ours``; all have 4 layers. Each of the three is then swept: six candidates, one
seed, the same budget each, and its best is trained on five seeds too. What is shipped was itself chosen from some twenty more,
by `quickstart_sweep.py` and by hand.

Output: a line in ``--results`` for each run as it ends; a second call makes what is missing. Several calls beside each other
share the work. At the end a table, and one JSON object.

Limits: one small model on one thread. A busy machine makes all steps slower and so gives fewer of them, to each alike.
Not the budget of the quick start itself, which is 290 s of processor time: ``--cpu-seconds 290`` is.

    OMP_NUM_THREADS=1 python benchmarks/peers/quality.py --results quality.jsonl
"""

import argparse
import fcntl
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import turns

NANO = {"layers": 4, "heads": 4, "dim": 192, "block": 256, "batch": 8, "dropout": 0.0, "lr": 1e-3, "beta2": 0.99}
SMALL = NANO | {"dim": 128, "block": 64, "batch": 12}
HF = {
    "model": "gpt2", "dim": 192, "layers": 4, "block": 256, "batch": 8, "dropout": 0.0, "lr": 3e-3, "schedule": "cosine",
    "weight_decay": 0.1,
}  # fmt: skip
LLAMA = HF | {"model": "llama"}
SWEPT: dict[str, dict[str, dict[str, Any]]] = {
    "titan": {
        "shipped": {},
        "lr 2e-3": {"--optimizer.lr": "2e-3"},
        "lr 6e-3": {"--optimizer.lr": "6e-3"},
        "cosine": {"--schedule.name": "cosine"},
        "batch 4": {"--train.global-batch": "4"},
        "adamw": {"--optimizer.name": "adamw"},
    },
    "nanogpt": {
        "documented": SMALL,
        "lr 4e-3": NANO | {"lr": 4e-3},
        "lr 2e-3": NANO | {"lr": 2e-3},
        "shape of ours, lr 3e-3": NANO | {"dim": 128, "block": 128, "lr": 3e-3},
        "lr 1e-3": NANO,
        "batch 4, lr 3e-3": NANO | {"batch": 4, "lr": 3e-3},
    },
    "hf": {
        "course": HF | {"block": 128, "batch": 16, "dropout": None, "lr": 5e-4},
        "llama, lr 4e-3": LLAMA | {"lr": 4e-3},
        "llama, lr 2e-3": LLAMA | {"lr": 2e-3},
        "shape of ours, lr 3e-3": LLAMA | {"dim": 128, "block": 128},
        "gpt2, lr 3e-3": HF,
        "llama, batch 4, lr 4e-3": LLAMA | {"batch": 4, "lr": 4e-3},
    },
}
DEFAULTS = (("titan", "shipped"), ("nanogpt", "documented"), ("hf", "course"), ("hf", "defaults"))
EVERY = {(peer, name): settings for peer, names in SWEPT.items() for name, settings in names.items()}
EVERY["hf", "defaults"] = HF | {"dropout": None, "schedule": None}
SKIP, TIMED = 1, 3
Key = tuple[str, str, int]


class Results:
    """The file of finished work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in map(json.loads, self.path.read_text().splitlines()) if row["kind"] == kind]

    def add(self, **row: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def runs(self) -> dict[Key, dict[str, Any]]:
        return {(row["peer"], row["name"], row["seed"]): row for row in self.rows("run")}

    def claim(self, name: str) -> Any:
        """An open file whose lock says that this process does the work, until it is closed; None if another has it."""
        file = self.path.with_suffix("." + name.replace(" ", "_").replace(",", "") + ".lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file


def best(runs: dict[Key, dict[str, Any]], peer: str) -> str | None:
    """The best of a peer's finished sweep."""
    found = {name: runs[peer, name, 0]["bits_per_byte"] for name in SWEPT[peer] if (peer, name, 0) in runs}
    return min(found, key=found.__getitem__) if len(found) == len(SWEPT[peer]) else None


def pending(results: Results, options: argparse.Namespace) -> Iterator[Key]:
    """What is to be done: the sweeps in turns, then each seed of ours and of the best, then of published defaults."""
    runs = results.runs()
    wanted: list[Key] = [(*one, seed) for seed in range(options.seeds) for one in options.only]
    if not wanted:
        in_turn = zip(*([(peer, name) for name in names] for peer, names in SWEPT.items()), strict=True)
        wanted = [(*one, 0) for group in in_turn for one in group]
        chosen = [(peer, name) for peer in SWEPT if (name := best(runs, peer)) is not None]
        for group in ([("titan", "shipped"), *chosen], DEFAULTS):
            wanted += [(*one, seed) for seed in range(options.seeds) for one in group]
    yield from (key for key in dict.fromkeys(wanted) if key not in runs)


def price(results: Results, corpus: Any, options: argparse.Namespace) -> dict[str, float]:
    """Processor time of a step by what it depends on: measured in turns, once for all processes."""
    from recipes import Recipe, train

    asked = [Recipe(one[0], EVERY[one]) for one in options.only or EVERY]
    by_cost = {recipe.cost: recipe for recipe in asked}
    while True:
        known = {row["cost"]: row["seconds"] for row in results.rows("cost")}
        if known.keys() >= by_cost.keys():
            return known
        if (claim := results.claim("costs")) is None:
            time.sleep(5)
            continue
        with claim:
            seconds: dict[str, list[float]] = {cost: [] for cost in by_cost}
            for turn in range(options.rounds):
                order = [*by_cost.items()]
                for cost, recipe in [*order[turn % len(order) :], *order[: turn % len(order)]]:
                    seconds[cost].append(train(recipe, corpus, SKIP + TIMED, 0, SKIP).cpu_s / TIMED)
            for cost, values in seconds.items():
                results.add(kind="cost", cost=cost, seconds=statistics.median(values), all=values)


def work(results: Results, options: argparse.Namespace) -> None:
    """Make what is missing and no other process makes."""
    import torch
    from recipes import Corpus, Recipe, train
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    corpus = Corpus()
    prices = price(results, corpus, options)
    while left := list(pending(results, options)):
        for peer, name, seed in left:
            if (claim := results.claim(f"{peer}-{name}-{seed}")) is None:
                continue
            with claim:
                if (peer, name, seed) in results.runs():
                    break
                recipe = Recipe(peer, EVERY[peer, name])
                steps = max(10, round(options.cpu_seconds / prices[recipe.cost]))
                trained = train(recipe, corpus, steps, seed)
                results.add(
                    kind="run", cpu_seconds=options.cpu_seconds, peer=peer, name=name, seed=seed, steps=steps,
                    tokens=steps * trained.tokens, parameters=trained.parameters,
                    cpu_s=round(trained.cpu_s, 1), **corpus.score(trained.logits),
                    load=round(os.getloadavg()[0], 1),
                )  # fmt: skip
            break
        else:
            time.sleep(5)


def show(results: Results, options: argparse.Namespace) -> None:
    """Print sweeps, seeds and one JSON object."""
    runs = results.runs()
    print(f"{'one seed':34} {'parameters':>10} {'steps':>6} {'tokens':>8} {'CPU s':>6}  bits per byte")
    for (peer, name, _), row in sorted(runs.items()):
        if row["seed"] == 0:
            figures = f"{row['parameters']:>10} {row['steps']:>6} {row['tokens']:>8} {row['cpu_s']:>6}"
            print(f"{peer + ' ' + name:34} {figures}  {row['bits_per_byte']:.4f}")
    chosen = [(peer, name) for peer in SWEPT if (name := best(runs, peer)) is not None]
    print(f"\n{'seeds':34} {'median':>8}  each")
    medians = {}
    for peer, name in dict.fromkeys([*DEFAULTS, *chosen]):
        each = [row["bits_per_byte"] for key, row in sorted(runs.items()) if key[:2] == (peer, name)]
        if each:
            label = f"{peer} {name}" + (" (best of its sweep)" if (peer, name) in chosen else "")
            medians[label] = statistics.median(each)
            print(f"{label:34} {medians[label]:8.4f}  {' '.join(f'{value:.4f}' for value in each)}")
    load = os.getloadavg()[0]
    options.busy = load > turns.MOST_LOAD
    rows = {"medians": medians, "runs": list(runs.values()), "costs": results.rows("cost")}
    print(json.dumps({"benchmark": "peers_quality", **rows, **turns.environment(options, load)}, default=str))


def main() -> None:
    """Run the command."""
    turns.with_peers("transformers", "accelerate")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=Path("quality.jsonl"), help="finished work, one JSON object a line"
    )
    parser.add_argument("--cpu-seconds", type=float, default=60.0, help="processor time of each training")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="turns in which a step is timed")
    parser.add_argument(
        "--only", nargs="+", default=[], type=lambda words: tuple(words.split(" ", 1)), metavar="PEER NAME",
        help="no sweep: every seed of these, such as 'titan shipped' 'nanogpt documented'",
    )  # fmt: skip
    parser.add_argument("--show", action="store_true", help="print what is finished, and train nothing")
    options = parser.parse_args()
    if unknown := [one for one in options.only if one not in EVERY]:
        parser.error(f"--only {' '.join(unknown[0])!r}: there are {', '.join(map(' '.join, EVERY))}.")
    results = Results(options.results)
    if others := {row["cpu_seconds"] for row in results.rows("run")} - {options.cpu_seconds}:
        parser.error(f"{options.results} has runs of {others.pop()} CPU seconds; name another file, or that budget.")
    if not options.show:
        work(results, options)
    show(results, options)


if __name__ == "__main__":
    main()
