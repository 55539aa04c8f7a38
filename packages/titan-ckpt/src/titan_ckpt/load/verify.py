"""Which rank checks which block of a step.

Ranks of one machine that map one file see the same pages of memory, so a block that several of them read needs to be
checked by one of them only: when columns are read, every rank's slice crosses every block of the tensor. Ranks of other
machines check for themselves, since their memory, and the way to it, is their own.
"""

import json
import socket
from collections.abc import Iterable
from pathlib import Path

from titan_ckpt.storage.paths import StorePath

Block = tuple[int, int]
"""File of the index, and the block's number in it."""


def assign_blocks(mine: Iterable[Block], told: list[bytes], rank: int) -> set[Block]:
    """The blocks that ``rank`` is to check, of those it reads: on each machine one of its readers checks a block.

    Args:
        mine: The blocks that this rank reads.
        told: What `tell_blocks` gave on each rank, in rank order.
        rank: This rank.
    """
    said = [json.loads(reply) for reply in told]
    mates = [i for i, reply in enumerate(said) if reply["memory"] == said[rank]["memory"]]
    readers: dict[Block, list[int]] = {block: [] for block in mine}
    for mate in mates:
        for block in _expand(said[mate]["runs"]):
            if block in readers:
                readers[block].append(mate)
    # by the block's number, so that neighbours of a file go to different ranks
    return {block for block, those in readers.items() if those[(block[0] + block[1]) % len(those)] == rank}


def tell_blocks(blocks: Iterable[Block], path: StorePath, rank: int) -> bytes:
    """What a rank lets the others know: the blocks it reads, and in which memory it sees them."""
    return json.dumps({"memory": _memory(path, rank), "runs": block_runs(blocks)}).encode()


def block_runs(blocks: Iterable[Block]) -> list[list[int]]:
    """Neighbouring blocks together, as ``[file, first, last]``, in order."""
    runs: list[list[int]] = []
    for file, block in sorted(blocks):
        if runs and runs[-1][0] == file and runs[-1][2] == block - 1:
            runs[-1][2] = block
        else:
            runs.append([file, block, block])
    return runs


def _memory(path: StorePath, rank: int) -> list[str | int]:
    """Equal on two ranks if they map the same pages: one machine, one file system, one folder."""
    if not isinstance(path, Path):
        return [rank]  # what comes over the network comes to each rank by itself
    boot = Path("/proc/sys/kernel/random/boot_id")
    found = path.stat()
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return [machine, found.st_dev, found.st_ino]


def _expand(runs: Iterable[list[int]]) -> Iterable[Block]:
    return ((file, block) for file, first, last in runs for block in range(first, last + 1))
