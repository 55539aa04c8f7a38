"""A run of a few seconds on text that it brings, for tests of what a run measures and withstands."""

import contextlib
from pathlib import Path

from titan_train.config import parse_config
from titan_train.config.faults import parse_faults
from titan_train.launch.rank.inject import Injector
from titan_train.train.observer import Observer


def write_text(folder):
    """The text that `tiny_run` trains on."""
    (Path(folder) / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(2000)))


def tiny_run(folder, name="run", **sections):
    """The configuration of a tiny model on the text in ``folder``; ``sections`` override its tables."""
    folder = Path(folder)
    tree = {
        "run": {"dir": str(folder / "runs"), "name": name, "seed": 7},
        "model": {"name": "llama3_debug", "seq_len": 32},
        "tokenizer": {"kind": "bytes"},
        "data": {
            "sources": [{"name": "text", "kind": "text", "paths": [str(folder / "text.txt")]}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.0,
        },
        "train": {"steps": 12, "global_batch": 8},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"every": 0},
        "metrics": {"progress": "off", "split_every": 4},
        "launch": {"device": "cpu", "timeout_s": 60.0},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return parse_config(tree)


class Injecting(Observer):
    """Carries out a plan of faults, as a rank with a launcher does; ``slow_s`` is the time of a step that a fault slows."""

    def __init__(self, plan, rank, run_dir, slow_s=0.0):
        self.injector = Injector(parse_faults(plan), rank, run_dir)
        self.slow_s = slow_s

    def on_start(self, run):
        self.run = run
        self.injector.delays = run.timer.delays

    @contextlib.contextmanager
    def phase(self, name, step):
        if name == "data":
            self.injector.before_data(step)
        yield

    def on_batch(self, step, batches):
        batches[:] = self.injector.data_loaded(step, batches)
        self.injector.before_step(step, self.run.model.parts, self.slow_s)
