"""Several machines under launcher `torchrun`: three commands on loopback, as three machines would run them."""

import contextlib
import os
import random
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from isolated import wait_for


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
        self.settings = ("--launcher", "torchrun", "--launch.nproc", "1", "--launch.nnodes", str(count))
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
def test_two_machines_have_the_losses_of_one(job, undisturbed):
    machines = Machines(job, "two-machines", 2)
    try:
        codes = [machines.running[machine].wait(timeout=800) for machine in (0, 1)]
    finally:
        machines.end()
    assert codes == [0, 0], machines.told() + machines.file(1).read_text()
    assert job.losses("two-machines") == undisturbed
