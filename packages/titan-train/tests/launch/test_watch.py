import io
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from titan_train.config import Config, LaunchConfig
from titan_train.launch.job import Attempt, RankExit
from titan_train.launch.rank import monitor as monitor_module
from titan_train.launch.rank import orders
from titan_train.launch.rank.heartbeat import Beat, Heartbeat, Phase, read_beat
from titan_train.launch.rank.monitor import RankMonitor
from titan_train.launch.supervise import attempt as attempt_module
from titan_train.launch.supervise.attempt import WatchedAttempt
from titan_train.launch.supervise.journal import Journal
from titan_train.launch.supervise.requests import Requests
from titan_train.launch.supervise.watch import Hang, find_hang, find_stragglers


def beat(age_s=0.1, phase=Phase.TRAIN, step_s=1.0, alone_s=0.0):
    return Beat(pid=1, phase=phase, step=7, age_s=age_s, step_s=step_s, alone_s=alone_s)


def test_a_hang_is_many_times_the_median_step_and_not_less_than_the_least():
    launch = LaunchConfig(hang_factor=10, hang_least_s=5)
    assert find_hang({0: beat(9.9), 1: beat()}, launch) is None
    found = find_hang({0: beat(10.1), 1: beat()}, launch)
    assert found is not None
    assert (found.limit_s, found.step) == (10.0, 7)
    assert find_hang({0: beat(4.9, step_s=0.01)}, launch) is None
    assert find_hang({0: beat(5.1, step_s=0.01)}, launch) is not None


def test_start_saves_and_validation_have_three_times_a_collectives_time():
    launch = LaunchConfig(hang_factor=10, hang_least_s=5, timeout_s=60)
    for phase in (Phase.STARTING, Phase.SAVE, Phase.VALIDATE, Phase.COMPILE):
        assert find_hang({0: beat(179, phase), 1: beat(59)}, launch) is None
        assert find_hang({0: beat(181, phase), 1: beat(1)}, launch) is not None
    assert find_hang({0: beat(59, step_s=0.0)}, launch) is None  # the first step may compile


def test_ended_ranks_do_not_hang_and_the_watch_can_be_turned_off():
    assert find_hang({0: beat(9999, Phase.FINISHED)}, LaunchConfig()) is None
    assert find_hang({0: beat(9999)}, LaunchConfig(hang_factor=0)) is None


def test_the_rank_that_comes_late_to_every_step_is_the_straggler():
    # rank 2 spends 2 s alone, then 1 s together; the others wait 2 s of their 3 s together
    beats = {rank: beat(step_s=3.0, alone_s=0.0) for rank in (0, 1, 3)} | {2: beat(step_s=3.0, alone_s=2.0)}
    (slow,) = find_stragglers(beats, 1.5)
    assert slow.rank == 2
    assert slow.factor == 3.0
    assert find_stragglers({rank: beat(step_s=1.0, alone_s=0.1) for rank in range(4)}, 1.5) == []
    assert find_stragglers(beats, 0) == []


def test_a_heartbeat_is_read_as_written_and_a_torn_one_not_at_all(tmp_path):
    file = tmp_path / "beat"
    assert read_beat(file) is None
    heartbeat = Heartbeat(file)
    assert read_beat(file) is None
    heartbeat.write(Phase.SAVE, 12, step_s=0.5, alone_s=0.25)
    found = read_beat(file)
    assert found is not None
    assert (found.phase, found.step, found.step_s, found.alone_s) == (Phase.SAVE, 12, 0.5, 0.25)
    assert 0 <= found.age_s < 60
    raw = bytearray(file.read_bytes())
    raw[:8] = (99).to_bytes(8, "little")  # the first word of the next reading, the rest of this one
    file.write_bytes(raw)
    assert read_beat(file) is None


def test_a_shape_that_is_compiled_in_mid_run_does_not_look_like_a_hang(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(monitor_module, "set_collective_timeout", limits.append)
    launch = LaunchConfig(timeout_s=600, step_timeout_s=120)
    file = tmp_path / "beat"

    def run(step_of):
        limits.clear()
        monitor = RankMonitor(Heartbeat(file), launch, 0, tmp_path, threading.Event())
        monitor.on_start(SimpleNamespace(timer=SimpleNamespace(delays=None), model=SimpleNamespace(parts=[])))
        for step in (1, 2, 3):
            monitor.on_batch(step, [])
            step_of(step)
            monitor.on_step(SimpleNamespace(step=step))
        with monitor.phase("checkpoint", 3):
            pass
        assert read_beat(file).phase is Phase.TRAIN
        monitor.on_end()  # closing a tracker takes as long as it takes
        assert read_beat(file).phase is Phase.SAVE
        return limits

    seen = []

    def backend(graph, _):
        seen.append(read_beat(file).phase)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    with_compiler = list(run(lambda step: compiled(torch.ones(1 if step < 3 else 7))))
    assert seen == [Phase.STARTING, Phase.COMPILE]
    assert with_compiler == [600, 600, 600, 600]  # a peer that waits set its time-out before it could know
    assert list(run(lambda step: None)) == [120, 600, 120, 600]


def watched(tmp_path, job, **words):
    journal = Journal(tmp_path / "attempts.jsonl", io.StringIO())
    attempt = Attempt(0, Config(), tmp_path, 2)
    return WatchedAttempt(attempt, job, requests=Requests(), journal=journal, lost_at=None, **words)


def test_dumps_of_an_earlier_command_explain_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_module, "_DUMP_S", 0.1)
    folder = tmp_path / "hangs" / "attempt-0"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        (folder / f"rank-{rank}.newest.json").write_text("[]")
    job = SimpleNamespace(order=lambda _: None, node_of=lambda _: "here")
    found = watched(tmp_path, job, can_grow=lambda: False)
    found._explain(Hang(9.0, 5.0, 3), progressed=True)
    assert "ranks 0, 1 did not respond" in found._outcome.ended.text


def test_an_attempt_that_fails_does_not_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_module, "_GRACE_S", 0.1)
    ends = [[RankExit(0, 1)]]
    beats = {0: beat(), 1: beat()}
    job = SimpleNamespace(exits=lambda _: ends.pop() if ends else [], beats=lambda: beats, node_of=lambda _: "here")
    found = watched(tmp_path, job, can_grow=lambda: pytest.fail("it looks for more ranks"))
    assert not found.watch().growing


def test_a_rank_whose_launcher_is_gone_ends_after_its_save(tmp_path, monkeypatch):
    heartbeat, looks, ended = Heartbeat(tmp_path / "rank-0.beat"), [], []
    heartbeat.write(Phase.SAVE, 4, step_s=100.0)
    reader, writer = os.pipe()
    os.close(writer)

    def sleep(_):
        looks.append(clock[0])
        clock[0] += 50.0
        if clock[0] == 500.0:
            heartbeat.write(Phase.TRAIN, 4, step_s=100.0)

    def ends():
        looks.clear()
        clock[0] = 0.0
        orders._listen(reader, lambda: None, threading.Event(), heartbeat)
        return clock[0]

    clock = [0.0]
    monkeypatch.setattr(orders, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(orders, "os", SimpleNamespace(read=os.read, _exit=ended.append))
    monkeypatch.setattr(orders, "_request", lambda *_: None)
    assert ends() == 750.0  # a minute and two steps after the last look at the save
    assert ends() == 300.0  # a minute and two steps
    assert ended == [1, 1]
    os.close(reader)
