"""Show the shipped configurations (`titan-train run NAME`) and models (`model.name = "NAME"`)."""

import argparse
from collections.abc import Sequence

from titan_train.config import list_configs


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.parse_args(words)

    from titan_train.models import list_models

    print("configurations: " + ", ".join(list_configs()))
    print("models:         " + ", ".join(list_models()))
    return 0
