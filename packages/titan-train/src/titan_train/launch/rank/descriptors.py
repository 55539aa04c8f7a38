"""Open files of a rank: gloo's connections are counted before groups are made, and the limit is raised where it may be.

Problem: gloo connects every pair of a group when the group is made, one descriptor per peer and group. A run has three
groups of all ranks, so that the usual limit of 1024 open files is passed near 340 ranks, with an error of gloo's about a
failed connection.

Idea: have gloo connect a pair when it first talks (torch's ``TORCH_GLOO_LAZY_INIT``). Rings and trees talk to few peers;
only rank 0, where the store listens and gathers arrive, talks to many. What is still needed is compared with the limit.
"""

import os
import platform

_GROUPS_OF_ALL = 3  # the default group, the mesh's, the checkpointer's
_OWN = 256  # libraries, logs, token shards, a checkpoint's files
_LAZY = "TORCH_GLOO_LAZY_INIT"


def connect_when_needed() -> None:
    """Have gloo connect a pair at its first message. Before the first process group; a setting of the user's is kept."""
    os.environ.setdefault(_LAZY, "1")


def open_files_needed(rank: int, world_size: int) -> int:
    """Descriptors that a rank may hold at once."""
    peers = world_size - 1
    if os.environ.get(_LAZY) != "1":
        return _OWN + _GROUPS_OF_ALL * peers + (peers if rank == 0 else 0)
    near = 2 * peers.bit_length() + 2  # a tree's and a ring's
    return _OWN + _GROUPS_OF_ALL * near + (2 * peers if rank == 0 else 0)


def allow_open_files(needed: int) -> None:
    """Raise this process's soft limit to ``needed`` if it is lower.

    Raises:
        ValueError: The hard limit does not allow it; the message says how to raise that.
    """
    try:
        import resource
    except ImportError:  # no such limit on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"a rank on {platform.node()} may need {needed} open files (connections to the other ranks), but the hard limit "
            f"there is {hard}. Raise it: `ulimit -Hn {needed}` before the launcher starts, LimitNOFILE= of its systemd "
            "service, or nofile in /etc/security/limits.conf."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
