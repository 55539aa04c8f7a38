"""Several machines under launcher `torchrun` agree through one file; the jobs here are stand-ins."""

import dataclasses
import json
import threading
import time

import pytest
from titan_train.config import Config, LaunchConfig
from titan_train.launch.launchers import follow as module
from titan_train.launch.launchers.follow import FILE_NAME, Leader, follow
from titan_train.launch.rank.orders import Order


class StandIn:
    def __init__(self, attempt, log):
        self.number, self.log = attempt.number, log
        log.append(("start", self.number))

    def exits(self, timeout_s):
        return []

    def beats(self):
        return {}

    def order(self, order):
        self.log.append((order.name, self.number))

    def end(self):
        self.log.append(("end", self.number))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Run the following machine in a thread: its log, and what it returns in the end."""
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)  # only a main thread may
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    log, codes = [], []

    def start():
        config = Config(launch=dataclasses.replace(LaunchConfig(), launcher="torchrun"))
        thread = threading.Thread(
            target=lambda: codes.append(follow(config, tmp_path, 4, lambda attempt: StandIn(attempt, log)))
        )
        thread.start()
        return thread

    return start, log, codes


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_machine_follows_attempts_and_orders_to_the_end(tmp_path, machine):
    start, log, codes = machine
    old = Leader(tmp_path)
    old.attempt(7)
    old.finish(0)  # an earlier start of the command, which is over
    thread = start()
    leader = Leader(tmp_path)
    leader.attempt(0)
    wait_for(lambda: ("start", 0) in log)
    leader.order(Order.SAVE)
    wait_for(lambda: ("SAVE", 0) in log)
    leader.attempt(1)
    wait_for(lambda: ("start", 1) in log)
    leader.finish(1)
    thread.join(30)
    assert codes == [1]
    assert log == [("start", 0), ("SAVE", 0), ("end", 0), ("start", 1), ("end", 1)]


def test_a_machine_that_comes_late_joins_the_attempt_that_runs(tmp_path, machine):
    start, log, codes = machine
    leader = Leader(tmp_path)
    leader.attempt(3)
    thread = start()
    wait_for(lambda: ("start", 3) in log)
    leader.finish(0)
    thread.join(30)
    assert codes == [0]


def test_a_machine_whose_first_machine_falls_silent_gives_up(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(module, "_LEADER_GONE_S", 0.2)
    start, _, codes = machine
    start().join(30)
    assert codes == [1]


def test_what_is_told_is_json_on_disk_at_once(tmp_path):
    Leader(tmp_path).attempt(2)
    told = json.loads((tmp_path / FILE_NAME).read_text())
    assert (told["attempt"], told["orders"], told["exit_code"]) == (2, "", None)
