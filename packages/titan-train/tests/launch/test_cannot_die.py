"""The disk, the clock, the memory and the network fail; the supervisor goes on, and so does the run."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from isolated import Isolated, can_isolate, wait_for

pytestmark = pytest.mark.timeout(900)  # each waits for a run that may share its cores with twenty others
PATIENT = ("--launch.straggler-factor", "0", "--launch.max-restarts", "50")
# Rank 0 stops at step 6 until the run is disturbed and starts again, and nobody calls that a hang.
HELD = ("--launch.faults", "hang rank=0 step=6", "--launch.hang-least-s", "3000")
SLOW = ("--launch.faults", "slow rank=0 factor=8 step=5")
GARBAGE = (b"", b"{", b"[1, 2", b"\x00\xff\xfe", b'{"time": "x"}', b"[" * 5000, b"null")


class Disturbed:
    """A run whose command is disturbed from outside, once it has made five steps."""

    def __init__(self, job, name, *words, prefix=(), environ=(), pace=HELD):
        self.name, self.run, self.job = name, job.folder / "runs" / name, job
        self._told = job.folder / f"{name}.told"
        with self._told.open("w") as told:
            command = [*prefix, *job.command(name, *PATIENT, *pace, *words)]
            environ = job.environ() | dict(environ)
            self.process = subprocess.Popen(command, cwd=job.folder, stdout=told, stderr=told, env=environ)

    def __enter__(self):
        wait_for(lambda: "step=5/" in self.told() or self.process.poll() is not None)
        assert self.process.poll() is None, self.told()
        return self

    def __exit__(self, *_):
        for pid in descendants(self.process.pid) if self.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def told(self):
        return self._told.read_text()

    def ends(self):
        """The exit code; the run must not have shown a traceback of the supervisor's."""
        code = self.process.wait(timeout=400)
        assert "titan_train/launch/supervise" not in self.told(), self.told()
        return code

    def of(self, word):
        """Processes of the run whose command line has this word."""
        found = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found


def descendants(pid):
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


def test_a_killed_fork_server_is_replaced_and_its_ranks_do_not_write_on(job, undisturbed):
    with Disturbed(job, "no-server") as run:
        server = run.of("multiprocessing.forkserver")[0]
        ranks = [pid for pid in descendants(server) if pid != server]
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: "lost " in run.told())
        assert all(not Path(f"/proc/{pid}/exe").exists() for pid in ranks if pid in ranks_of(run))
        assert run.ends() == 0, run.told()
    assert "the server that ranks are forked from was killed" in run.told()
    assert job.losses("no-server") == undisturbed


