"""A tiny job that every launcher can run: supervised in this process, or by the command as a person types it."""

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # what the tests of this folder share
from titan_train.config import load_config
from titan_train.inputs import prepare_inputs
from titan_train.launch.place.here import LocalLauncher
from titan_train.launch.supervise.supervisor import Supervisor

MARK = f"launch-{os.getpid()}"  # in the environment of every process that a test starts
TINY = """
[run]
dir = "{folder}/runs"
[model]
name = "llama3_debug"
seq_len = 32
[tokenizer]
kind = "bytes"
[data]
cache_dir = "{folder}/cache"
validation_fraction = 0.0
[[data.sources]]
name = "text"
kind = "text"
paths = ["{folder}/text.txt"]
[train]
steps = 12
global_batch = 12
[checkpoint]
every = 4
keep_last = 0
[metrics]
progress = "lines"
report = false
[launch]
device = "cpu"
nproc = 2
hang_least_s = 30.0
max_restarts = 5
"""


class Job:
    """A folder with a configuration; every run in it has a name."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(3000)))
        (folder / "tiny.toml").write_text(TINY.format(folder=folder))

    def config(self, name, *words):
        return load_config(str(self.folder / "tiny.toml"), ["--run.name", name, *words])

    def supervise(self, name, *words):
        """Run it with local ranks, supervised by this process. Returns the exit code and what the user was told."""
        config = self.config(name, *words)
        prepare_inputs(config, quiet=True)
        told = io.StringIO()
        ranks = config.launch.nproc
        run_dir = self.folder / "runs" / name
        run_dir.mkdir(parents=True, exist_ok=True)
        code = Supervisor(LocalLauncher(ranks, "cpu"), config, run_dir, ranks=ranks, out=told).run()
        return code, told.getvalue()

    def command(self, name, *words, config=None):
        config = config or str(self.folder / "tiny.toml")
        return [sys.executable, "-m", "titan_train", "run", config, "--run.name", name, *words]

    def run(self, name, *words, timeout=800, config=None):
        """Run the command and wait for it."""
        return subprocess.run(
            self.command(name, *words, config=config),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environ(),
            check=False,
        )

    def start(self, name, *words):
        """Start the command; its output and errors come through one pipe, line by line."""
        return subprocess.Popen(
            self.command(name, *words),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environ(),
        )

    @staticmethod
    def environ():
        settings = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "disabled"}
        return os.environ | settings

    def records(self, name, kind="step"):
        lines = [json.loads(line) for line in (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def losses(self, name):
        """Loss by step, bit for bit: JSON keeps every digit of a float."""
        return {record["step"]: record["loss"] for record in self.records(name)}

    def attempts(self, name):
        return [json.loads(line) for line in (self.folder / "runs" / name / "attempts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    os.environ["TITAN_TEST"] = MARK
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def undisturbed(job):
    """The losses of a run on two ranks that nothing happened to."""
    code, told = job.supervise("undisturbed")
    assert code == 0, told
    return job.losses("undisturbed")


@pytest.fixture
def listening_beyond_loopback():
    """A context that collects the addresses, other than loopback, on which processes of the run listen."""

    @contextlib.contextmanager
    def watched():
        found, stop = set(), threading.Event()

        def look():
            while not stop.wait(0.3):
                sockets = {inode: address for address, inode in _listening() if not _is_loopback(address)}
                for process in Path("/proc").glob("[0-9]*") if sockets else ():
                    with contextlib.suppress(OSError):  # it ends while it is looked at
                        held = {_inode(file) for file in (process / "fd").iterdir()} & sockets.keys()
                        if held and MARK.encode() in (process / "environ").read_bytes():
                            found.update(sockets[inode] for inode in held)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield found
        finally:
            stop.set()
            thread.join()

    return watched


def _listening():
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                yield words[1].rsplit(":", 1)[0], words[9]


def _inode(file):
    try:
        return str(file.readlink()).removeprefix("socket:[").removesuffix("]")
    except OSError:  # closed meanwhile
        return ""


def _is_loopback(address):
    return address in ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
