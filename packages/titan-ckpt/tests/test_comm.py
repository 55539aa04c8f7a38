"""Bytes between ranks, exchanged by all of them and through the first rank of each node."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from titan_ckpt.comm import ByteComm
from titan_ckpt.errors import CheckpointError
from titan_testing import run_ranks


def exchanged(per_node):
    comm = ByteComm(ranks_per_node=per_node)
    rank = dist.get_rank()
    mine = bytes([rank]) * rank  # lengths differ, and one is empty
    error = CheckpointError("disk 3 is full") if rank == 3 else None
    try:
        comm.agree(error, "saving")
        told = ""
    except CheckpointError as err:
        told = str(err)
    first = rank == 0
    return (
        comm.gather(mine),
        comm.all_gather(mine),
        comm.scatter([b"to %d" % i for i in range(comm.size)] if first else None),
        comm.broadcast(b"from 0" if first else None),
        told,
    )


@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("per_node", [2, 3])
def test_messages_through_node_leaders_are_those_of_a_full_exchange(ranks, per_node):
    wanted = run_ranks(exchanged, ranks, None)
    assert run_ranks(exchanged, ranks, per_node) == wanted
    assert wanted[0][0] == [bytes([rank]) * rank for rank in range(ranks)]
    assert wanted[ranks - 1][2] == b"to %d" % (ranks - 1)
    assert wanted[0][4] == f"saving: rank 3 failed (1 of {ranks} ranks did): disk 3 is full"


def connections(per_node):
    """Descriptors that an exchange of all ranks adds where gloo connects when needed."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    comm = ByteComm(dist.new_group(backend="gloo"), per_node)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    comm.gather(b"x")
    return len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208


def test_rank_0_is_connected_to_leaders_and_its_node_and_not_to_all():
    everyone = run_ranks(connections, 8, None)
    leaders = run_ranks(connections, 8, 4)
    assert everyone[0] >= 6  # of 7: something else may be closed meanwhile
    assert leaders[0] <= (4 - 1) + (2 - 1)


def groups_after():
    """A group of ranks 0 and 1, made by all after the groups of nodes: of a leader and a rank that is none."""
    ByteComm(ranks_per_node=2)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    if dist.get_rank() > 1:
        return None
    value = torch.tensor(1.0)
    dist.all_reduce(value, group=group)
    return float(value)


def test_groups_that_are_made_after_those_of_nodes_meet():
    assert run_ranks(groups_after, 4) == [2.0, 2.0, None, None]
