"""Ranks of one machine check each block once between them, and miss none."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from titan_ckpt import Checkpointer, DamageError, TrainState
from titan_ckpt.format.names import BLOCK_BYTES
from titan_ckpt.load.copies import assign_blocks, encode_reads
from titan_ckpt.load.reader import StepReader
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ROWS, COLUMNS = 2048, 1536  # 12 MiB: three blocks of data, the first shared with the header


def state_of(placement, fill: float | None = None) -> TrainState:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    torch.manual_seed(0)
    whole = torch.randn(ROWS, COLUMNS)
    if fill is not None:
        whole.fill_(fill)
    model = nn.Module()
    model.weight = nn.Parameter(whole if mesh is None else distribute_tensor(whole, mesh, [placement]))
    return TrainState(model=model, rng=False)


def restore_columns(root: str, placement, verify: str = "touched") -> tuple[list[tuple[int, int]], str, bool]:
    """The blocks of the weight's file this rank checked, the error, and whether it now holds what was saved."""
    checked, check = [], StepReader.check

    def count(reader, file, begin, end):
        name = reader.index.files[file].name
        if name.startswith("model"):
            checked.extend((file, block) for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)))
        return check(reader, file, begin, end)

    StepReader.check = count
    state, error = state_of(placement, 0.0), ""
    try:
        Checkpointer(root).restore(state, verify=verify)
    except DamageError as err:
        error = str(err)
    finally:
        StepReader.check = check
    wanted = state_of(placement).model.weight.to_local()
    return checked, error, torch.equal(state.model.weight.to_local(), wanted)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("placement", [Shard(1), Replicate()], ids=str)
def test_a_block_that_many_ranks_read_is_checked_by_one(tmp_path, ranks, placement):
    Checkpointer(tmp_path).save(1, state_of(None))
    results = run_ranks(restore_columns, ranks, str(tmp_path), placement)
    assert all(error == "" and equal for _, error, equal in results)
    counted = Counter(block for checked, _, _ in results for block in checked)
    assert set(counted.values()) == {1}
    assert {block for _, block in counted} == {0, 1, 2, 3}
    assert max(len(checked) for checked, _, _ in results) < 4, "no rank does it all"


@pytest.mark.parametrize("block", [0, 1, 2, 3])
def test_damage_in_a_shared_block_stops_every_rank_before_anything_is_written(tmp_path, block):
    Checkpointer(tmp_path).save(1, state_of(None))
    (file,) = tmp_path.glob("step-*/model-*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(min(block * BLOCK_BYTES + 5000, file.stat().st_size - 1))
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 1]))
    for _, error, equal in run_ranks(restore_columns, 4, str(tmp_path), Shard(1)):
        assert f"block {block} " in error
        assert "weight" in error
        assert not equal


def test_verify_all_checks_every_block_of_every_file_once(tmp_path):
    Checkpointer(tmp_path).save(1, state_of(None))
    results = run_ranks(restore_columns, 4, str(tmp_path), Shard(1), "all")
    assert {block for checked, _, _ in results for _, block in checked} == {0, 1, 2, 3}
    assert all(equal for _, _, equal in results)


def test_every_machine_checks_for_itself():
    blocks = {(file, block) for file in range(3) for block in range(10)}
    reads = [blocks, {b for b in blocks if b[0] != 1}, blocks, {(2, 9)}]
    machines = ["one", "one", "two", "two"]
    told = []
    for machine, mine in zip(machines, reads, strict=True):
        said = json.loads(encode_reads(mine, Path(), 0))
        told.append(json.dumps(said | {"memory": [machine, 1, 2]}).encode())
    shares = [assign_blocks(mine, told, rank) for rank, mine in enumerate(reads)]
    assert all(share <= mine for share, mine in zip(shares, reads, strict=True))
    for first, second in ((0, 1), (2, 3)):
        assert shares[first] | shares[second] == blocks
        assert not shares[first] & shares[second]
    assert len(shares[1]) == 10, "half of what both read"


def test_blocks_that_come_over_the_network_are_checked_by_each_reader():
    fsspec = pytest.importorskip("fsspec")
    from titan_ckpt.storage.paths import RemotePath

    path = RemotePath(fsspec.filesystem("memory"), "/nowhere")
    blocks = {(0, 0), (0, 1)}
    told = [encode_reads(blocks, path, rank) for rank in range(2)]
    assert [assign_blocks(blocks, told, rank) for rank in range(2)] == [blocks, blocks]
