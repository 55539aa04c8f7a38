"""Train the tokenizer and tokenize the corpus of a configuration ahead of a run.

`titan-train run` does this by itself when it has to; do it here to use a machine without GPUs for it.
"""

import argparse
from collections.abc import Sequence

from titan_train.config import load_config


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = "titan-train prepare CONFIG [--section.key value ...]"
    parser.add_argument("config", metavar="CONFIG", help="TOML file, or name of a shipped configuration")
    arguments, _ = parser.parse_known_args(words[:1])
    config = load_config(arguments.config, words[1:])

    from titan_train.data import prepare_command

    prepare_command(config.data, config.tokenizer)
    return 0
