"""What the nodes of a run report, and how reports of many nodes become one message. No Ray in here.

Problem: a driver that asks each of 1,000 nodes ten times a second does nothing else.

Idea: a node reports when something changed. Its `Mailbox` keeps the latest state of each node behind it, with a version;
a reader names the version that it has and gets what is newer. Losing a message, asking twice, or asking from a new
process therefore loses nothing. What ends an attempt is passed on at once; heartbeats are collected for a second.
"""

import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from titan_train.launch.job import RankExit
from titan_train.launch.rank.heartbeat import Beat, Phase

_BEAT = struct.Struct("<iiBqqddd")  # rank, pid, phase, step, from_step, age, step_s, alone_s
_COLLECT_S = 0.03  # ranks of a node, or nodes of a rack, often fail together


@dataclass(frozen=True, slots=True)
class NodeNews:
    """The latest state of one node in the running attempt."""

    node: int
    """Its number in the attempt; it holds ``ranks_per_node`` consecutive ranks."""
    beats: bytes = b""
    """The heartbeats of its ranks, packed."""
    exits: tuple[RankExit, ...] = ()
    """All of its ranks that have ended."""
    lost: str = ""
    """Why nothing more will come from this node."""
    age_s: float = 0.0
    """How long ago this was true."""

    def urgent_after(self, before: "NodeNews | None") -> bool:
        """Whether it must not wait for the next collection: a rank ended, the node is lost, or a rank changed phase."""
        if before is None:
            return bool(self.exits or self.lost)
        return self.exits != before.exits or self.lost != before.lost or _phases(self.beats) != _phases(before.beats)


@dataclass(frozen=True, slots=True)
class News:
    """The answer of a mailbox."""

    version: int
    nodes: list[NodeNews] = field(default_factory=list[NodeNews])
    output: bytes = b""
    """What rank 0 printed since it was last asked for, if it is on this node."""


class Mailbox:
    """The latest state of some nodes; written by one thread or several, read by whoever watches them."""

    def __init__(self, pace_s: float) -> None:
        """Start empty.

        Args:
            pace_s: Seconds between two answers that hold nothing urgent.
        """
        self._pace_s = pace_s
        self._changed = threading.Condition()
        self._version = self._urgent = 0
        self._nodes: dict[int, tuple[int, float, NodeNews]] = {}  # node -> version, when, state
        self._next_s = 0.0

    def put(self, news: NodeNews) -> None:
        """Replace what is known of a node."""
        with self._changed:
            before = self._nodes.get(news.node)
            self._version += 1
            self._nodes[news.node] = (self._version, time.monotonic(), news)
            if news.urgent_after(before and before[2]):
                self._urgent = self._version
            self._changed.notify_all()

    def take(self, after: int, timeout_s: float) -> News:
        """What is newer than version ``after``; waits for it up to ``timeout_s`` seconds, then answers with nothing.

        Args:
            after: The version of the answer before; 0 for everything.
            timeout_s: How long to wait.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (now := time.monotonic()) < deadline and self._urgent <= after:
                wait_s = deadline - now
                if self._version > after:
                    if now >= self._next_s:
                        break
                    wait_s = min(wait_s, self._next_s - now)
                self._changed.wait(wait_s)
            if self._urgent > after:
                self._changed.wait_for(lambda: False, _COLLECT_S)
            now = time.monotonic()
            self._next_s = now + self._pace_s
            found = [
                replace(news, age_s=news.age_s + now - since)
                for version, since, news in self._nodes.values()
                if version > after
            ]
            return News(self._version, found)


def pack_beats(beats: Mapping[int, Beat]) -> bytes:
    """Heartbeats as bytes: 53 a rank."""
    return b"".join(
        _BEAT.pack(rank, b.pid, b.phase, b.step, b.from_step, b.age_s, b.step_s, b.alone_s) for rank, b in beats.items()
    )


def unpack_beats(packed: bytes, older_s: float = 0.0) -> Iterable[tuple[int, Beat]]:
    """The inverse of `pack_beats`, every beat ``older_s`` seconds older."""
    for rank, pid, phase, step, from_step, age_s, step_s, alone_s in _BEAT.iter_unpack(packed):
        yield rank, Beat(pid, Phase(phase), step, age_s + older_s, step_s, alone_s, from_step)


def alike(one: Mapping[int, Beat], other: Mapping[int, Beat]) -> bool:
    """Whether two readings say the same, apart from their age."""
    return one.keys() == other.keys() and all(
        replace(one[rank], age_s=other[rank].age_s) == other[rank] for rank in one
    )


def _phases(packed: bytes) -> list[tuple[int, bool]]:
    """Phase of each rank, and whether it has made a step."""
    return [(values[2], values[6] > 0) for values in _BEAT.iter_unpack(packed)]
