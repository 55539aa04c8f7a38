"""Nothing that a file holds commands the terminal that it is printed to."""

import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from titan_train.terminal import CleanStream, clean_console, printable

TITLE = "\x1b]0;evil\x07"
CLEAR = "\x1b[2J\x1b[H"
C1 = "\x9b2Jevil"
EVIL = f"before{TITLE}{CLEAR}{C1}\u202e\rafter"
# what rich writes by itself: colours, the cursor, lines that are drawn again
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*A|\x1b\[2K|\r\n|\r")


def shown_by(words, folder, *, own=True):
    """What a command writes to a terminal that it is alone with."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200"}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "titan_train", *words], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=theirs,
        stderr=theirs,
    ) as process:  # fmt: skip
        os.close(theirs)
        content = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            content += part
        process.wait(100)
    os.close(ours)
    text = content.decode(errors="replace")
    return OWN.sub("", text) if own else text


def assert_clean(text):
    assert TITLE not in text
    assert [c for c in text if not c.isprintable() and c not in "\n\t"] == []


@pytest.fixture
def run_dir(tmp_path):
    """A stranger's run folder, with sequences wherever a text may stand."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text('[run]\nname = "a"\n')
    lines = [
        {"kind": "step", "step": 1, "time": 1.0, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1.0,
         "peak_mem_gib": 1.0, "step_time_s": 1.0, "tokens": 10},
        {"kind": "event", "event": f"checkpoint{EVIL}", "step": 1, "time": 2.0, "why": EVIL},
        {"kind": "event", "event": "straggler", "step": 1, "time": 2.0, "rank": 0, "cause": EVIL},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    attempt = {"attempt": 0, "started": "2026-11-01T00:00:00+00:00", "status": f"failed{EVIL}", "error": EVIL}
    (folder / "run.json").write_text(json.dumps({"name": EVIL, "attempts": [attempt, attempt]}))
    return folder


COMMANDS = (
    ["watch", "run", "--once"],
    ["report", "run"],
    ["report", "run", "run"],
    ["report", "run", "--trace"],
    ["generate", "run"],
)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_stranger_s_run_folder_does_not_command_the_terminal(words, run_dir, tmp_path):
    text = shown_by(words, tmp_path)
    assert text.strip()
    assert_clean(text)
    if words[0] == "watch":
        assert "before\ufffd" in text
    assert "defect of titan-train" not in text


def test_a_stranger_s_configuration_and_names_do_not_either(tmp_path):
    key = json.dumps(EVIL)  # TOML reads the same escapes, but not those of C1
    (tmp_path / "c.toml").write_text(f"[model]\nname = {key}\n[train]\n{key} = 1\n", encoding="utf-8")
    assert_clean(shown_by(["check", "c.toml"], tmp_path))
    assert_clean(shown_by(["check", f"{TITLE}.toml"], tmp_path))
    (tmp_path / "text.txt").write_text(EVIL * 100)
    (tmp_path / "d.toml").write_text(
        '[tokenizer]\nkind = "bytes"\n[model]\nseq_len = 64\n[data]\ncache_dir = "cache"\n'
        '[[data.sources]]\nname = "a"\nkind = "text"\npaths = ["text.txt"]\n'
    )
    text = shown_by(["data", "show", "d.toml"], tmp_path)
    assert "before" in text
    assert_clean(text)


def test_a_stream_lets_a_progress_bar_move_but_not_a_text():
    raw = io.StringIO()
    stream = CleanStream(raw, moves=True)
    stream.write("\r 50%")
    stream.write("\x1b[A")
    assert raw.getvalue() == "\r 50%\x1b[A"
    stream.writelines([f"name{CLEAR}\n"])
    assert raw.getvalue().endswith("name\ufffd[2J\ufffd[H\n")
    plain = CleanStream(io.StringIO())
    assert plain.write("\ra") == 2
    assert plain.raw.getvalue() == "\ufffda"


def test_text_is_left_as_it_is():
    for text in ("plain", "tab\tand\nnewline", "é 語 🙂 e\u0301", "\u200d"):
        assert printable(text) == text


def test_a_drawn_line_is_cleaned_and_its_colours_stay():
    from rich.text import Text

    raw = io.StringIO()
    console = clean_console(raw, force_terminal=True, color_system="standard", width=80)
    console.print(Text(f"red{TITLE}", style="red"))
    assert raw.getvalue() == "\x1b[31mred\ufffd]0;evil\x1b[0m\n"
