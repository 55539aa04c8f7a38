"""Chats under every layout: the loss counts the answers of all ranks, as one process counts them."""

import json
from pathlib import Path

import composition
import pytest
from composition_check import compare, failures
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.inputs import open_inputs, prepare_inputs

LAYOUTS = {
    "fsdp2": (2, {}, {"train": {"microbatch": 1}}),
    "tp2+sp": (2, {"tp": 2}, {}),
    "cp2": (2, {"cp": 2}, {}),
    "pp2": (2, {"pp": 2}, {"train": {"microbatch": 1}, "pipeline": {"schedule": "1f1b"}}),
    "fsdp4": (4, {}, {}),
    "fsdp2 tp2": (4, {"tp": 2}, {}),
    "fsdp2 cp2": (4, {"cp": 2}, {"train": {"microbatch": 2}}),
    "pp2 tp2": (4, {"pp": 2, "tp": 2}, {"train": {"microbatch": 2}, "pipeline": {"schedule": "1f1b"}}),
    "pp2 fsdp2": (4, {"pp": 2}, {"train": {"microbatch": 1}, "pipeline": {"schedule": "interleaved_1f1b"}}),
}
DEFAULT = ("cp2", "fsdp4", "pp2 tp2")


def sections(folder, parallel=None, more=None):
    source = {
        "name": "chats",
        "kind": "jsonl",
        "paths": [str(Path(folder) / "chats.jsonl")],
        "messages_key": "messages",
    }
    base = {
        "model": {"name": "llama3_debug", "seq_len": 96, "args": {"num_layers": 4, "num_kv_heads": 4}},
        "tokenizer": {"kind": "bytes", "chat_template": "plain"},
        "data": {"sources": [source], "cache_dir": str(Path(folder) / "chats"), "validation_fraction": 0.2},
        "parallel": parallel or {},
    }
    return base | (more or {})


@pytest.fixture(scope="module")
def chats(folder):
    """Answers from 1 to 40 characters: rows and ranks have very different numbers of labels."""
    talks = [
        [
            {"role": "user", "content": "?" * (1 + i * 7 % 20)},
            {"role": "assistant", "content": f"{i} " * (1 + i * i % 13)},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "no" * (i % 3)},
        ]
        for i in range(90)
    ]
    (Path(folder) / "chats.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in talks))
    config = parse_config(composition.tree(folder, "prepare", sections(folder)))
    prepare_inputs(config, quiet=True)
    rows = open_inputs(config).train.rows(range(8))
    labels = [int(row.learned[1:].sum()) for row in rows]
    assert max(labels) > 1.5 * min(labels), labels  # else a mean of means would pass
    return folder


@pytest.fixture(scope="module")
def single(chats):
    return run_ranks(composition.run, 1, chats, "single", sections(chats), init=False)[0]


@pytest.mark.parametrize("layout", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_losses_and_gradients_on_chats_equal_those_of_one_process(chats, single, layout):
    ranks, parallel, more = LAYOUTS[layout]
    results = run_ranks(composition.run, ranks, chats, "ranks", sections(chats, parallel, more), timeout_s=150)
    errors = compare(single, results)
    assert not failures(errors, float8=False), errors
