"""Reports of a thousand nodes as few messages: the mailbox, the watch over agents, the choice of nodes. Without Ray."""

import contextlib
import errno
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from titan_train.config import LaunchConfig
from titan_train.config.launch import RayConfig
from titan_train.launch.job import RankExit
from titan_train.launch.place.ray import actor as agent_module
from titan_train.launch.place.ray import calls as module
from titan_train.launch.place.ray import driver as driver_module
from titan_train.launch.place.ray.calls import RayAgent, Watch, groups
from titan_train.launch.place.ray.job import RayJob
from titan_train.launch.place.ray.launcher import RayLauncher
from titan_train.launch.place.ray.mailbox import Mailbox, News, NodeNews, alike, pack_beats, unpack_beats
from titan_train.launch.place.ray.nodes import RayNodes
from titan_train.launch.place.ray.topology import order, selectors
from titan_train.launch.rank.heartbeat import Beat, Phase


def beat(step, phase=Phase.TRAIN, step_s=1.0, age_s=0.0):
    return Beat(100, phase, step, age_s, step_s, 0.5, 0)


def progress(node, step, **words):
    return NodeNews(node, pack_beats({node: beat(step, **words)}))


def test_heartbeats_travel_whole_and_grow_older_on_the_way():
    beats = {7: beat(3), 8: Beat(101, Phase.SAVE, 4, 1.25, 0.0, 0.0, -1)}
    assert dict(unpack_beats(pack_beats(beats))) == beats
    assert dict(unpack_beats(pack_beats(beats), 2.0))[8].age_s == 3.25
    assert alike(beats, {7: beat(3, age_s=9.0), 8: beats[8]})
    assert not alike(beats, {7: beat(4), 8: beats[8]})


def test_a_reader_gets_what_is_newer_than_his_version_and_losing_an_answer_loses_nothing():
    box = Mailbox(pace_s=0.0)
    box.put(progress(0, 1))
    box.put(progress(1, 1))
    first = box.take(0, 0.0)
    assert [news.node for news in first.nodes] == [0, 1]
    box.put(progress(1, 2))
    second = box.take(first.version, 0.0)
    assert [news.node for news in second.nodes] == [1]
    assert len(box.take(0, 0.0).nodes) == 2  # a new reader, or one whose answer was lost
    assert box.take(second.version, 0.01) == News(second.version)


def test_progress_is_collected_and_a_failure_is_passed_on_at_once():
    box = Mailbox(pace_s=1000.0)
    box.put(progress(0, 1))
    version = box.take(0, 1.0).version  # the first word of a node
    box.put(progress(0, 2))
    assert box.take(version, 0.1).nodes != []  # time is up: what is there
    began, version = time.monotonic(), box.take(0, 0.0).version
    threading.Timer(0.1, lambda: box.put(NodeNews(0, exits=(RankExit(0, -9),)))).start()
    news = box.take(version, 100.0)
    assert news.nodes[0].exits == (RankExit(0, -9),)
    assert time.monotonic() - began < 100.0


@pytest.mark.parametrize("nodes", [1, 2, 32, 33, 100, 1000, 4001])
def test_every_node_is_watched_once_and_nobody_watches_many(nodes):
    made = groups(nodes)
    assert [node for group in made for node in group] == list(range(nodes))
    assert len(made) + max(map(len, made)) <= max(33, 2 * nodes**0.5 + 3)


class FakeRay:
    """Agents in this process: a call is a future, `wait` and `get` are as Ray's."""

    class exceptions:
        class RayError(Exception):
            pass

    def wait(self, calls, num_returns, timeout):
        deadline = time.monotonic() + timeout
        while not (ready := [call for call in calls if call.result is not None]) and time.monotonic() < deadline:
            time.sleep(0.005)
        return ready[:num_returns], []

    def get(self, call):
        if isinstance(call.result, Exception):
            raise call.result
        return call.result


class FakeAgent:
    def __init__(self):
        self.calls, self.news = [], self

    def remote(self, after, output_from, timeout_s):
        self.calls.append(type("Call", (), {"result": None, "after": after})())
        return self.calls[-1]


def watched(*agents, raylet=("127.0.0.1", 1)):
    children = {node: RayAgent(agent, "10.0.0.1", f"n{node}", raylet) for node, agent in enumerate(agents)}
    return Watch(FakeRay(), children)


