"""What `run` refuses before its ranks start, `check` refuses in the same words: each of these has one mistake."""

import shlex

import pytest
from titan_train.cli import main
from titan_train.launch.place.here import LocalLauncher
from titan_train.launch.supervise.supervisor import Supervisor
from titan_train.launch.validate import validate

TOML = """
[model]
name = "llama3_debug"
seq_len = 32
[tokenizer]
kind = "bytes"
[data]
cache_dir = "cache"
[[data.sources]]
name = "a"
kind = "text"
paths = ["text.txt"]
[train]
global_batch = 4
[launch]
device = "cpu"
nproc = 2
"""
BROKEN = [
    """--data.sources '[{name="a", kind="text", paths=["missing/*.txt"]}]'""",
    """--data.sources '[{name="a", kind="text", paths=["empty/*.txt"]}]'""",
    """--data.sources '[{name="a", kind="jsonl", paths=["none.jsonl"]}]'""",
    """--data.sources '[]'""",
    "--tokenizer.kind hf --tokenizer.path nowhere",
    "--tokenizer.kind tiktoken --tokenizer.path nowhere",
    "--tokenizer.kind sentencepiece --tokenizer.path text.txt",
    "--tokenizer.chat_template none.jinja",
    "--model.init hf:nowhere",
    "--model.init run:nowhere",
    "--model.init run:nowhere@5",
    "--model.name hf:nowhere",
    "--model.name nowhere:build",
    "--model.name lama3_debug",
    "--model.args.dims 64",
    "--model.args.num_heads 7",
    "--model.args.vocab_size 100",
    "--from nowhere@10",
    "--from nowhere --decay 10%",
    "--decay 10%",
    "--checkpoint.keep_best true",
    "--validation.patience 3",
    "--parallel.ep 2",
    "--parallel.pp 2 --pipeline.schedule none.txt",
    "--train.global_batch 3",
    "--train.microbatch 3",
    "--schedule.warmup_steps 900 --schedule.decay_steps 900",
    "--train.freeze nothing_has_this_name",
    "--optimizer.lr_scales '{nothing_has_this_name = 0.5}'",
    "--run.dir text.txt",
    "--data.cache_dir text.txt/cache",
    "--launch.elastic true --launch.min_ranks 9",
    # on one rank, without a module
    "--launch.nproc 1 --model.args.num_heads 7",
    "--launch.nproc 1 --model.args.vocab_size 100",
    "--launch.nproc 1 --schedule.warmup_steps 900 --schedule.decay_steps 900",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a line\n" * 99)
    (tmp_path / "c.toml").write_text(TOML)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)

    def in_this_process(_launcher, config, world_size):
        validate(config, world_size)

    def started(_supervisor):
        raise AssertionError("ranks would have been started")

    monkeypatch.setattr(LocalLauncher, "validate", in_this_process)
    monkeypatch.setattr(Supervisor, "run", started)
    return tmp_path


@pytest.mark.parametrize("settings", BROKEN)
def test_check_says_what_run_would_say(folder, settings, capsys):
    before = sorted(folder.rglob("*"))
    said: list[str] = []
    for command in ("check", "run"):
        assert main([command, "c.toml", *shlex.split(settings)]) == 2, (command, capsys.readouterr().err)
        said.append(capsys.readouterr().err)
    assert said[0].startswith("error: ")
    assert said[0].replace("titan-train check", "titan-train run") == said[1]
    assert sorted(folder.rglob("*")) == before


def test_on_paper_what_is_not_here_yet_is_named_and_left_out(folder, capsys):
    absent = ["--data.sources", '[{name="a", kind="text", paths=["missing/*.txt"]}]', "--model.init", "hf:nowhere"]
    assert main(["check", "c.toml", *absent, "--paper"]) == 0
    said = capsys.readouterr().out
    assert "valid on paper. What is not here yet" in said
    assert "missing/*.txt" in said
    assert "model.init='hf:nowhere' is not here" in said
    assert main(["check", "c.toml", "--tokenizer.kind", "hf", "--tokenizer.path", "nowhere", "--paper"]) == 0
    assert main(["check", "c.toml", "--parallel.ep", "2", "--paper"]) == 2  # what is here is checked
    assert main(["check", "llama3_405b", "--parallel", "pp8 dp8 tp8"]) == 0
    said = capsys.readouterr().out
    assert "valid on paper" in said
    assert " EFLOP per step" in said
