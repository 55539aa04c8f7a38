"""Validation counts the bytes of the very labels that it scores."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tiny_run import tiny_run
from titan_testing import run_ranks
from titan_train.inputs import open_inputs, prepare_inputs
from titan_train.train import Trainer

TOKENIZERS = {
    "bytes": {"kind": "bytes"},
    "sentencepiece": {"kind": "sentencepiece", "vocab_size": 320},
}
LAYOUTS = {"one": (1, {}), "dp": (2, {}), "cp": (2, {"cp": 2}), "pp": (2, {"pp": 2}), "tp": (2, {"tp": 2})}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Training text in ASCII; held out are Greek, of two bytes a character, and conversations, half of which is masked."""
    folder = tmp_path_factory.mktemp("bits")
    words = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliet")
    lines = (f"{words[i % 10]} {words[i // 10 % 10]} {i} squared is {i * i}.\n" for i in range(1500))
    (folder / "text.txt").write_text("".join(lines))
    (folder / "other.txt").write_text("".join(f"ο αριθμός {i} είναι μεγάλος.\n" for i in range(400)))
    turns = [("user", "τι είναι αυτό; " * 4), ("assistant", "αριθμός 12")]
    talk = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (folder / "chats.jsonl").write_text((json.dumps(talk) + "\n") * 60)
    for kind in TOKENIZERS:
        for held_out in ("text", "chats"):
            prepare_inputs(configured(folder, kind, held_out), quiet=True)
    return folder


def configured(folder, kind, held_out, parallel=None):
    source = {"name": "held-out", "kind": "text", "paths": [str(Path(folder) / "other.txt")]}
    if held_out == "chats":
        source |= {"kind": "jsonl", "paths": [str(Path(folder) / "chats.jsonl")], "messages_key": "messages"}
    return tiny_run(
        folder,
        f"{kind}-{held_out}-{'-'.join(parallel or ['dp'])}",
        tokenizer=TOKENIZERS[kind] | {"chat_template": "plain"},
        data={"validation_sources": [source]},
        train={"steps": 2, "global_batch": 8},
        validation={"every": 2, "steps": 3},
        parallel=parallel or {},
    )


def validated(config):
    with Trainer(config) as trainer:
        trainer.fit()
        lines = (trainer.run_dir / "metrics.jsonl").read_text().splitlines()
    return next(line for line in map(json.loads, lines) if line["kind"] == "validation")


def counted(config):
    """Labels and bytes of the validation's 24 rows, label by label."""
    inputs = open_inputs(config)
    labels = inputs.validation.build_batch(np.arange(24), ignore_index=-100, samples_consumed=0).labels
    valid = [int(label) for label in labels.ravel() if label != -100]
    return len(valid), sum(len(inputs.tokenizer.token_bytes(label)) for label in valid)


@pytest.mark.parametrize("held_out", ["text", "chats"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_bits_per_byte_divide_by_the_bytes_of_the_scored_labels(kind, held_out, folder):
    config = configured(folder, kind, held_out)
    found = validated(config)
    tokens, num_bytes = counted(config)
    assert found["tokens"] == tokens
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * tokens / (math.log(2) * num_bytes), rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_counts_the_same_bytes(layout, folder):
    ranks, parallel = LAYOUTS[layout]
    config = configured(folder, "sentencepiece", "chats", parallel)
    tokens, num_bytes = counted(config)
    found = run_ranks(validated, ranks, config)[0]
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * tokens / (math.log(2) * num_bytes), rel=1e-6)
