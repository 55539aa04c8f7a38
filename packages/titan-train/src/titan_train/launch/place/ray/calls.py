"""Watching nodes through their agents: a tree of long calls, and a node that falls silent is asked itself.

Each agent holds one call open and answers it when something changed, or after 0.5 s: that answer says that it lives.
With more than 32 nodes the first agent of each group watches the others and answers for all of them, so the driver of
1,000 nodes has 32 calls open. Each attempt has a new tree; a lost leader ends the attempt like any lost node.

A broken connection is seen at once. A node that loses power breaks none: when an answer is 0.3 s overdue, its raylet is
asked for a connection, all silent nodes at once. Refused means lost, now. Accepted means busy: the kernel accepts for a
process that has no time, so nothing follows for half a minute. No reply means that the packet was lost, or the node: it is
asked again, and a node that leaves three requests in a row without reply counts as lost, 1.4 s after its last answer. A
packet is lost once in a thousand on a poor network; three of them in a row, to a node that had just missed its answer, are
not expected in years of 1,000 nodes. A switch that pauses for longer looks like a dead node:
``launch.ray.unreachable_s`` waits for it.
"""

import errno
import math
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from titan_train.launch.place.ray.mailbox import News, NodeNews

ANSWER_S = 0.5  # an agent answers at least this often
_DIRECT = 32  # nodes that the driver watches itself
_OVERDUE_S = 0.2
_PROBE_S = 0.2  # a reply takes a millisecond in a data center
_PROBES = 3  # without reply, one after the other
_BUSY_S = 30.0


@dataclass(slots=True, eq=False)
class RayAgent:
    """A node's actor, as those see it who call it."""

    handle: Any
    """Ray's handle of the actor."""
    address: str
    node_id: str
    raylet: tuple[str, int] = ("", 0)
    """Address and port of the process of Ray that every node has."""
    lost: bool = False
    stuck: bool = False
    """A rank there cannot be killed."""

    @property
    def name(self) -> str:
        """For messages: the node's address and the start of its id."""
        return f"node {self.address} ({self.node_id[:8]})"


def groups(nodes: int) -> list[range]:
    """Who watches whom: the driver watches the first node of each range, and that node the rest of it."""
    size = 1 if nodes <= _DIRECT else math.isqrt(nodes - 1) + 1
    return [range(first, min(first + size, nodes)) for first in range(0, nodes, size)]


class Watch:
    """Some agents, each with one call open. For one thread."""

    def __init__(
        self, ray: Any, children: Mapping[int, RayAgent], output_from: int = 0, unreachable_s: float = 0.0
    ) -> None:
        """Watch ``children``, by their nodes' numbers in the attempt.

        Args:
            ray: The module, connected.
            children: Whom to watch.
            output_from: Bytes of rank 0's output that are known already.
            unreachable_s: Seconds from its last answer until a node that nothing comes back from counts as lost; at least
                as long as three questions take.
        """
        self._ray = ray
        self._probes = max(_PROBES, round((unreachable_s - ANSWER_S - _OVERDUE_S) / _PROBE_S))
        self._unanswered: dict[int, int] = {}
        self._children = children
        self._versions = dict.fromkeys(self._children, 0)
        self._open: dict[Any, int] = {}
        self._asked: dict[int, float] = {}
        self._probed: dict[int, float] = {}
        self._lost: set[int] = set()
        self.output_from = output_from
        self.output = b""
        """What rank 0 printed and no reader has taken yet."""

    def look(self, timeout_s: float) -> list[NodeNews]:
        """What changed; waits for it up to ``timeout_s`` seconds."""
        now = time.monotonic()
        for node, child in self._children.items():
            if node not in self._asked and node not in self._lost:
                output_from = self.output_from if node == 0 else -1
                self._open[child.handle.news.remote(self._versions[node], output_from, ANSWER_S)] = node
                self._asked[node] = now
        if not self._open:
            return []
        ready, _ = self._ray.wait(list(self._open), num_returns=1, timeout=timeout_s)
        if ready:  # and all others that are there by now
            ready, _ = self._ray.wait(list(self._open), num_returns=len(self._open), timeout=0)
        found: list[NodeNews] = []
        for reference in ready:
            found += self._take(reference)
        return found + self._overdue()

    def _take(self, reference: Any) -> list[NodeNews]:
        node = self._open.pop(reference)
        self._asked.pop(node, None)
        self._probed.pop(node, None)
        self._unanswered.pop(node, None)
        try:
            news: News = self._ray.get(reference)
        except self._ray.exceptions.RayError as err:
            return [] if node in self._lost else [self._lose(node, type(err).__name__)]
        self._versions[node] = news.version
        if node == 0:
            self.output += news.output
            self.output_from += len(news.output)
        return news.nodes

    def _overdue(self) -> list[NodeNews]:
        now = time.monotonic()
        silent = {node: now - since - ANSWER_S for node, since in self._asked.items()}
        asked = [node for node, s in silent.items() if s >= _OVERDUE_S and now >= self._probed.get(node, 0.0)]
        found: list[NodeNews] = []
        for node, answer in zip(asked, answers([self._children[node].raylet for node in asked]), strict=True):
            self._probed[node] = now + _PROBE_S
            self._unanswered[node] = self._unanswered.get(node, 0) + 1 if answer is None else 0
            if answer is False:
                found.append(self._lose(node, "nothing of Ray runs there any more"))
            elif self._unanswered[node] >= self._probes or silent[node] > _BUSY_S:
                found.append(self._lose(node, f"no answer in {time.monotonic() - now + silent[node] + ANSWER_S:.1f} s"))
        return found

    def _lose(self, node: int, why: str) -> NodeNews:
        self._lost.add(node)
        self._asked.pop(node, None)
        return NodeNews(node, lost=f"{self._children[node].name} was lost: {why}")


def answers(raylets: Sequence[tuple[str, int]]) -> list[bool | None]:
    """Whether each node takes a connection: True, False if it refuses, None if nothing comes back. All at once."""
    found: list[bool | None] = [None] * len(raylets)
    deadline = time.monotonic() + _PROBE_S
    with selectors.DefaultSelector() as waiting:
        for number, (host, port) in enumerate(raylets):
            probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            probe.setblocking(False)
            error = probe.connect_ex((host, port))
            if error == errno.EINPROGRESS:
                waiting.register(probe, selectors.EVENT_WRITE, number)
            else:
                found[number] = _meaning(error)
                probe.close()
        try:
            while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left_s):
                    probe = cast("socket.socket", key.fileobj)
                    found[key.data] = _meaning(probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                    waiting.unregister(probe)
                    probe.close()
        finally:
            for key in list(waiting.get_map().values()):
                cast("socket.socket", key.fileobj).close()
    return found


def _meaning(error: int) -> bool | None:
    """An error number of a connection as `answers` means it."""
    return True if error == 0 else False if error == errno.ECONNREFUSED else None


def raylets(nodes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, int]]:
    """Where each node's raylet listens, by node id."""
    return {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes}
