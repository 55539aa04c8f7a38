"""What the fuzzer trains on: documents of very different lengths, many of one token and its end; and folders of transformers.

What it validates on is another text, with other documents and characters of two bytes.
"""

import atexit
import functools
import random
import tempfile
from pathlib import Path

import composition
import hf_folders
from titan_train import use_code
from titan_train.config import parse_config
from titan_train.inputs import prepare_inputs

use_code(["dropping"])

UNPLANNED = ("gpt2", "bloom", "opt", "biogpt", "gptj", "doge")
"""Families without a plan: what the checks before a run refuse of them, such as documents that see each other, is drawn again."""
_NO_DROPOUT = (
    "dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "residual_dropout", "embedding_dropout", "attention_probs_dropout_prob", "layerdrop",
)  # fmt: skip


def other_text(folder) -> dict:
    """The configuration's table of data for the text that is only validated on."""
    source = {"name": "other", "kind": "text", "paths": [str(Path(folder) / "other" / "*.txt")]}
    return {"data": {"validation_sources": [source], "validation_fraction": 0.0}}


def resolve(sections: dict) -> dict:
    """The configuration with ``hf:@KIND`` replaced by a folder that transformers has written of such a model."""
    model = sections["model"]
    if not model["name"].startswith("hf:@"):
        return sections
    folder = f"hf:{_published(model['name'].removeprefix('hf:@'))}"
    return sections | {"model": model | {name: folder for name in ("name", "init") if model.get(name)}}


@functools.cache
def _published(kind: str) -> str:
    target = Path(_folders()) / kind
    if kind in hf_folders.FOLDERS:
        return str(hf_folders.make(target, kind, vocab_size=264))
    from transformers import CONFIG_MAPPING

    hf_folders.FOLDERS[kind] = {name: 0.0 for name in _NO_DROPOUT if hasattr(CONFIG_MAPPING[kind](), name)}
    return str(hf_folders.make(target, kind, vocab_size=264))


@functools.cache
def _folders() -> str:
    folder = tempfile.TemporaryDirectory(prefix="titan-fuzz-")
    atexit.register(folder.cleanup)
    return folder.name


def prepare(folder) -> None:
    """Write and tokenize the corpus once."""
    texts = Path(folder) / "texts"
    texts.mkdir()
    rng = random.Random(0)
    for i in range(400):
        length = rng.choice((1, 1, 2, 7, 16, 31, 40, 120))
        (texts / f"{i:03}.txt").write_text("".join(rng.choice("abcdefgh (),=+\n") for _ in range(length)))
    others = Path(folder) / "other"
    others.mkdir()
    for i in range(60):
        length = rng.choice((1, 3, 9, 60, 200))
        (others / f"{i:03}.txt").write_text("".join(rng.choice("αβγδ xyz.") for _ in range(length)), encoding="utf-8")
    prepare_inputs(parse_config(composition.tree(folder, "prepare", other_text(folder))), quiet=True)
