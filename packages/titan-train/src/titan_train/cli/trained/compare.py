"""Compare runs: their curves over each other, their numbers, and the settings that differ."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="folders of 2 to 8 runs")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="page to write (default: compare.html)")
    arguments = parser.parse_args(words)

    from titan_train.report import compare_runs

    print(compare_runs(arguments.run_dirs, arguments.out))
    print(f"\npage     {arguments.out}")
    return 0
