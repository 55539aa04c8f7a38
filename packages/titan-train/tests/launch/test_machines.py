"""Several machines: commands on loopback, as machines would run them, and stand-ins that agree through one file."""

import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from isolated import wait_for
from titan_ckpt import Process
from titan_train.cli import run
from titan_train.config import Config, LaunchConfig, load_config
from titan_train.launch.job import RankExit
from titan_train.launch.place import machines as module
from titan_train.launch.place.machines import FILE_NAME, Leader, follow, is_led, listen_at
from titan_train.launch.rank.info import RankInfo
from titan_train.launch.rank.orders import Order
from titan_train.launch.rank.worker import _tcp_store
from titan_train.launch.supervise import supervisor


def free_port():
    """A port that stays free until it is used: below those that the kernel gives to connections of other tests."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(min(10_000, first - 1000), first)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Machines:
    def __init__(self, job, name, count, *words):
        self.job, self.name, self.words = job, name, words
        endpoint = f"127.0.0.1:{free_port()}"
        self.settings = ("--launcher", "machines", "--launch.nproc", "1", "--launch.nnodes", str(count))
        self.settings += ("--launch.endpoint", endpoint)
        self.running = {}
        for machine in range(count):
            self.start(machine)

    def start(self, machine):
        command = self.job.command(self.name, *self.settings, *self.words, "--launch.node-rank", str(machine))
        environ = self.job.environ() | {"GLOO_SOCKET_IFNAME": "lo"}
        with self.file(machine).open("a") as told:
            self.running[machine] = subprocess.Popen(
                command, cwd=self.job.folder, stdout=told, stderr=told, env=environ, start_new_session=True
            )

    def lose(self, machine):
        """SIGKILL to everything that the machine runs."""
        process = self.running.pop(machine)
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def file(self, machine):
        return self.job.folder / f"{self.name}-{machine}.told"

    def told(self):
        return self.file(0).read_text()

    def end(self):
        for machine, process in list(self.running.items()):
            if process.poll() is None:
                self.lose(machine)


def descendants(pid):
    """A process and all below it, parents first."""
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        with open(f"/proc/{pid}/task/{task}/children") as file:  # noqa: PTH123
            for child in file.read().split():
                found += descendants(int(child))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_shrinks_with_its_machines_and_grows_back(job):
    words = ("--launch.elastic", "--train.steps", "2000", "--launch.max-restarts", "9")
    machines = Machines(job, "machines", 3, *words)
    try:
        wait_for(lambda: "step=5/" in machines.told())
        machines.lose(2)
        wait_for(lambda: "elastic  2 of 3 ranks" in machines.told())
        wait_for(lambda: "resumed  step" in machines.told())
        machines.start(2)
        wait_for(lambda: "elastic  ranks came back" in machines.told())
        wait_for(
            lambda: "step=" in machines.told().rpartition("elastic  ranks came back")[2].partition("resumed from")[2]
        )
        machines.running[0].send_signal(signal.SIGTERM)
        codes = {machine: process.wait(timeout=120) for machine, process in machines.running.items()}
    finally:
        machines.end()
    assert codes == {0: 0, 1: 0, 2: 0}, machines.told()
    assert [attempt["world_size"] for attempt in job.attempts("machines")] == [3, 2, 3], machines.told()
    consumed = [record["samples_consumed"] for record in job.records("machines")]
    assert consumed == [12 * step for step in range(1, len(consumed) + 1)]


@pytest.mark.timeout(1800)
def test_two_machines_have_the_losses_of_one_though_a_rank_is_killed(job, undisturbed, listening_beyond_loopback):
    with listening_beyond_loopback() as seen:
        machines = Machines(job, "two-machines", 2, "--faults", "kill rank=1 step=7")
        try:
            codes = [machines.running[machine].wait(timeout=800) for machine in (0, 1)]
        finally:
            machines.end()
    assert codes == [0, 0], machines.told() + machines.file(1).read_text()
    assert "rank 1 of 2 was ended by SIGKILL" in machines.told()
    assert "(machine 1)" in machines.told()
    assert "restart  from step 4 (restart 1 of 5)" in machines.told()
    assert job.losses("two-machines") == undisturbed
    assert [attempt["end"] for attempt in job.attempts("two-machines")][-1] == "finished"
    assert seen == set()


class StandIn:
    """The ranks of a machine."""

    running = True

    def __init__(self, job, log, ended, stuck=False):
        self.number, self.log, self.ended, self.stuck = job.attempt, log, ended, stuck
        log.append(("start", self.number))

    def exits(self, timeout_s):
        found, self.ended[:] = list(self.ended), []
        self.running = not found
        return found

    def order(self, order):
        self.log.append((order.name, self.number))

    def end(self):
        self.log.append(("end", self.number))
        if self.stuck:
            raise RuntimeError("SIGKILL has not ended rank 2")


def one_of_two(**words):
    return Config(launch=LaunchConfig(launcher="machines", nnodes=2, node_rank=1, endpoint="a:1", **words))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Run the following machine in a thread: its log, and what it returns in the end."""
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)  # only a main thread may
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "_LEAVE_S", 0.05)
    log, codes = [], []

    def start(elastic=False, ended=(), refused=None, **words):
        config = one_of_two(elastic=elastic)
        ranks = list(ended)

        def start_ranks(job):
            if job.attempt in (refused or {}):
                raise refused[job.attempt]
            return StandIn(job, log, ranks, **words)

        def command():
            try:
                codes.append(follow(config, tmp_path, 2, "cpu", start_ranks))
            except (ValueError, RuntimeError) as err:
                codes.append(str(err))

        thread = threading.Thread(target=command)
        thread.start()
        return thread

    return start, log, codes


