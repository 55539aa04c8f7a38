"""Write a run's report, one self-contained HTML page, and print a summary."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/quickstart")
    parser.add_argument("--out", type=Path, default=None, help="where to write it (default: RUN_DIR/report.html)")
    arguments = parser.parse_args(words)

    from titan_train.report import build_report, summarize
    from titan_train.report.folder import read_folder
    from titan_train.run_folder import read_config

    read_config(arguments.run_dir)  # says so if this is not a run's folder
    folder = read_folder(arguments.run_dir)
    page = build_report(folder, arguments.out)
    print(summarize(folder))
    print(f"report   {page}")
    return 0
