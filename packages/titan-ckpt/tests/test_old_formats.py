"""Steps of the format's first two versions load. `old_steps.tar.xz` was written by the code that knew no third version."""

import tarfile
from pathlib import Path

import pytest
import torch
from titan_ckpt import Checkpointer, Manifest, TrainState
from titan_ckpt.cli import main
from titan_ckpt.format.columns import PackedColumn, column_numbers, pack_column
from titan_ckpt.format.index import Index, StoredChunk, StoredTensor, pack_tensor
from torch import nn


@pytest.fixture
def steps(tmp_path):
    with tarfile.open(Path(__file__).with_name("old_steps.tar.xz")) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_step_of_version_1_loads(steps, capsys):
    state = TrainState(model=nn.Linear(3, 5), rng=False, extra={"tokens": 0, "t": (), "avg": torch.zeros(3)})
    ck = Checkpointer(steps / "1", keep_last=1)
    assert ck.restore(state, verify="all") == 7
    # AdamW's first step: weight decay of lr * 0.01, then lr against the sign of the gradient
    torch.testing.assert_close(state.model.weight, torch.full((5, 3), 0.5 * (1 - 0.0025) - 0.25))
    assert (state.extra["tokens"], state.extra["t"]) == (12345, (1, 2.5))
    assert state.extra["avg"].tolist() == [0.0, 1.0, 2.0]
    assert Manifest.open(steps / "1" / "step-00000007").metrics == {"loss": 1.5}
    assert main(["verify", str(steps / "1")]) == 0
    ck.save(8, state)
    assert ck.steps() == [8], "an old step takes part in the order and in retention"


def test_a_step_of_version_2_loads(steps):
    model = nn.Linear(1024, 256)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert Checkpointer(steps / "2").restore(TrainState(model=model, optim=optim, rng=False), verify="all") == 7
    assert optim.param_groups[0]["lr"] == 0.25
    # beta1 = 0.9 and beta2 = 0.999, of a gradient of 2
    torch.testing.assert_close(optim.state[model.weight]["exp_avg"], torch.full((256, 1024), 0.2))
    torch.testing.assert_close(optim.state[model.weight]["exp_avg_sq"], torch.full((256, 1024), 0.004))


def many_boxes(count: int) -> list[StoredChunk]:
    """A matrix in ``count`` rows of two boxes, the rows of uneven height."""
    chunks, at = [], 0
    for i in range(count):
        rows = 2 + i % 3
        chunks += [StoredChunk(i % 7, 1000 * i, (at, 0), (rows, 3)), StoredChunk(i % 5, 7 * i, (at, 3), (rows, 5))]
        at += rows
    return chunks


@pytest.mark.parametrize("count", [20, 400])
@pytest.mark.parametrize("as_lists", [False, True], ids=["packed", "lists"])
def test_boxes_are_found_in_columns_of_every_version(count, as_lists):
    chunks = many_boxes(count)
    rows = chunks[-1].offsets[0] + chunks[-1].sizes[0]
    stored = pack_tensor("F32", (rows, 8), chunks)
    if as_lists:  # as versions 1 and 2 write long columns

        def listed(column):
            return column if isinstance(column, int) else column_numbers(column, stored.count)

        columns = {
            "count": stored.count,
            "file": listed(stored.columns["file"]),
            "start": listed(stored.columns["start"]),
        }
        columns |= {name: [listed(column) for column in stored.columns[name]] for name in ("offsets", "sizes")}
        stored = StoredTensor("F32", (rows, 8), columns)
    encoded, version = Index((), {"model": {"w": stored}}, {}).encode()
    assert version == (3 if count > 32 and not as_lists else 1)
    found = Index.decode(encoded).tensors["model"]["w"]
    assert found.chunks == chunks
    for begin, size in ((0, rows), (5, 1), (rows - 1, 1), (7, 40)):
        box = ((begin, 1), (size, 2))
        want = [
            c for c in chunks if c.offsets[0] < begin + size and c.offsets[0] + c.sizes[0] > begin and not c.offsets[1]
        ]
        got = found.overlapping(box)
        assert [c for c in got if c in want] == want
        assert count <= 32 or got == want


@pytest.mark.parametrize(
    "numbers",
    [[0, 1, 2], [5, -3, 5], [1 << 40, 0, (1 << 62) - 1, 7], [300, -300, 0], list(range(0, 10**6, 999))],
    ids=str,
)
def test_packed_columns_give_back_every_number(numbers):
    column = PackedColumn.of(numbers)
    again = PackedColumn(column.width, column.data)
    assert again.numbers() == numbers
    assert again.array.tolist() == numbers
    assert pack_column([4, 4, 4]) == 4
    assert pack_column([]) == []
