"""Several machines under launcher `torchrun` agree through one file; the jobs here are stand-ins."""

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

    def start(elastic=False):
        config = Config(
            launch=LaunchConfig(launcher="torchrun", nnodes=2, node_rank=1, endpoint="a:1", elastic=elastic)
        )
        thread = threading.Thread(
            target=lambda: codes.append(follow(config, tmp_path, 2, lambda attempt, place: StandIn(attempt, log)))
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
    old = Leader(tmp_path, 2)
    old.attempt(7, (0, 1))
    old.finish(0)  # an earlier start of the command, which is over
    thread = start()
    leader = Leader(tmp_path, 2)
    leader.attempt(0, (0, 1))
    wait_for(lambda: ("start", 0) in log)
    leader.order(Order.SAVE)
    wait_for(lambda: ("SAVE", 0) in log)
    leader.attempt(1, (0, 1))
    wait_for(lambda: ("start", 1) in log)
    leader.finish(1)
    thread.join(30)
    assert codes == [1]
    assert log == [("start", 0), ("SAVE", 0), ("end", 0), ("start", 1), ("end", 1)]


def test_a_machine_that_comes_late_joins_the_attempt_that_runs(tmp_path, machine):
    start, log, codes = machine
    leader = Leader(tmp_path, 2)
    leader.attempt(3, (0, 1))
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
    Leader(tmp_path, 2).attempt(2, (0, 1))
    told = json.loads((tmp_path / FILE_NAME).read_text())
    assert (told["attempt"], told["orders"], told["exit_code"]) == (2, "", None)


def test_machines_that_answer_a_call_take_part_and_one_that_comes_back_is_seen(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(module, "_TOUCH_S", 0.05)
    start, log, codes = machine
    leader = Leader(tmp_path, 2)
    assert leader.call(0.05) == (0,)
    leader.attempt(0, (0,))
    assert leader.present() == (0,)
    thread = start(elastic=True)
    wait_for(lambda: leader.present() == (0, 1))  # idle, while the attempt runs without it
    assert log == []
    assert leader.call(20.0) == (0, 1)
    leader.attempt(1, (0, 1))
    wait_for(lambda: ("start", 1) in log)
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
    wait_for(lambda: ("start", 0) in log)
    (tmp_path / FILE_NAME).write_text(text)
    time.sleep(0.05)
    leader.finish(0)
    thread.join(30)
    assert codes == [0]
