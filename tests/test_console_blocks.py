"""Every command in a console block of a README, guide or example is run as typed, or read by its own parser.

One rule, `kind_of`, decides:

- ``foreign``: another program, one of `FOREIGN`, which installs, builds or needs a cluster.
- ``run``: titan-train on a run's folder that `sandbox` has, or without one; and the commands of leaves. Run as typed.
- ``train``: `titan-train run` of a small configuration, or a command on the folder that such a run of the page leaves. Run
  with ``--slow``, with fewer steps.
- ``parse``: the rest needs GPUs, machines, a network or what the reader has. The command's own parser reads it, its
  configuration is loaded with its settings, and its layout on the ranks that it names is planned.
"""

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from PIL import Image
from test_readmes import READMES, ROOT, RUN_BY
from titan_train.cli import COMMANDS, load_command, main
from titan_train.cli.parser import CommandParser
from titan_train.config import list_configs, load_config, parse_config
from titan_train.inputs import prepare_inputs
from titan_train.parallel.layout.run import plan_run
from titan_train.train import Trainer

FOREIGN = ("pytest", "uv", "uvx", "pip", "docker", "ray", "sbatch", "cmake", "jupyter", "build/generate")
LEAVES = ("titan-ckpt", "titan-cp", "titan-mesh", "titan-pipeline")
SMALL = ("quickstart", "debug", "flux_shapes", "vlm_shapes")
"""Shipped configurations that two CPU ranks train in minutes."""


def commands_of(page):
    """The commands of a page's console blocks, as words; ``program -m package`` is that package's command."""
    for language, block in re.findall(
        r"^```(bash|sh|console)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S
    ):
        text = re.sub(r"\[--[^\]]*\]", "", block.replace("\\\n", " "))
        lines = (
            [line[2:] for line in text.splitlines() if line.startswith("$ ")]
            if language == "console"
            else text.splitlines()
        )
        for line in lines:
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield command_of(words[:end])
                words = words[end + 1 :]


def command_of(words):
    words = words[2:] if words[:2] == ["uv", "run"] and not words[2].startswith("-") else words
    if words[0] in ("python", "torchrun") and "-m" in words:
        words = words[words.index("-m") + 1 :]
        words = [words[0].replace("_", "-"), *words[1:]]
    return [words[0].removeprefix(".venv/bin/"), *("debug" if word == "CONFIG" else word for word in words[1:])]


def name_of(words):
    """The command of titan-train: its first word, or two."""
    if words[1] == "help":
        return "help"
    return next(name for n in (2, 1) if (name := " ".join(words[1 : n + 1])) in COMMANDS)


def is_small(words, page):
    """Whether `titan-train run` of this configuration ends in minutes on this machine."""
    here = words[2] in SMALL or (page.parent / words[2]).is_file()
    return here and not {"--launcher", "--launch.nnodes"} & {word.partition("=")[0] for word in words}


def trained_by(page):
    """The folders of the small runs of a page."""
    for words in commands_of(page):
        if words[1:2] == ["run"] and is_small(words, page):
            name = words[words.index("--run.name") + 1] if "--run.name" in words else Path(words[2]).stem
            yield f"runs/{name}"


