"""Fit the planner's constants to your own runs of one machine.

`titan-train plan calibrate runs/a runs/b runs/c --hardware my.toml --out constants.toml`, then `titan-train check
CONFIG --hardware my.toml --constants constants.toml`. With three runs or more, each is also predicted from the others.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, of one machine and one stack")
    parser.add_argument("--hardware", default="cpu", help="shipped machine, or a hardware file")
    parser.add_argument("--out", type=Path, default=Path("constants.toml"), help="file to write")
    arguments = parser.parse_args(words)

    from titan_train.planner.calibrate.runs import RUN_CONSTANTS, calibrate, held_out, read_run, save_constants
    from titan_train.planner.hardware.machine import load_machine

    machine = load_machine(arguments.hardware)
    rows = [read_run(folder, machine) for folder in arguments.runs]
    found = calibrate(rows)
    blind = held_out(rows) if len(rows) > 2 else [None] * len(rows)
    print(f"{'predicted / measured':>44} {'prior':>8} {'fitted':>8} {'from the others':>16}")
    for row, before, after, other in zip(rows, found.before, found.after, blind, strict=True):
        last = f"{other:16.2f}" if other is not None else f"{'':16}"
        print(f"{Path(row.source).name:<20} {row.setup.describe()[:40]:<40} {before:8.2f} {after:8.2f} {last}")
    print("constants " + ", ".join(f"{name} {getattr(found.constants, name):.4g}" for name in RUN_CONSTANTS))
    save_constants(found.constants, arguments.out)
    print(f"written to {arguments.out}")
    return 0