def test_one_call_is_open_for_each_agent_and_a_broken_one_loses_the_node_once():
    one, two = FakeAgent(), FakeAgent()
    watch = watched(one, two)
    assert watch.look(0.0) == []
    one.calls[0].result = News(4, [progress(0, 1)])
    two.calls[0].result = FakeRay.exceptions.RayError()
    found = {news.node: news.lost for news in watch.look(1.0)}
    assert found == {0: "", 1: "node 10.0.0.1 (n1) was lost: RayError"}
    watch.look(0.0)
    assert [call.after for call in one.calls] == [0, 4]
    assert len(two.calls) == 1


def test_a_silent_node_is_asked_itself(monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.0)
    monkeypatch.setattr(module, "_OVERDUE_S", 0.05)
    monkeypatch.setattr(module, "_BUSY_S", 1e9)
    gone = watched(FakeAgent())
    while not (found := gone.look(0.01)):
        pass
    assert [news.lost for news in found] == ["node 10.0.0.1 (n0) was lost: nothing of Ray runs there any more"]
    monkeypatch.setattr(module, "_BUSY_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        began, busy = time.monotonic(), watched(FakeAgent(), raylet=raylet.getsockname())
        while not (found := busy.look(0.01)):
            pass
    assert time.monotonic() - began >= 0.4
    assert "no answer in" in found[0].lost


@contextlib.contextmanager
def black_hole():
    """An address that no reply comes from, as of a machine without power: its queue of connections is full."""
    with socket.socket() as listening, contextlib.ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(3):
            probe = waiting.enter_context(socket.socket())
            probe.setblocking(False)
            probe.connect_ex(listening.getsockname())
        yield listening.getsockname()


def test_a_node_that_nothing_comes_back_from_is_asked_three_times_and_lost(monkeypatch):
    asked = []
    ask = module.answers
    monkeypatch.setattr(module, "answers", lambda raylets: asked.append(ask(raylets)) or asked[-1])
    with black_hole() as raylet:
        watch = watched(FakeAgent(), FakeAgent(), raylet=raylet)  # a rack without power: its nodes are asked at once
        found = []
        while len(found) < 2:
            found += watch.look(0.01)
    assert [one.node for one in found] == [0, 1]
    assert "no answer in" in found[0].lost
    assert [answer for answer in asked if answer] == [[None, None]] * 3


def test_a_node_that_answers_between_two_questions_is_not_lost(monkeypatch):
    replies = iter([[None], [None], [True], [None], [None], [True]])
    monkeypatch.setattr(module, "answers", lambda raylets: next(replies) if raylets else [])
    monkeypatch.setattr(module, "ANSWER_S", 0.0)
    monkeypatch.setattr(module, "_PROBE_S", 0.001)
    watch = watched(FakeAgent())
    found = []
    with contextlib.suppress(StopIteration):
        while True:
            found += watch.look(0.01)
    assert found == []


def test_a_longer_patience_asks_more_often():
    assert Watch(FakeRay(), {})._probes == Watch(FakeRay(), {}, unreachable_s=1.4)._probes == 3
    assert Watch(FakeRay(), {}, unreachable_s=10.0)._probes == 46


def test_a_job_is_put_into_the_smallest_domain_that_holds_it():
    nodes = [{"rack": f"r{i // 4}", "nvlink": f"d{i // 2}"} for i in range(8)]
    topology = ("rack", "nvlink")
    assert selectors(topology, nodes, 2)[0] == {"nvlink": "d0"}
    assert selectors(topology, nodes, 4)[0] == {"rack": "r0"}
    assert selectors(topology, nodes, 6)[-2:] == [{"rack": "in(r0,r1)"}, {}]
    assert selectors(topology, nodes, 1, held=[nodes[5]])[0] == {"nvlink": "in(d2)"}  # a replacement stays near
    assert selectors((), nodes, 8) == [{}]
    assert selectors(topology, [{}, {}], 2) == [{}]  # nobody labelled anything


def test_nodes_are_numbered_along_their_domains():
    nodes = [("10.0.0.9", {"rack": "a"}), ("10.0.0.10", {"rack": "b"}), ("10.0.0.2", {"rack": "b"}), ("10.0.0.1", {})]
    ordered = sorted(nodes, key=lambda node: order(("rack",), node[1], node[0], "id"))
    assert [address for address, _ in ordered] == ["10.0.0.1", "10.0.0.9", "10.0.0.2", "10.0.0.10"]


class Led:
    """The agent of a group's first node, in this process: its mailbox answers in a thread."""

    def __init__(self):
        self.box, self.news, self.lead = Mailbox(0.3), self, self

    def remote(self, *words):
        call = type("Call", (), {"result": None})()
        if len(words) == 3:
            after, _, timeout_s = words
            threading.Thread(
                target=lambda: setattr(call, "result", self.box.take(after, timeout_s)), daemon=True
            ).start()
        return call


def test_the_driver_of_many_nodes_knows_every_rank_and_sees_a_failure_at_once():
    """benchmarks/control_plane.py measures this for 1,000 nodes."""
    leaders = {group[0]: (Led(), group) for group in groups(100)}
    of_node = {node: led for led, group in leaders.values() for node in group}
    agents = [RayAgent(of_node[node], "10.0.0.1", f"{node:08d}") for node in range(100)]
    job = RayJob(FakeRay(), agents, 8)
    for node, led in of_node.items():
        led.box.put(NodeNews(node, pack_beats({rank: beat(3) for rank in range(8 * node, 8 * node + 8)})))
    deadline = time.monotonic() + 30
    while len(job.beats()) < 800 and time.monotonic() < deadline:
        assert job.exits(0.1) == []
    assert job.beats().keys() == set(range(800))
    assert len(leaders) == 10
    began = time.monotonic()
    of_node[57].box.put(NodeNews(57, b"", tuple(RankExit(rank, -9) for rank in range(456, 464))))
    found = job.exits(100.0)
    assert [exit.rank for exit in found] == list(range(456, 464))  # one report for the node
    assert time.monotonic() - began < 100.0
    of_node[58].box.put(NodeNews(58, lost="node 10.0.0.1 was lost"))
    assert [exit.note for exit in job.exits(100.0)] == ["node 10.0.0.1 was lost"] * 8
    assert 58 * 8 not in job.beats()
    assert job.node_of(463) == "node 10.0.0.1 00000057"


def test_an_agent_obeys_the_newest_supervisor_alone(monkeypatch):
    """Ray starts a supervisor elsewhere when it believes a node lost; the one there may live on and want to grow."""
    for name in ("NodeAgent", "_Running"):
        monkeypatch.setattr(agent_module, name, lambda *_: None)
    monkeypatch.setattr(agent_module, "_own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(agent_module, "_interface_of", lambda _: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the agent takes away
    agent = agent_module.NodeActor(".", {}, "", 1, idle_s=None)
    ended, orders = [], []

    class Running:
        job = agent_module.NodeJob(0, "", "", 0, 1, 1, "cpu", "")
        ranks = type("Ranks", (), {"order": orders.append})
        end = staticmethod(lambda: ended.append(0))

    agent.start(Running.job, "first")
    agent._running = Running
    assert agent.adopt("second") == Running.job
    with pytest.raises(RuntimeError, match="another supervisor has adopted this node"):
        agent.start(Running.job, "first")
    agent.order("STOP", "first")
    agent.end("first")
    assert (orders, ended) == ([], [])
    agent.order("STOP", "second")
    agent.end("second")
    assert (len(orders), len(ended)) == (1, 1)


@pytest.mark.parametrize(("running", "limit_s"), [(True, 180.0), (False, 180.0 + 1800.0)])
def test_an_agent_of_a_run_on_a_cluster_outlasts_the_waits_of_its_driver_between_attempts(
    monkeypatch, running, limit_s
):
    asked, now = {}, [0.0]
    made = SimpleNamespace(remote=lambda *_, **words: asked.update(words))
    ray = SimpleNamespace(remote=lambda _: SimpleNamespace(options=lambda **_: made))
    launcher = RayLauncher.__new__(RayLauncher)
    launcher._ray, launcher._launch, launcher._per_node = ray, LaunchConfig(ray=RayConfig(wait_s=900)), 1
    launcher.device, launcher._prefix, launcher._start_s = "cpu", "run/", 900.0
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    launcher._start_agent("node")

    def leave(_):
        raise SystemExit

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.append(now.pop() + 30.0))
    monkeypatch.setattr(agent_module, "time", clock)
    monkeypatch.setattr(agent_module.os, "_exit", leave)
    agent = agent_module.NodeActor.__new__(agent_module.NodeActor)
    agent._heard, agent._running, agent._term = 0.0, object() if running else None, "this"
    with pytest.raises(SystemExit):
        agent._end_with_the_driver(asked["idle_s"])
    assert now == [limit_s]
    agent.ping("another")
    assert agent._heard == 0.0
    agent.ping("this")  # what its driver does between waits
    with pytest.raises(SystemExit):
        agent._end_with_the_driver(asked["idle_s"])
    assert now == [2 * limit_s]


def test_a_node_with_a_rank_that_cannot_be_killed_has_no_more(capsys):
    def agent(name, said):
        end = SimpleNamespace(remote=lambda _: type("Call", (), {"result": said})())
        return RayAgent(SimpleNamespace(end=end, news=FakeAgent()), "10.0.0.1", name)

    class Ray(FakeRay):
        def wait(self, calls, num_returns, timeout):
            return calls, []

        def nodes(self):
            return [{"NodeID": name, "Alive": True, "Resources": {}} for name in "abc"]

    agents = [agent("a", ""), agent("b", "SIGKILL has not ended rank 1"), agent("c", FakeRay.exceptions.RayError())]
    RayJob(Ray(), agents, 1).end()
    assert [found.lost for found in agents] == [False, True, False]
    assert capsys.readouterr().err == "note     node 10.0.0.1 (b): SIGKILL has not ended rank 1\n"
    launcher = RayLauncher.__new__(RayLauncher)
    launcher._ray, launcher._agents, launcher._ping = Ray(), agents, lambda: None
    launcher._nodes = RayNodes(Ray(), RayConfig(), {})
    assert launcher._living() == [agents[0], agents[2]]
    assert list(launcher._nodes.alive()) == ["a", "c"]


def test_a_supervisor_that_cannot_be_started_again_ends_the_window_with_the_reason(tmp_path, monkeypatch):
    killed = []
    ray = SimpleNamespace(
        kill=lambda *_, **__: killed.append(1),
        get_runtime_context=lambda: SimpleNamespace(current_actor=None, was_current_actor_reconstructed=False),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(driver_module, "owned_folder", lambda _: tmp_path)
    monkeypatch.setattr(driver_module, "time", SimpleNamespace(sleep=lambda _: None))
    lives = iter([SimpleNamespace(wait=lambda: -signal.SIGKILL)])

    def start(_):
        for process in lives:
            return process
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "python")

    monkeypatch.setattr(driver_module.Driver, "_start", start)
    driver = driver_module.Driver("", str(tmp_path), {}, ())
    while (shown := driver.show("", 0, 0)).exit_code is None:
        time.sleep(0.01)
    assert shown.exit_code == 1
    assert b"error: the supervisor could not be started: [Errno 2] No such file or directory: 'python'" in shown.err
    while not killed:
        time.sleep(0.01)


def test_agents_are_told_between_attempts_that_the_supervisor_is_there_and_those_that_ended_are_lost():
    class Died(Exception):
        pass

    class Ray(FakeRay):
        exceptions = SimpleNamespace(RayError=Exception, ActorDiedError=Died)

    def agent(name, result):
        pings = []
        ping = SimpleNamespace(remote=lambda term: pings.append(term) or type("Call", (), {"result": result})())
        return RayAgent(SimpleNamespace(ping=ping, pings=pings), "10.0.0.1", name)

    lives, busy, died = agent("a", True), agent("b", OSError()), agent("c", Died())
    suspects = []
    launcher = RayLauncher.__new__(RayLauncher)
    launcher._ray, launcher._agents, launcher._term = Ray(), [lives, busy, died], "this"
    launcher._nodes = SimpleNamespace(suspect=suspects.append, alive=lambda: ["a", "b", "c"])
    assert launcher._living() == [lives, busy]
    assert suspects == ["c"]
    launcher._living()
    assert (lives.handle.pings, died.handle.pings) == (["this"] * 2, ["this"])
