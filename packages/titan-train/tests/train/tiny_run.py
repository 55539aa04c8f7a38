"""A run of a few seconds on text that it brings, for tests of what a run measures and withstands."""

from pathlib import Path

from titan_train.config import parse_config
from titan_train.config.faults import parse_faults
from titan_train.launch.rank.inject import Injector
from titan_train.train.monitor import StepMonitor


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


class Injecting(StepMonitor):
    """Carries out a plan of faults, as a rank with a launcher does; ``slow_s`` is the time of a step that a fault slows."""

    def __init__(self, plan, rank, run_dir, slow_s=0.0):
        self.injector = Injector(parse_faults(plan), rank, run_dir)
        self.slow_s = slow_s

    def measured(self, meter):
        self.injector.delays = meter.timer.delays

    def before_data(self, step):
        self.injector.before_data(step)

    def before_step(self, step, parts):
        self.injector.before_step(step, parts, self.slow_s)

    def data_loaded(self, step, batches):
        return self.injector.data_loaded(step, batches)
