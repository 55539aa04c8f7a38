"""Every input that cannot work ends in one message, exit code 1 or 2, and a folder that is as it was before."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from malformed_cases import TEXT, all_cases
from strangers_cases import readable
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.inputs import prepare_inputs
from titan_train.train import Trainer

CASES = all_cases()
GROUPS = list(dict.fromkeys(name.rpartition(" ")[0] for name in CASES))
SAMPLE = set(list(CASES)[::8])
# Every eighth in the default run; the others with --slow.
EACH = [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
# Most take a tenth of a second; `run` imports torch in a process of its own first, and a busy machine is slow.
SECONDS = 170.0


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """A finished run, made once."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "text.txt").write_text(TEXT["text.txt"])
    (folder / "tiny.toml").write_text(
        f'[model]\nname = "llama3_debug"\nseq_len = 32\n[tokenizer]\nkind = "bytes"\n[data]\ncache_dir = "{folder}/cache"\n'
        f'[[data.sources]]\nname = "text"\nkind = "text"\npaths = ["{folder}/text.txt"]\n[run]\ndir = "{folder}/runs"\n'
        '[train]\nsteps = 2\nglobal_batch = 4\n[launch]\ndevice = "cpu"\n[metrics]\nprogress = "off"\n'
    )
    config = load_config(str(folder / "tiny.toml"))
    prepare_inputs(config, quiet=True)
    with Trainer(config) as trainer:
        trainer.fit()
    return folder / "runs" / "tiny"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """No server answers a download; the hub's library reads its environment when it is imported."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    if find_spec("huggingface_hub") is not None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")


def write(folder, name, content):
    """Write one file of a case; ``*`` in its name is the only folder there."""
    path = folder / name
    if "*" in name:
        before, _, after = name.partition("/*/")
        (only,) = (folder / before).iterdir()
        path = only / after
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def contents(folder):
    """Every file by its hash. Locks and empty caches are no content, and what was prepared before a refusal is none lost."""
    skipped = ("cache",)
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.relative_to(folder).parts[0] not in skipped
    }


@contextlib.contextmanager
def at_most(seconds):
    """Fail what takes longer."""

    def ring(*_):
        raise AssertionError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(int(seconds))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problem(words, files, folder, good_run, monkeypatch, capfd) -> str:
    """What is wrong about how an input that cannot work ends; empty if nothing is."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    if "RUN" in words or any(file.startswith("RUN/") for file in files):
        shutil.copytree(good_run, folder / "RUN")
    for file, content in files.items():
        write(folder, file, content)
    before = contents(folder)
    capfd.readouterr()
    with at_most(SECONDS):
        code = main(words)
    err = capfd.readouterr().err
    unwanted = [word for word in ("Traceback", "defect of titan-train", "panicked") if word in err]
    if code not in (1, 2) or unwanted or sum(line.startswith("error: ") for line in err.splitlines()) > 1:
        return f"{words} gave {code} and printed {err}"
    return "" if contents(folder) == before else f"{words} changed the folder"


@pytest.mark.parametrize("others", EACH, ids=["sample", "others"])
@pytest.mark.parametrize("group", GROUPS)
def test_an_input_that_cannot_work_is_one_message_and_changes_nothing(
    group, others, good_run, tmp_path, monkeypatch, capfd
):
    names = [name for name in CASES if name.rpartition(" ")[0] == group and (name in SAMPLE) != others]
    found = {
        name: problem(*CASES[name], tmp_path / str(number), good_run, monkeypatch, capfd)
        for number, name in enumerate(names)
    }
    assert not {name: words for name, words in found.items() if words}


def test_there_are_a_thousand_of_them():
    assert len(CASES) >= 1000


@pytest.mark.parametrize("others", EACH, ids=["sample", "others"])
def test_a_run_s_records_may_be_anything_and_what_can_be_shown_is(others, good_run, tmp_path, monkeypatch, capfd):
    for number, (words, files) in enumerate(readable()):
        if (number % 8 == 0) == others:
            continue
        folder = tmp_path / str(number)
        shutil.copytree(good_run, folder / "RUN")
        monkeypatch.chdir(folder)
        for file, content in files.items():
            write(folder, file, content)
        with at_most(SECONDS):
            code = main(words)
        err = capfd.readouterr().err
        assert code == 0, (number, words, err)
        assert "Traceback" not in err, (number, words)


def test_ctrl_c_while_preparing_is_one_word_and_the_next_time_goes_on(tmp_path):
    line = '{"text": "' + "some words of a document " * 40 + '"}\n'
    (tmp_path / "a.jsonl").write_text(line * 40_000)
    (tmp_path / "c.toml").write_text(
        '[tokenizer]\nkind = "bytes"\n[data]\ncache_dir = "cache"\nshard_tokens = 200000\n[[data.sources]]\nname = "a"\n'
        'kind = "jsonl"\npaths = ["a.jsonl"]\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_train", "data", "prepare", "c.toml"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"COLUMNS": "100"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it otherwise
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(Path(tmp_path, "cache").glob("a-*/progress.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.count("error: interrupted") == 1
    assert "Traceback" not in err
    assert not list(Path(tmp_path, "cache").glob("a-*/manifest.json"))
