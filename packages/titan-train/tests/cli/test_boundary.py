import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from titan_train.cli import main
from titan_train.cli.boundary import exit_code


class PanicException(BaseException):
    """Named as the panic of a Rust extension."""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("lr=-1 must be > 0"), 2, "lr=-1 must be > 0"),
        (OSError(13, "Permission denied", "runs/a"), 1, "runs/a: Permission denied"),
        (OSError(36, "File name too long", "x" * 5000), 1, "File name too long"),
        (RecursionError("maximum recursion depth exceeded"), 2, "nested too deeply"),
        (OverflowError("int too large to convert"), 2, "too large"),
        (MemoryError(), 1, "not enough memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried"), 1, "not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PanicException("called `Result::unwrap()` on an `Err` value"), 2, "a library failed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_system_throws_is_one_line_and_an_exit_code(error, code, words, capsys):
    def command():
        raise error

    assert exit_code(command) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1
    assert len(err) < 300


@pytest.fixture
def _interruptible():
    """Python's own answer to an interrupt: a shell without job control starts what it puts in the background deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Finalized:
    """Interrupts the process when it is dropped, where Python raises nothing."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("busy_s", [0, 0.3])
def test_an_interrupt_in_a_finalizer_still_ends_the_command(busy_s, capsys, monkeypatch):
    start = threading.Thread.start

    def slow_start(thread):
        start(thread)
        time.sleep(busy_s)  # on a busy machine the report of the first interrupt takes its time

    def command():
        monkeypatch.setattr(threading.Thread, "start", slow_start)
        Finalized()
        time.sleep(60)
        return 0

    began = time.monotonic()
    assert exit_code(command) == 130
    assert time.monotonic() - began < 40  # a sleep is ended, not waited for
    assert capsys.readouterr().err == "error: interrupted\n"


def test_no_interrupt_comes_after_a_command_that_has_ended(capsys):
    def command():
        with contextlib.suppress(KeyboardInterrupt):
            Finalized()
        return 0

    code = exit_code(command)
    time.sleep(0.2)
    assert code in (0, 130)
    assert capsys.readouterr().err == ("" if code == 0 else "error: interrupted\n")


INTERRUPTED_IN_EXEC = """
import signal
from titan_train.cli.boundary import exit_code
raise SystemExit(exit_code(lambda: exec("signal.raise_signal(signal.SIGINT)", {"signal": signal})))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a child of Windows takes no preexec_fn")
def test_an_interrupt_while_a_dataclass_is_made_is_an_exit_code_too(tmp_path):
    """`python -m` dies by the signal after a plain KeyboardInterrupt has left an ``exec`` of text."""
    (tmp_path / "command.py").write_text(INTERRUPTED_IN_EXEC)
    done = subprocess.run(
        [sys.executable, "-m", "command"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_a_defect_is_one_line_and_its_traceback_is_kept_in_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("titan_train.trust.owner.owner_of", lambda _: "library")  # this test's own frames are
    elsewhere = compile("raise RuntimeError('of somebody else')", "/lib/other.py", "exec")
    for command, words in (
        (lambda: {}["x"], "KeyError: 'x'"),
        (lambda: exec(elsewhere), "of somebody else (other.py, line 1)"),
    ):
        assert exit_code(command) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert "This is a defect of titan-train" in line
        (file,) = tmp_path.iterdir()
        assert str(file) in line
        assert file.read_text().startswith("Traceback (most recent call last)")
        file.unlink()


DEEP = "a = " + "[" * 3000 + "]" * 3000


@pytest.mark.parametrize(
    ("words", "text", "code"),
    [
        (["run", "bad.toml"], DEEP, 2),
        (["check", "bad.toml"], "[optimizer]\nlr = nan", 2),
        (["check", "bad.toml"], "[optimizer]\nlr = inf", 2),
        (["check", "bad.toml"], "[train]\nsteps = 100000000000000000000000000", 2),
        (["check", "bad.toml"], "[model]\nargs = {dim = 1000000000000}", 2),
        (["check", "debug", "--train.max-grad-norm", "nan"], "", 2),
        (["check", "debug", "--train.steps", "100000000000000000000000000"], "", 2),
        (["run", "debug", "--launch.elastic", "--launch.min-ranks", "9", "--launch.nproc", "2"], "", 2),
        (["run", "debug", "--run.dir", "bad.toml"], "", 2),
        (["run", "debug", "--run.name", "n" * 300], "", 2),
        (["slurm", "debug", "--launch.nproc", "1", "--port", "99999", "--launcher", "machines", "--launch.nnodes", "2"], "", 2),
        (["slurm", "debug", "--launch.nproc", "1", "--out", "."], "", 1),
        (["run", "debug", "--model.args", "num_heads", "3", "dim", "192"], "", 2),
        (["report", "bad.toml"], "", 2),
        (["generate", "bad.toml", "--prompt", "x"], "", 2),
    ],
)  # fmt: skip
def test_bad_input_is_one_error_without_a_traceback(words, text, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text(text)
    try:
        got = main(words)
    except SystemExit as end:  # the command line's own parser
        got = end.code
    assert got == code
    err = capsys.readouterr().err
    assert "error" in err.lower() or "╭" in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_a_reader_that_leaves_is_no_error():
    code = "import sys; from titan_train.cli import main; sys.exit(main(['list']))"
    command = f"{sys.executable} -c {code!r} | true"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False).stderr == ""


def test_an_error_of_the_users_code_is_not_called_a_defect_of_ours(tmp_path, capsys):
    file = tmp_path / "bigram.py"
    file.write_text("def forward(tokens):\n    return tokens.missing\n")
    code = compile(file.read_text(), str(file), "exec")
    module = {}
    exec(code, module)
    assert exit_code(lambda: module["forward"](3)) == 1
    err = capsys.readouterr().err
    assert "AttributeError: 'int' object has no attribute 'missing' (bigram.py, line 2)" in err
    assert "Your own code raised this" in err
    assert "defect" not in err
