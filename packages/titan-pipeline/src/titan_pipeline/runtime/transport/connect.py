"""Sockets between the ranks of one machine, and which transport a group of ranks gets.

Each rank listens in a folder that only its user may enter, says where over the group, and connects to the ranks below it.
Whether every rank could is agreed before anyone relies on it: ranks on several machines, or in containers that share no
files, get gloo.
"""

import os
import platform
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from titan_pipeline.runtime.transport.gloo import GlooTransport
from titan_pipeline.runtime.transport.sockets import SocketTransport

_ADDRESS_LENGTH = 512
"""Bytes of a machine's name and a path."""
_CONNECT_S = 60.0
"""A rank that has said where it listens answers at once, unless its machine swaps."""


def host_transport(group: dist.ProcessGroup | None = None) -> SocketTransport | GlooTransport:
    """The cheapest way through host memory: sockets where all ranks are on one machine, gloo elsewhere.

    Collective over the group.

    Args:
        group: The pipeline's group; None for the default group. Its backend must serve CPU tensors.

    Raises:
        ValueError: If the group has no CPU backend.
    """
    slow = GlooTransport(group)
    sockets = _connected(slow.rank, slow.num_ranks, group) if slow.num_ranks > 1 else None
    if sockets is None:
        return slow
    return SocketTransport(slow.rank, sockets, slow.board)


def _connected(rank: int, size: int, group: dist.ProcessGroup | None) -> dict[int, socket.socket] | None:
    """A socket to each other rank of the group; None on every rank if any lacks one."""
    sockets: dict[int, socket.socket] = {}
    with tempfile.TemporaryDirectory(prefix="titan-pipeline-", ignore_cleanup_errors=True) as folder:
        listener = _listener(Path(folder, "s"), size)
        try:
            address = b"" if listener is None else f"{_machine()}\n{folder}/s".encode()
            texts = _exchange(address.ljust(_ADDRESS_LENGTH, b"\0"), size, group)
            addresses = [text.rstrip(b"\0").decode() for text in texts]
            machines = {text.partition("\n")[0] for text in addresses}
            fine = listener is not None and len(address) <= _ADDRESS_LENGTH and len(machines) == 1
            if fine:
                with suppress(OSError):
                    for other in range(rank):
                        sockets[other] = _called(addresses[other].partition("\n")[2], rank)
            fine = fine and len(sockets) == rank
            if not all(text == b"\1" for text in _exchange(b"\1" if fine else b"\0", size, group)):
                for one in sockets.values():
                    one.close()
                return None
            assert listener is not None
            for _ in range(rank + 1, size):
                one, _ = listener.accept()
                one.settimeout(_CONNECT_S)
                sockets[int.from_bytes(one.recv(4), "little")] = one
        finally:
            if listener is not None:
                listener.close()
    return sockets


def _listener(path: Path, backlog: int) -> socket.socket | None:
    if not hasattr(socket, "AF_UNIX"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(backlog)
        listener.settimeout(_CONNECT_S)
    except OSError:  # a path that is too long, or a file system without sockets
        listener.close()
        return None
    return listener


def _called(path: str, rank: int) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.settimeout(_CONNECT_S)
        one.connect(path)
        one.sendall(rank.to_bytes(4, "little"))
    except OSError:
        one.close()
        raise
    return one


def _machine() -> str:
    """Names a machine as it runs now: host names alone may be the same in two containers."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        booted = ""
    return f"{platform.node()} {booted} {os.getuid()}"


def _exchange(mine: bytes, size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    mine = mine[:_ADDRESS_LENGTH]
    texts = [torch.empty(len(mine), dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(texts, torch.tensor(list(mine), dtype=torch.uint8), group=group)
    return [bytes(text.tolist()) for text in texts]