def soon(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_machine_follows_attempts_and_orders_to_the_end(tmp_path, machine):
    start, log, codes = machine
    old = Leader(tmp_path, 2)
    old.attempt(7, (0, 1))
    old.finish(0)  # an earlier start of the command, which is over
    thread = start()
    leader = Leader(tmp_path, 2)
    leader.attempt(0, (0, 1))
    soon(lambda: ("start", 0) in log)
    leader.order(Order.SAVE)
    soon(lambda: ("SAVE", 0) in log)
    leader.attempt(1, (0, 1))
    soon(lambda: ("start", 1) in log)
    leader.finish(1)
    thread.join(30)
    assert codes == [1]
    assert log == [("start", 0), ("SAVE", 0), ("end", 0), ("start", 1), ("end", 1)]


def test_a_machine_that_comes_late_joins_the_attempt_that_runs(tmp_path, machine):
    start, log, codes = machine
    leader = Leader(tmp_path, 2)
    leader.attempt(3, (0, 1))
    thread = start()
    soon(lambda: ("start", 3) in log)
    leader.finish(0)
    thread.join(30)
    assert codes == [0]


def test_a_second_command_does_not_join_a_machine_that_follows_already(tmp_path, machine):
    start, log, codes = machine
    leader = Leader(tmp_path, 2)
    leader.attempt(0, (0, 1))
    first = start()
    soon(lambda: log)
    second = start(ended=[RankExit(2, 1)])
    soon(lambda: codes or len(log) > 1)
    assert leader.exits(1) == []
    leader.finish(0)
    first.join(30)
    second.join(30)
    assert log == [("start", 0), ("end", 0)]
    assert f"machine 1 of {tmp_path} is taken: process {os.getpid()} on host" in codes[0]
    assert codes[1:] == [0]


def test_a_run_that_ends_while_a_machine_prepares_has_ended(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(module, "_LEADER_GONE_S", 0.2)
    monkeypatch.setattr("titan_train.launch.node.agent.NodeAgent.sharing_cores", lambda *_: None)
    task = SimpleNamespace(prepare=lambda *_, **__: Leader(tmp_path, 2).finish(0))
    monkeypatch.setattr(run, "load_task", lambda _: task)
    monkeypatch.setattr(run, "run_folder", lambda _: tmp_path)
    assert run._follow(one_of_two(), 1) == 0


def test_a_machine_whose_first_machine_falls_silent_gives_up(tmp_path, machine, monkeypatch, capsys):
    assert module._LEADER_GONE_S > supervisor._ROOM_S + 60
    monkeypatch.setattr(module, "_LEADER_GONE_S", 0.2)
    start, _, codes = machine
    start().join(30)
    assert codes == [1]
    assert f"machine 0 wrote nothing to {tmp_path / FILE_NAME} for 0.2 s" in capsys.readouterr().err


def test_a_machine_stays_while_the_first_one_waits_for_room_and_touches_its_lease(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(module, "_LEADER_GONE_S", 2.0)
    lease = tmp_path / "lease.json"
    lease.touch()
    start, _, codes = machine
    thread = start()
    for second in range(25):
        os.utime(lease, (second, second))  # a full disk takes this, and no announcement
        time.sleep(0.1)
    assert codes == []
    thread.join(30)
    assert codes == [1]


def test_a_machine_that_is_asked_to_end_does_so_when_no_rank_runs(tmp_path, machine, monkeypatch):
    start, log, codes = machine
    handlers = {}
    monkeypatch.setattr(module.signal, "signal", handlers.__setitem__)
    leader = Leader(tmp_path, 2)
    leader.attempt(0, (0, 1))
    thread = start()
    soon(lambda: ("start", 0) in log)
    handlers[signal.SIGTERM](signal.SIGTERM, None)  # its ranks had it too: they save, and machine 0 goes on from there
    time.sleep(0.2)
    assert codes == []
    leader.attempt(1, (0,))
    soon(lambda: ("end", 0) in log)
    time.sleep(0.2)
    assert codes == []
    handlers[signal.SIGINT](signal.SIGINT, None)
    thread.join(30)
    assert codes == [130]


def test_a_second_ctrl_c_ends_a_machine_whose_ranks_run(tmp_path, machine, monkeypatch):
    start, log, codes = machine
    handlers = {}
    monkeypatch.setattr(module.signal, "signal", handlers.__setitem__)
    Leader(tmp_path, 2).attempt(0, (0, 1))
    thread = start()
    soon(lambda: log)
    handlers[signal.SIGINT](signal.SIGINT, None)
    time.sleep(0.1)
    assert codes == []
    handlers[signal.SIGINT](signal.SIGINT, None)
    thread.join(30)
    assert codes == [130]
    assert log == [("start", 0), ("end", 0)]


def test_a_start_that_was_refused_or_replaced_says_nothing_to_the_machines_of_another(tmp_path):
    def said():
        return json.loads((tmp_path / FILE_NAME).read_text())

    def leased_to(process):
        lease = asdict(process) | {"since": time.time(), "attempt": 0, "chain": ""}
        (tmp_path / "lease.json").write_text(json.dumps(lease))

    first, second, third = (Leader(tmp_path, 2) for _ in range(3))
    leased_to(Process.of(os.getppid()))
    second.finish(1)  # refused while the first still prepares, and has said nothing
    assert not (tmp_path / FILE_NAME).exists()
    (tmp_path / "lease.json").unlink()
    first.attempt(0, (0, 1))
    leased_to(Process.of(os.getppid()))
    before = said()
    second.finish(1)  # refused: the folder is in use
    assert said() == before
    second.attempt(0, (0, 1))  # now it has taken the folder over, and the first wakes up
    before = said()
    assert before["run"] != first._announced.run
    first.order(Order.STOP)
    first.touch()
    first.finish(1)
    assert said() == before
    assert is_led(tmp_path)
    leased_to(Process.of(2**22 + 1))  # the second was killed a moment ago, and what comes then is refused
    assert not is_led(tmp_path)
    third.finish(1)
    assert said()["exit_code"] == 1


def test_what_is_announced_is_json_on_disk_at_once(tmp_path):
    Leader(tmp_path, 2).attempt(2, (0, 1))
    announced = json.loads((tmp_path / FILE_NAME).read_text())
    assert (announced["attempt"], announced["orders"], announced["exit_code"]) == (2, "", None)


def test_how_a_machines_ranks_ended_is_reported_for_this_attempt_alone(tmp_path, machine):
    start, _, _ = machine
    leader = Leader(tmp_path, 2)
    leader.attempt(0, (0, 1))
    ended = [RankExit(2, -9), RankExit(3, None, "the server was killed")]
    thread = start(ended=ended)
    soon(lambda: leader.exits(1))
    assert leader.exits(1) == ended
    for damaged in (
        "",
        "[1]",
        '{"run": 1}',
        (tmp_path / "machine-1.json").read_text().replace('"rank": 2', '"rank": "x"'),
    ):
        (tmp_path / "machine-1.json").write_text(damaged)
        assert leader.exits(1) == []
    leader.attempt(1, (0, 1))
    assert leader.exits(1) == []
    leader.finish(0)
    thread.join(30)


def test_a_machine_that_cannot_start_its_ranks_says_so_and_starts_those_of_the_next_attempt(tmp_path, machine):
    start, log, codes = machine
    leader = Leader(tmp_path, 2)
    leader.attempt(0, (0, 1))
    thread = start(refused={0: OSError(errno.ENOSPC, "No space left on device")})
    soon(lambda: leader.exits(1))
    note = "machine 1 could not start its ranks: [Errno 28] No space left on device"
    assert leader.exits(1) == [RankExit(2, None, note), RankExit(3, None, note)]
    leader.attempt(1, (0, 1))
    soon(lambda: ("start", 1) in log)
    assert leader.exits(1) == []
    leader.finish(0)
    thread.join(30)
    assert codes == [0]


def test_an_elastic_run_goes_on_without_a_machine_that_cannot_start_its_ranks_twice_in_a_row(tmp_path, machine):
    start, log, codes = machine
    full = OSError(errno.ENOSPC, "No space left on device")
    leader = Leader(tmp_path, 2)
    thread = start(elastic=True, refused={0: full, 2: full, 3: full})
    for number in range(4):
        assert leader.call(20.0) == (0, 1)
        leader.attempt(number, (0, 1))
        soon(lambda number=number: ("start", number) in log or leader.exits(1))
    assert leader.call(0.5) == (0,)
    thread.join(30)
    assert "could not start its ranks: [Errno 28] No space left on device, twice in a row: the run goes on" in codes[0]


@pytest.mark.parametrize("elastic", [False, True])
def test_a_machine_with_a_rank_that_cannot_be_killed_says_so_or_is_left_out(tmp_path, machine, elastic):
    start, log, codes = machine
    leader = Leader(tmp_path, 2)
    leader.attempt(0, (0, 1))
    thread = start(elastic=elastic, stuck=True)
    soon(lambda: log)
    if elastic:
        assert leader.call(0.5) == (0,)
        thread.join(30)
        assert codes == ["SIGKILL has not ended rank 2"]
        return
    leader.attempt(1, (0, 1))
    soon(lambda: leader.exits(1))
    assert leader.exits(1)[1].note == "machine 1 could not start its ranks: SIGKILL has not ended rank 2"
    leader.finish(1)
    thread.join(30)
    assert codes == [1]


def test_a_machine_whose_ranks_take_long_to_end_is_waited_for(tmp_path, machine, monkeypatch):
    start, log, codes = machine
    now, ended = [0.0], threading.Event()

    class Leads(Leader):
        def touch(self):  # between two looks
            super().touch()
            now[0] += 0.1
            os.utime(tmp_path / "machine-1.lease.json", (now[0], now[0]))
            if now[0] > 3.0:
                ended.set()

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep, time=time.time)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(StandIn, "end", lambda ranks: log.append(("end", ranks.number)) if ended.wait(60) else None)
    leader = Leads(tmp_path, 2)
    leader.attempt(0, (0, 1))
    thread = start(elastic=True)
    soon(lambda: log)
    assert leader.call(1.0) == (0, 1)
    assert log == [("start", 0), ("end", 0)]
    leader.finish(0)
    thread.join(30)
    assert codes == [0]


def test_machines_that_answer_a_call_take_part_and_one_that_comes_back_is_seen(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(module, "_TOUCH_S", 0.05)
    start, log, codes = machine
    leader = Leader(tmp_path, 2)
    assert leader.call(0.05) == (0,)
    leader.attempt(0, (0,))
    assert leader.present() == (0,)
    thread = start(elastic=True)
    soon(lambda: leader.present() == (0, 1))  # idle, while the attempt runs without it
    assert log == []
    assert leader.call(20.0) == (0, 1)
    leader.attempt(1, (0, 1))
    soon(lambda: ("start", 1) in log)
    assert leader.call(20.0) == (0, 1)  # it ended what it ran before it answered
    assert log == [("start", 1), ("end", 1)]
    leader.finish(0)
    thread.join(30)
    assert codes == [0]
    monkeypatch.setattr(module, "_FRESH_S", 0.0)
    leader.present()
    assert leader.present() == (0,)  # nothing new from a machine that is gone


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 9999, '{"run": "x"}', '{"run": 1, "attempt": "a"}', "\x00"])
def test_a_torn_or_strange_announcement_is_passed_over(tmp_path, machine, text):
    start, log, codes = machine
    (tmp_path / FILE_NAME).write_text(text)
    thread = start()
    time.sleep(0.1)
    leader = Leader(tmp_path, 2)
    leader.attempt(0, (0, 1))
    soon(lambda: ("start", 0) in log)
    (tmp_path / FILE_NAME).write_text(text)
    time.sleep(0.05)
    leader.finish(0)
    thread.join(30)
    assert codes == [0]


def test_several_machines_need_a_place_to_meet():
    with pytest.raises(ValueError, match="host:port of machine 0"):
        LaunchConfig(launcher="machines", nnodes=2)


def test_a_meeting_place_that_is_taken_is_refused_before_any_rank_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ValueError, match=f"launch.endpoint='{endpoint}' cannot be used on this machine: Address al"
        ):
            listen_at(endpoint)
    with listen_at("localhost:0") as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    with pytest.raises(ValueError, match="cannot be used on this machine"):
        listen_at("no-such-host.invalid:29500")


@pytest.mark.parametrize(("name", "address"), [("here", "127.0.1.1"), ("router", "192.0.2.1")])
def test_where_others_reach_the_machine_by_another_address_it_listens_on_all(monkeypatch, name, address):
    """A machine's own name may lead to 127.0.1.1, the endpoint of a service to its router."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: found)
    with listen_at(f"{name}:0") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_the_launcher_that_is_gone_names_the_one_to_use():
    with pytest.raises(
        ValueError, match=r'launcher = "torchrun": is now .machines. on several machines and .local. on one'
    ):
        load_config("debug", ["--launch.launcher", "torchrun"])


def test_ranks_meet_at_an_ipv6_address_in_brackets():
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listen_at("[::1]:0"))
        except ValueError:
            pytest.skip("this machine has no IPv6")
        endpoint = f"[::1]:{listener.getsockname()[1]}"
        ranks = [RankInfo(rank, 0, 2, 1, "cpu", endpoint) for rank in range(2)]
        first, second = (_tcp_store(info, timedelta(seconds=2), listener if info.rank == 0 else None) for info in ranks)
        first.set("said by", "rank 0")
        assert second.get("said by") == b"rank 0"