def ranks_of(run):
    """Processes that have a log or a lease of the run open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()).startswith(str(run.run)) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def test_garbage_of_every_kind_in_the_files_that_the_supervisor_reads(job, undisturbed):
    garbage(job, undisturbed, "garbage", itertools.cycle(GARBAGE))


@pytest.mark.slow
@pytest.mark.parametrize("content", GARBAGE, ids=["empty", "torn", "torn-list", "bytes", "wrong-type", "deep", "null"])
def test_each_kind_of_garbage_in_every_file_that_the_supervisor_reads(job, undisturbed, content):
    garbage(job, undisturbed, f"garbage-{GARBAGE.index(content)}", itertools.repeat(content))


FAULT = "faults/00-hang.json"


def garbage(job, undisturbed, name, contents):
    with Disturbed(job, name) as run:
        for file in ("run.json", "lease.json", "attempts.jsonl", "config.toml", "staged/config.toml", "staged/run.json",
                     "failures/rank-0.json", "failures/rank-1.json", FAULT):  # fmt: skip
            (run.run / file).parent.mkdir(exist_ok=True)
            (run.run / file).write_bytes(next(contents))
        os.kill(run.of("multiprocessing.forkserver")[-1], signal.SIGKILL)
        assert run.ends() == 0, run.told()
    assert "lost " in run.told()
    assert job.losses(name) == undisturbed


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The environment of a run whose disk and clock fail while files exist, and these two files."""
    if not shutil.which("gcc"):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("faulty")
    source = Path(__file__).with_name("faulty_world.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "faulty.so", source, "-ldl"], check=True)
    environ = {"LD_PRELOAD": folder / "faulty.so", "FAULTY_SWITCH": folder / "disk", "FAULTY_CLOCK": folder / "clock"}
    return {key: str(value) for key, value in environ.items()}


def test_a_disk_that_answers_with_errors_is_waited_for(job, undisturbed, faulty):
    switch = Path(faulty["FAULTY_SWITCH"])
    environ = faulty | {"FAULTY_PREFIX": str(job.folder / "runs" / "eio")}
    with Disturbed(job, "eio", environ=environ) as run:
        switch.touch()
        os.kill(run.of("multiprocessing.forkserver")[-1], signal.SIGKILL)
        wait_for(lambda: "Input/output error. Make room, or press Ctrl-C" in run.told())
        time.sleep(2.0)
        assert run.process.poll() is None
        switch.unlink()
        assert run.ends() == 0, run.told()
    assert job.losses("eio") == undisturbed
    assert [attempt["end"] for attempt in job.attempts("eio")][-1] == "finished"
    assert len(job.attempts("eio")) >= 2  # the line that could not be written is there


def test_a_clock_that_jumps_back_and_forth_changes_nothing(job, undisturbed, faulty):
    name, clock = "clock", Path(faulty["FAULTY_CLOCK"])
    try:
        with Disturbed(job, name, environ=faulty, pace=(*HELD[:3], "300")) as run:
            for jump in (100_000_000, -100_000_000):
                clock.write_text(str(jump))
                time.sleep(2.0)  # several looks at the heartbeats
            os.kill(run.of("multiprocessing.forkserver")[-1], signal.SIGKILL)
            assert run.ends() == 0, run.told()
    finally:
        clock.unlink(missing_ok=True)
    assert job.losses(name) == undisturbed
    assert len(job.attempts(name)) == 2, run.told()


def test_a_run_whose_folder_another_host_took_over_stops_and_writes_no_more(job):
    with Disturbed(job, "taken-over") as run:
        lease = json.loads((run.run / "lease.json").read_text()) | {"host": "far", "pid": 7}
        (run.run / "lease.json").write_text(json.dumps(lease))
        (run.run / "staged").mkdir(exist_ok=True)
        (run.run / "staged" / "config.toml").write_text("the other run's")
        metrics = (run.run / "metrics.jsonl").read_bytes()
        assert run.ends() == 1, run.told()
        assert ranks_of(run) == []
    assert "was taken over by process 7 on host far" in run.told()
    assert "Traceback" not in run.told()
    assert (run.run / "metrics.jsonl").read_bytes() == metrics
    assert (run.run / "staged" / "config.toml").read_text() == "the other run's"
    assert json.loads((run.run / "lease.json").read_text()) == lease


def can_mount():
    if os.geteuid() or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs")
def test_a_disk_that_turns_read_only_is_waited_for(job, undisturbed):
    disk = job.folder / "runs" / "read-only"
    disk.mkdir(parents=True)
    mounting = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{disk}" && exec "$@"', "sh")
    with Disturbed(job, "read-only", prefix=mounting) as run:
        inside = ["nsenter", "-t", str(run.process.pid), "-m"]
        for words in (["mount", "--bind", disk, disk], ["mount", "-o", "remount,ro,bind", disk]):
            subprocess.run([*inside, *words], check=True)  # files that are open stay writable, as on a failing disk
        os.kill(run.of("multiprocessing.forkserver")[-1], signal.SIGKILL)
        wait_for(lambda: "Read-only file system. Make room, or press Ctrl-C" in run.told())
        time.sleep(2.0)
        assert run.process.poll() is None
        subprocess.run([*inside, "umount", "-l", disk], check=True)
        assert run.ends() == 0, run.told()
    last = [line for line in run.told().splitlines() if line.startswith("step=12/12")]
    assert f"loss={undisturbed[12]:.4f}" in last[-1]


CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.slow
@pytest.mark.skipif(not os.access(CGROUPS / "cgroup.procs", os.W_OK), reason="needs a memory cgroup that it may write")
def test_a_rank_that_the_kernel_kills_for_memory_is_started_again(job, undisturbed):
    group = CGROUPS / f"titan-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("2000000")
        with Disturbed(job, "oom", pace=SLOW) as run:
            (group / "cgroup.procs").write_text(str(run.of("multiprocessing.forkserver")[-1]))
            assert run.ends() == 0, run.told()
        killed = re.search(r"oom_kill (\d+)", (group / "memory.oom_control").read_text())
        assert killed is not None
        assert int(killed[1]) == 1, run.told()
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    assert "was ended by SIGKILL (often the kernel, out of memory" in run.told()
    assert job.losses("oom") == undisturbed


@pytest.mark.slow
@pytest.mark.skipif(not can_isolate(), reason="needs the right to make network and process namespaces")
def test_a_network_that_goes_away_and_comes_back_loses_nothing(job, undisturbed):
    early = ("--launch.timeout-s", "20", "--launch.step-timeout-s", "12")
    with Isolated() as namespace:
        prefix = namespace.command([], job.folder)
        with Disturbed(job, "partition", *early, prefix=prefix) as run:
            namespace.run(["ip", "link", "set", "lo", "down"])
            wait_for(lambda: "lost " in run.told())
            time.sleep(8.0)  # restarts are tried meanwhile
            namespace.run(["ip", "link", "set", "lo", "up"])
            assert run.ends() == 0, run.told()
    assert job.losses("partition") == undisturbed
