"""The ranks of one attempt on a Ray cluster."""

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from titan_train.launch.job import RankExit
from titan_train.launch.node.agent import KILL_S
from titan_train.launch.place.ray.calls import RayAgent, Watch, groups
from titan_train.launch.place.ray.mailbox import NodeNews, unpack_beats
from titan_train.launch.rank.heartbeat import Beat
from titan_train.launch.rank.orders import Order

END_S = KILL_S + 30.0
"""Seconds for an agent to kill its ranks."""


class RayJob:
    """The ranks of one attempt."""

    def __init__(
        self,
        ray: Any,
        agents: Sequence[RayAgent],
        per_node: int,
        *,
        term: str = "",
        printed: int = 0,
        unreachable_s: float = 0.0,
    ) -> None:
        """Watch ranks that run already.

        Args:
            ray: The module, connected.
            agents: One per node, in the order of their ranks.
            per_node: Ranks on each node.
            term: The supervisor's, which the actors obey.
            printed: Bytes of rank 0's output that are not to be shown again.
            unreachable_s: As in `titan_train.config.launch.RayConfig`.
        """
        self._ray = ray
        self._agents = agents
        self._per_node = per_node
        self._term = term
        self._known: dict[int, tuple[float, NodeNews]] = {}  # node -> when it was received, what
        self._reported: set[int] = set()  # ranks whose end is reported
        for group in groups(len(agents)):
            if len(group) > 1:
                agents[group[0]].handle.lead.remote({node: agents[node] for node in group[1:]}, unreachable_s)
        leaders = {group[0]: agents[group[0]] for group in groups(len(agents))}
        self._watch = Watch(ray, leaders, printed, unreachable_s)

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.RunningJob`."""
        deadline = time.monotonic() + timeout_s
        while True:
            found: list[RankExit] = []
            for news in self._watch.look(max(0.0, deadline - time.monotonic())):
                found += self._take(news)
            if output := self._watch.output:
                whole = output.rpartition(b"\n")[0] + b"\n" if b"\n" in output else b""
                self._watch.output = output[len(whole) :]
                print(whole.decode("utf-8", errors="replace"), end="", flush=True)
            if found or time.monotonic() >= deadline:
                return found

    def beats(self) -> dict[int, Beat]:
        """See `titan_train.launch.job.RunningJob`. Progress is at most two seconds old, and its age is known."""
        now = time.monotonic()
        found: dict[int, Beat] = {}
        for node, (received, news) in self._known.items():
            if not self._agents[node].lost:
                found.update(unpack_beats(news.beats, news.age_s + now - received))
        return found

    def order(self, order: Order) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        for agent in self._agents:
            if not agent.lost:
                agent.handle.order.remote(order.name, self._term)

    def node_of(self, rank: int) -> str:
        """The node's address and the start of its id."""
        agent = self._agents[rank // self._per_node]
        return f"node {agent.address} {agent.node_id[:8]}"

    def end(self) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        calls = {agent.handle.end.remote(self._term): agent for agent in self._agents if not agent.lost}
        ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=END_S) if calls else ([], [])
        for call in ready:
            with contextlib.suppress(self._ray.exceptions.RayError):  # the node is gone, as the next attempt will see
                if stuck := self._ray.get(call):
                    calls[call].lost = calls[call].stuck = True
                    print(f"note     {calls[call].name}: {stuck}", file=sys.stderr, flush=True)

    def _take(self, news: NodeNews) -> list[RankExit]:
        """Keep the news of a node; its ranks that have ended since the last."""
        exits = news.exits
        if news.lost:
            self._agents[news.node].lost = True
            ranks = range(news.node * self._per_node, (news.node + 1) * self._per_node)
            exits = tuple(RankExit(rank, None, news.lost) for rank in ranks)
        else:
            self._known[news.node] = (time.monotonic(), news)
        fresh = [exit for exit in exits if exit.rank not in self._reported]
        self._reported |= {exit.rank for exit in fresh}
        return fresh