def kind_of(words, page, folder):
    if words[0] in FOREIGN:
        return "foreign"
    if words[0] in LEAVES:
        return "parse" if words[0] == "titan-ckpt" else "run"
    name = name_of(words)
    runs = {word for word in words if re.fullmatch(r"runs/\w+", word)}
    if name == "run":
        return "train" if is_small(words, page) else "parse"
    if name in ("serve", "data download", "export", "plan calibrate") or {"--web", "--tasks"} & set(words):
        return "parse"  # export's guide is run by test_guide.py of titan-train
    if runs:
        if all((folder / run).exists() for run in runs):
            return "run"
        return "train" if runs <= set(trained_by(page)) and "--image" not in words else "parse"
    asks_for_a_folder = name in ("generate", "eval", "report", "watch")
    return "parse" if asks_for_a_folder else "run"


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """What a reader has: finished runs, configurations of their own, a corpus."""
    folder = tmp_path_factory.mktemp("sandbox")
    text = "".join(f"def f{i % 9}(x):\n    return x + {i}\n" for i in range(900))
    (folder / "corpus").mkdir()
    lines = f'{{"text": {text!r}}}\n'.replace("'", '"') * 40
    (folder / "corpus" / "text.jsonl").write_text(lines)
    library = sorted(Path(os.__file__).parent.glob("*.py"))[:80]  # enough words for a vocabulary of the default size
    lines = "".join(json.dumps({"text": file.read_text(encoding="utf-8")}) + "\n" for file in library)
    (folder / "corpus" / "library.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    Image.new("RGB", (64, 64), "grey").save(folder / "shapes.png")
    (folder / "README.md").write_text(text[:500])
    for name in ("my", "mine", "run"):
        (folder / f"{name}.toml").write_text('extends = "debug"\n[train]\nglobal_batch = 64\n')
    source = {"name": "a", "kind": "text", "paths": [str(folder / "README.md")]}
    tree = {
        "run": {"dir": str(folder / "runs"), "name": "quickstart"},
        "model": {"name": "llama3_debug", "seq_len": 32},
        "tokenizer": {"kind": "bytes"},
        "data": {"cache_dir": str(folder / "cache"), "sources": [source]},
        "train": {"steps": 6, "global_batch": 4},
        "launch": {"device": "cpu"},
        "metrics": {"progress": "off", "split_every": 2, "report": False},
    }
    config = parse_config(tree)
    prepare_inputs(config, quiet=True)
    with Trainer(config) as trainer:
        trainer.fit()
    for name in ("wide", "a", "b"):
        shutil.copytree(folder / "runs" / "quickstart", folder / "runs" / name)
    return folder


def in_sandbox(page, sandbox, tmp_path):
    """The folder that a page's commands are typed in."""
    if page.is_relative_to(ROOT / "examples"):
        shutil.copytree(page.parent, tmp_path, dirs_exist_ok=True)
    for source in sandbox.iterdir():
        if source.name not in ("runs", "cache") and not (tmp_path / source.name).exists():
            (tmp_path / source.name).symlink_to(source)
    shutil.copytree(sandbox / "runs", tmp_path / "runs")
    return tmp_path


@pytest.mark.parametrize(
    "page", [p for p in READMES if any(commands_of(p))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_command_is_run_as_typed_or_parsed(page, sandbox, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(in_sandbox(page, sandbox, tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(sandbox / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # --code adds to it
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    for words in commands_of(page):
        kind = kind_of(words, page, sandbox)
        if str(page.relative_to(ROOT)) in RUN_BY or kind == "foreign":
            continue
        typed = shlex.join(words)
        try:
            code = run_here(words) if kind == "run" else parse(words)
        except SystemExit as exited:
            code = exited.code
        assert code == 0, f"{typed}: {capsys.readouterr().err}"


def as_a_shell(words, folder):
    """The words with the names of the files that a pattern matches; with the pattern where there is none."""
    found = [sorted(folder.glob(word)) if "*" in word else [] for word in words]
    return [part for word, files in zip(words, found, strict=True) for part in ([*map(str, files)] or [word])]


def run_here(words):
    words = as_a_shell(words, Path())
    if words[0] == "titan-train":
        return main(words[1:])
    return importlib.import_module(words[0].replace("-", "_") + ".cli").main(words[1:])


class Parsed(CommandParser):
    """Reads the words as the command does, and stops before the command does anything."""

    class Done(Exception):
        """All words were read."""

    reads_settings = False

    def parse_with_settings(self, words, written_out=str):
        self.reads_settings = True
        arguments, settings = super().parse_with_settings(words, written_out)
        config = self.read_config(arguments.config, settings)
        per_node = max(config.launch.nproc or 2, config.parallel.num_ranks // config.launch.nnodes)
        plan_run(config, per_node * config.launch.nnodes)
        raise self.Done

    def parse_args(self, *words, **named):
        found = super().parse_args(*words, **named)
        if self.reads_settings:
            return found
        raise self.Done

    def parse_intermixed_args(self, *words, **named):
        super().parse_intermixed_args(*words, **named)
        raise self.Done


def parse(words):
    if words[0] == "titan-ckpt":
        assert isinstance(importlib.import_module("titan_ckpt.cli")._parser().parse_args(words[1:]), argparse.Namespace)
        return 0
    name = name_of(words)
    with pytest.raises(Parsed.Done):
        load_command(name)[0](Parsed(f"titan-train {name}", None), words[1 + len(name.split()) :])
    return 0


TRAINING = [
    page for page in READMES if any(words[1:2] == ["run"] and is_small(words, page) for words in commands_of(page))
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TRAINING, ids=lambda page: str(page.relative_to(ROOT)))
def test_small_runs_train_as_typed_with_fewer_steps(page, sandbox, tmp_path):
    in_sandbox(page, sandbox, tmp_path)
    shutil.rmtree(tmp_path / "runs")
    for words in commands_of(page):
        kind = kind_of(words, page, tmp_path)
        if words[0] != "titan-train" or kind not in ("train", "run") or name_of(words) in ("plan", "check"):
            continue
        if name_of(words) == "run":
            words = [*words, "--train.steps", "48" if "--faults" in words else "14"]
        done = subprocess.run(
            [sys.executable, "-m", "titan_train", *as_a_shell(words[1:], tmp_path)],
            cwd=tmp_path, capture_output=True, text=True, timeout=800,
            env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(sandbox / "cache")},
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"


def test_the_rule_knows_every_kind(sandbox):
    found = {(kind_of(words, page, sandbox), words[0]) for page in READMES for words in commands_of(page)}
    assert {kind for kind, _ in found} == {"foreign", "run", "train", "parse"}
    assert {program for kind, program in found if kind != "foreign"} == {"titan-train", *LEAVES}
    assert set(SMALL) <= set(list_configs())
    assert load_config("quickstart").launch.nnodes == 1
