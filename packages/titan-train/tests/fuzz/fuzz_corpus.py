"""What the fuzzer trains on: documents of very different lengths, many of one token and its end."""

import random
from pathlib import Path

import composition
from titan_train.config import parse_config
from titan_train.inputs import prepare_inputs


def prepare(folder) -> None:
    """Write and tokenize the corpus once."""
    texts = Path(folder) / "texts"
    texts.mkdir()
    rng = random.Random(0)
    for i in range(400):
        length = rng.choice((1, 1, 2, 7, 16, 31, 40, 120))
        (texts / f"{i:03}.txt").write_text("".join(rng.choice("abcdefgh (),=+\n") for _ in range(length)))
    prepare_inputs(parse_config(composition.tree(folder, "prepare", {})), quiet=True)
