"""What a terminal sends to the command and to everything that it started: Ctrl-C, and that it was closed."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from titan_train.launch.supervise.requests import Requests
from titan_train.run_folder import newest_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions are looked up with ps")
WORDS = [
    "run",
    "debug",
    "--launch.nproc",
    "2",
    "--launch.device",
    "cpu",
    "--train.steps",
    "100000",
    "--run.dir",
    "runs",
]


TORCH_THAT_WAITS = """
import pathlib, time
while not pathlib.Path({go!r}).exists():
    time.sleep(0.02)
raise ImportError("not today")
"""


def started(folder: Path, terminal: int | None = None, **environment: str) -> subprocess.Popen:
    stream = subprocess.PIPE if terminal is None else terminal
    return subprocess.Popen(
        [sys.executable, "-m", "titan_train", *WORDS], cwd=folder, text=True, start_new_session=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL if terminal is None else terminal, stdout=stream, stderr=subprocess.STDOUT,
        preexec_fn=lambda: _begin(terminal),
    )  # fmt: skip


def _begin(terminal: int | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    if terminal is not None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def in_session(session: int, words: str) -> list[str]:
    lines = subprocess.run(
        ["ps", "-wweo", "sid,stat,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rows = [line.split(maxsplit=2) for line in lines[1:]]
    return [row[2] for row in rows if int(row[0]) == session and row[1][0] != "Z" and words in row[2]]


def interrupted(process: subprocess.Popen, then: Callable[[], object] = lambda: None) -> None:
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=60)
    then()
    printed, _ = process.communicate(timeout=120)  # until all that it started has closed its output
    # ranks that train end after a step, with a checkpoint
    saved = process.returncode == 0 and "run the same command to continue" in printed
    assert process.returncode == 130 or saved, printed
    assert "Traceback" not in printed
    assert printed.count("interrupted") <= 1
    _none_is_left(process.pid)


def _none_is_left(session: int) -> None:
    deadline = time.monotonic() + 20
    while in_session(session, "") and time.monotonic() < deadline:  # the last are just ending
        time.sleep(0.1)
    assert not in_session(session, "")


def test_while_the_server_of_ranks_imports_torch(tmp_path: Path) -> None:
    go = tmp_path / "go"
    (tmp_path / "slow" / "torch").mkdir(parents=True)
    (tmp_path / "slow" / "torch" / "__init__.py").write_text(TORCH_THAT_WAITS.format(go=str(go)))
    path = os.pathsep.join([str(tmp_path / "slow"), os.environ.get("PYTHONPATH", "")])
    process = started(tmp_path, PYTHONPATH=path)
    deadline = time.monotonic() + 60
    while not in_session(process.pid, "forkserver") and time.monotonic() < deadline:
        time.sleep(0.01)
    interrupted(process, go.touch)
    assert not (tmp_path / "runs").exists()  # nothing was written for a run that no rank validated


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0])
def test_at_any_moment(tmp_path: Path, seconds: float) -> None:
    process = started(tmp_path)
    time.sleep(seconds)
    interrupted(process)


@pytest.mark.timeout(600)
def test_a_run_whose_terminal_is_closed_saves_its_last_step(tmp_path: Path) -> None:
    window, terminal = pty.openpty()
    process = started(tmp_path, terminal)
    os.close(terminal)
    metrics = tmp_path / "runs" / "debug" / "metrics.jsonl"
    while not (metrics.exists() and '"step":2' in metrics.read_text()):
        os.read(window, 65536)
    os.close(window)
    assert process.wait(timeout=400) == 0
    run_dir = metrics.parent
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert newest_checkpoint(run_dir) == last["step"] > 0
    assert json.loads((run_dir / "run.json").read_text())["attempts"][-1]["status"] == "stopped"
    _none_is_left(process.pid)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_command_under_nohup_does_not_mind_a_closed_terminal(nohup: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        requests = Requests()
        with requests.installed():
            os.kill(os.getpid(), signal.SIGHUP)
        assert requests.stops == (0 if nohup else 1)
        assert not requests.end_now
    finally:
        signal.signal(signal.SIGHUP, before)
