"""Prove what works for a model on this machine, and write a card of it.

`titan-train card hf:DIR --out cards/mine` makes a small model of the same kind as DIR describes (its `config.json`; no
weights are read), or as a shipped model such as `llama3_8b` does. It is compared with transformers: logits, every gradient,
packed documents, exported files, greedy text. Then it is trained under each layout and resumed, by the commands that the card
prints, and speed and memory of the whole model are predicted. Two to five minutes on two cores. Exit code 1 if anything
differs or fails; what is refused is said with the reason.

The folder gets `card.md`, `card.svg`, and `card.toml` with the small model in `small`, so that its commands can be typed again.
"""

import datetime
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from titan_train.cli.parser import CommandParser, integer
from titan_train.lazy import require


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument(
        "model", metavar="hf:DIR|NAME", help="a folder of Hugging Face, or a shipped model (titan-train list)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make; must not exist")
    parser.add_argument("--hardware", default="h100", metavar="NAME", help="machine of the prediction (default: h100)")
    parser.add_argument("--devices", type=integer(1, 10**6), default=8, metavar="N", help="its devices (default: 8)")
    arguments = parser.parse_args(words)
    out: Path = arguments.out
    if out.exists():
        raise ValueError(f"--out {out} exists. Name a folder that does not, so that no card is mixed with another.")

    transformers = require("transformers", extra="hf", purpose="titan-train card")
    from titan_train.card.make import make_card
    from titan_train.card.page import draw, page, verdict
    from titan_train.files import write_atomic

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = (
        f"{datetime.date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}, titan-train {version('titan-train')}"
    )
    command = shlex.join(["titan-train", "card", *words])
    with tempfile.TemporaryDirectory() as work:
        card = make_card(
            arguments.model, Path(work), machine=arguments.hardware, devices=arguments.devices, made=made, command=command,
            tell=lambda proof: print(f"{proof.name:24} {proof.result:8} {proof.figure}", flush=True),
        )  # fmt: skip
        shutil.copytree(Path(work) / "small", out / "small")
    write_atomic(out / "card.svg", draw(card))
    write_atomic(out / "card.toml", card.config)
    write_atomic(out / "card.md", page(card, "card.svg"))
    print(f"{verdict(card.proofs)}; written to {out / 'card.md'}")
    return int(any(proof.result in ("differs", "fails") for proof in card.proofs))
