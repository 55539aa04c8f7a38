import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from titan_train.run_folder import Lease, LeaseLostError, run_status
from titan_train.run_folder import lease as module

HOLD = """
import sys, time
from pathlib import Path
from titan_train.run_folder import Lease, LeaseLostError

time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
try:
    Lease(Path(sys.argv[1]))
except ValueError:
    raise SystemExit(2)
print("held", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lease."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path, "0", "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def owner(folder):
    return json.loads((folder / "lease.json").read_text())


def test_a_second_run_is_refused_in_one_line_that_names_the_first(tmp_path, holder):
    with pytest.raises(
        ValueError, match=rf"is in use: process {holder.pid} on host {platform.node()} .*kill"
    ) as refused:
        Lease(tmp_path)
    assert "\n" not in str(refused.value)
    assert owner(tmp_path)["pid"] == holder.pid
    assert [file.name for file in tmp_path.iterdir()] == ["lease.json"]


def test_a_dead_owners_lease_is_taken_over(tmp_path, holder):
    holder.kill()
    holder.wait()
    with Lease(tmp_path) as lease:
        lease.attempt(3)
        assert (owner(tmp_path)["pid"], owner(tmp_path)["attempt"]) == (os.getpid(), 3)
    assert list(tmp_path.iterdir()) == []


def test_an_owner_whose_exit_nobody_collected_is_dead(tmp_path, holder):
    holder.kill()
    stat = Path(f"/proc/{holder.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    Lease(tmp_path).release()


def test_a_process_number_in_use_again_is_not_the_owner(tmp_path):
    Lease(tmp_path).attempt(0)
    (tmp_path / "lease.json").write_text(json.dumps(owner(tmp_path) | {"started": "1"}))
    Lease(tmp_path).release()


def test_another_machine_waits_until_its_lost_command_on_another_host_is_known_to_be_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_DEAD_S", 0.3)
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    Lease(tmp_path, machine=1)._released.set()  # it was killed
    file = tmp_path / "machine-1.lease.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "far"}))
    Lease(tmp_path, machine=2).release()
    Lease(tmp_path, machine=1).release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_elsewhere_lives_while_it_touches_its_lease(tmp_path):
    lease = Lease(tmp_path)
    (tmp_path / "lease.json").write_text(json.dumps(owner(tmp_path) | {"host": "far"}))
    with pytest.raises(ValueError, match=r"on host far .*stop it there"):
        Lease(tmp_path)
    long_ago = time.time() - 1000
    os.utime(tmp_path / "lease.json", (long_ago, long_ago))
    Lease(tmp_path).release()
    lease.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', "null", '{"host": 1}', "\x00\x01", "[" * 9999])
def test_a_damaged_lease_has_no_owner(tmp_path, content):
    (tmp_path / "lease.json").write_text(content)
    with Lease(tmp_path):
        assert owner(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize(
    "wrong",
    ['"pid": 1e999', '"pid": "1"', '"since": 1e999', '"since": 1e300', '"since": NaN', '"attempt": 1e999'],
    ids=str,
)
def test_a_lease_with_a_malformed_number_has_no_owner(tmp_path, wrong):
    good = '{"host": "x", "pid": 1, "started": "1", "boot": "b", "namespace": 1, "since": 1, "attempt": 0, "chain": ""'
    running = [{"status": "running"}]
    (tmp_path / "lease.json").write_text(good + "}")
    assert run_status(tmp_path, running) == "running"
    (tmp_path / "lease.json").write_text(f"{good}, {wrong}}}")
    assert run_status(tmp_path, running) == "killed"
    with Lease(tmp_path):
        assert owner(tmp_path)["pid"] == os.getpid()


def test_of_many_that_start_at_once_after_a_death_one_gets_the_lease(tmp_path):
    (tmp_path / "lease.json").write_text("{")
    words = [sys.executable, "-c", HOLD, str(tmp_path), str(time.time() + 1.5), "600"]
    runs = [subprocess.Popen(words, stdout=subprocess.DEVNULL) for _ in range(6)]
    try:
        deadline = time.monotonic() + 120
        while sum(run.poll() == 2 for run in runs) < 5:
            assert time.monotonic() < deadline, "more than one holds the lease"
            time.sleep(0.05)
        (winner,) = [run for run in runs if run.poll() is None]
        assert owner(tmp_path)["pid"] == winner.pid
    finally:
        for run in runs:
            run.kill()
            run.wait()


def test_a_full_disk_does_not_end_the_owner(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with Lease(tmp_path) as lease:
        monkeypatch.setattr(module, "write_atomic", full)
        lease.attempt(1)


def far(folder):
    """The lease as an owner on another host holds it."""
    content = json.dumps(owner(folder) | {"host": "far", "pid": 7})
    (folder / "lease.json").write_text(content)
    return content


@pytest.mark.parametrize("ahead_s", [-1e6, 1e6])
def test_hosts_whose_clocks_differ_agree_on_who_lives(tmp_path, monkeypatch, ahead_s):
    first = Lease(tmp_path)
    far(tmp_path)
    now = time.time
    monkeypatch.setattr(module.time, "time", lambda: now() + ahead_s)
    with pytest.raises(ValueError, match="on host far"):
        Lease(tmp_path)
    long_ago = now() - 1000
    os.utime(tmp_path / "lease.json", (long_ago, long_ago))
    Lease(tmp_path).release()
    first.release()
    assert list(tmp_path.iterdir()) == []


def test_who_was_taken_for_dead_stops_and_leaves_the_folder_to_the_new_owner(tmp_path):
    told = []
    lease = Lease(tmp_path, on_lost=told.append)
    lease.attempt(0)
    others = far(tmp_path)
    with pytest.raises(LeaseLostError, match="taken over by process 7 on host far"):
        lease.attempt(1)
    with pytest.raises(LeaseLostError):
        lease.check()
    lease.release()
    assert (tmp_path / "lease.json").read_text() == others
    assert len(told) == 1


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_owner_looks_while_it_runs_and_mends_a_torn_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_TOUCH_S", 0.01)
    told = []
    lease = Lease(tmp_path, on_lost=told.append)
    mine = owner(tmp_path)
    for content in ("{", ""):
        (tmp_path / "lease.json").write_text(content)
        until(lambda: (tmp_path / "lease.json").read_text() not in ("{", ""))
        assert owner(tmp_path) == mine
    (tmp_path / "lease.json").unlink()
    until((tmp_path / "lease.json").exists)
    lease.check()
    others = far(tmp_path)
    until(lambda: told)
    assert (tmp_path / "lease.json").read_text() == others
    lease.release()


def test_a_file_system_without_links_has_one_owner_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with Lease(tmp_path), pytest.raises(ValueError, match="is in use"):
        Lease(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_another_container_with_this_host_name_is_not_to_be_killed_here(tmp_path, holder):
    (tmp_path / "lease.json").write_text(json.dumps(owner(tmp_path) | {"namespace": 1}))
    with pytest.raises(ValueError, match=rf"on host {platform.node()} .*stop it there"):
        Lease(tmp_path)


def test_a_file_elsewhere_is_not_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    run_dir, scratch = tmp_path / "runs/a", tmp_path / "scratch"
    run_dir.mkdir(parents=True)
    scratch.mkdir()
    (run_dir / "checkpoints").symlink_to(scratch)  # as one does where the home is small
    Lease(run_dir).release()
    for name in ("metrics.jsonl", "logs/rank-1.log", "traces/rank-1.json.gz"):
        path = run_dir / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(precious)
        with pytest.raises(ValueError, match="is a link to"):
            Lease(run_dir)
        path.unlink()
    assert precious.read_text() == "kept"
