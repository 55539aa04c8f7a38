"""`titan-train data show`: what is learned is told apart from what is not, and odd characters do no harm."""

import json
import subprocess
import sys

import pytest
from rich.console import Console
from titan_train.cli import main
from titan_train.cli.data import shown
from titan_train.config import parse_config
from titan_train.inputs import open_inputs, prepare_inputs

TALK = [
    {"role": "user", "content": "Hi [b]\x1b[31m"},
    {"role": "assistant", "content": "Hello é"},
]


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    return {
        "model": {"name": "llama3_debug", "seq_len": 64},
        "tokenizer": {"kind": "bytes", "chat_template": "plain"},
        "data": {
            "cache_dir": str(tmp_path / "cache"),
            "validation_fraction": 0.0,
            "sources": [
                {"name": "a", "kind": "jsonl", "paths": [str(tmp_path / "a.jsonl")], "messages_key": "messages"}
            ],
        },
    }


def test_what_is_not_learned_is_dim_on_a_terminal_and_in_brackets_elsewhere(tree, capsys):
    config = parse_config(tree)
    prepare_inputs(config, quiet=True)
    inputs = open_inputs(config)
    console = Console(force_terminal=True, color_system="standard", width=200, highlight=False)
    with console.capture() as captured:
        for line in shown(inputs, 0, marks=False):
            console.print(line)
    assert "\x1b[2mUser: Hi [b]\\x1b[31m\x1b[0m\n\x1b[2mAssistant: \x1b[0mHello é<eos>" in captured.get()
    plain = "\n".join(line.plain for line in shown(inputs, 0, marks=True))
    assert "sample 0 of 'a': 64 tokens, 9 labels (14%), 2 documents" in plain
    assert "[[User: Hi [b]\\x1b[31m\nAssistant: ]]Hello é<eos>[[\n]]" in plain
    assert "[[<pad> x " in plain
    assert "\x1b[31m" not in captured.get()


def test_the_command_prepares_and_shows(tree, tmp_path, capsys):
    lines = [
        "[model]", 'name = "llama3_debug"', "seq_len = 64", "[tokenizer]", 'kind = "bytes"', 'chat_template = "plain"', "[data]",
        f'cache_dir = "{tmp_path / "cache"}"', "[[data.sources]]", 'name = "a"', 'kind = "jsonl"',
        f'paths = ["{tmp_path / "a.jsonl"}"]', 'messages_key = "messages"',
    ]  # fmt: skip
    (tmp_path / "c.toml").write_text("\n".join(lines))
    assert main(["data", "show", str(tmp_path / "c.toml"), "--samples", "1", "--data.validation_fraction", "0"]) == 0
    assert "Hello é<eos>" in capsys.readouterr().out
    assert main(["data", "list", str(tmp_path / "c.toml")]) == 2
    assert "unknown command 'data list'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vlm_shapes", "flux_shapes"])
def test_samples_of_another_task_are_refused(name, tmp_path, capsys):
    assert main(["data", "show", name, "--data.cache_dir", str(tmp_path / "cache")]) == 2
    assert "data show is for text" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_the_command_loads_no_torch(tmp_path, tree):
    code = (
        "import sys; from titan_train.cli import main; main(['data', 'show', 'debug', '--samples', '1', "
        f"'--data.cache_dir', {str(tmp_path / 'cache')!r}]); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "sample 0 of 'stdlib': 64 tokens" in done.stdout
