import json
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_loop import Data
from titan_ckpt import (
    Checkpointer,
    DamageError,
    Manifest,
    NoIntactStepError,
    TitanStorageReader,
    TitanStorageWriter,
    TrainState,
)
from titan_ckpt.format.names import COMMIT_NAME
from titan_ckpt.load.reader import StepReader
from titan_testing import run_ranks
from torch import nn


def make_state(fill: float) -> TrainState:
    model = nn.Linear(300, 900)
    nn.init.constant_(model.weight, fill)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optim.step()
    return TrainState(model=model, optim=optim, data=Data(), extra={"table": torch.ones(4000)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    Checkpointer(root).save(7, make_state(2.0))
    return root


def restore_error(root) -> str:
    state = make_state(-1.0)
    before = state.model.weight.detach().clone()
    with pytest.raises(DamageError) as caught:
        Checkpointer(root).restore(state, verify="all")
    assert torch.equal(state.model.weight, before), "a damaged step must not touch the state"
    return str(caught.value)


def flip_places(step, count: int):
    # COMMIT.json is a copy that no manifest lists; what is wrong with it must not matter, see below.
    files = sorted(path for path in step.rglob("*") if path.is_file() and path.name != COMMIT_NAME)
    draw = random.Random(0)
    for i in range(count):
        file = files[i % len(files)]  # every kind of file, however small
        yield file, draw.randrange(file.stat().st_size), draw.randrange(8)


def check_flips(saved, tmp_path, count: int) -> None:
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    step = root / "step-00000007"
    kinds = set()
    for file, at, bit in flip_places(step, count):
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[at] ^= 1 << bit
        file.write_bytes(flipped)
        error = restore_error(root)
        assert file.relative_to(step).as_posix() in error, (file, at, bit, error)
        kinds.add(file.name)
        file.write_bytes(whole)
    assert {"MANIFEST.json", "INDEX.json.zst", "state.json", "model-r00000.safetensors"} <= kinds
    assert Checkpointer(root).restore(make_state(0.0)) == 7


def test_a_flipped_bit_anywhere_is_an_error_that_names_the_file(saved, tmp_path):
    check_flips(saved, tmp_path, 42)


def test_a_flipped_bit_in_the_copy_beside_the_manifest_changes_nothing(saved, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    Checkpointer(root).save(3, make_state(5.0))  # newer, with a smaller number: the order comes from the commits
    file = root / "step-00000007" / COMMIT_NAME
    whole = file.read_bytes()
    for at in range(0, len(whole), 5):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        file.write_bytes(flipped)
        assert Checkpointer(root).steps() == [7, 3]
    state = make_state(0.0)
    assert Checkpointer(root).restore(state, 7, verify="all") == 7
    assert torch.equal(state.model.weight, make_state(2.0).model.weight)


@pytest.mark.slow
def test_three_hundred_flipped_bits_are_three_hundred_errors(saved, tmp_path):
    check_flips(saved, tmp_path, 300)


def test_damage_names_tensor_block_and_byte(saved, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    file = root / "step-00000007" / "model-r00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamageError) as caught:
        Checkpointer(root).restore(make_state(0.0))
    (damage,) = caught.value.damages
    assert (damage.file, damage.block, damage.offset) == ("model-r00000.safetensors", 0, 0)
    assert damage.tensors == ("bias", "weight")
    reader = StepReader(root / "step-00000007")
    assert [d for _, found in reader.check_all() for d in found] == [damage]


@pytest.mark.parametrize("action", ["truncate", "grow", "delete", "empty", "swap"])
def test_truncated_deleted_and_swapped_files_are_errors_never_bus_errors(saved, tmp_path, action):
    listed = [name for name, _, _ in Manifest.open(saved / "step-00000007").files]
    for name in [*listed, "INDEX.json.zst", "MANIFEST.json"]:
        root = tmp_path / name.replace("/", "-")
        shutil.copytree(saved, root)
        file = root / "step-00000007" / name
        data = file.read_bytes()
        if action == "delete":
            file.unlink()
        elif action == "swap":
            other = root / "step-00000007" / listed[(listed.index(name) + 1) % len(listed) if name in listed else 0]
            file.write_bytes(other.read_bytes())
            other.write_bytes(data)
        else:
            file.write_bytes({"truncate": data[: len(data) // 2], "grow": data + b"\0", "empty": b""}[action])
        assert name in restore_error(root)


def test_files_of_equal_size_swapped_between_steps_are_found(tmp_path):
    ck = Checkpointer(tmp_path)
    ck.save(1, make_state(1.0))
    ck.save(2, make_state(2.0))
    name = "model-r00000.safetensors"
    shutil.copy(tmp_path / "step-00000001" / name, tmp_path / "step-00000002" / name)
    assert name in restore_error(tmp_path)


def test_fallback_steps_back_to_the_newest_intact_step(tmp_path, caplog):
    ck = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        ck.save(step, make_state(float(step)))
    (tmp_path / "step-00000003" / "MANIFEST.json").unlink()
    file = tmp_path / "step-00000002" / "model-r00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    assert ck.latest() == 2  # sizes are right: contents are checked when they are read
    assert "step-00000003" in caplog.text
    state = make_state(0.0)
    assert ck.restore(state, fallback=True) == 1
    assert float(state.model.weight.detach().mean()) == pytest.approx(1.0, abs=0.01)
    with pytest.raises(DamageError):
        ck.restore(state)


def test_where_no_step_is_intact_one_error_names_what_is_wrong_with_each(tmp_path):
    ck = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        ck.save(step, make_state(float(step)))
    (tmp_path / "step-00000001" / "INDEX.json.zst").write_bytes(b"")
    for step in (2, 3):
        (tmp_path / f"step-0000000{step}" / "model-r00000.safetensors").unlink()
    state = make_state(0.0)
    with pytest.raises(NoIntactStepError, match=r"no checkpoint below .* is intact, and nothing was loaded") as caught:
        ck.restore(state, fallback=True)
    lines = str(caught.value).splitlines()
    assert [re.search(r"step-0000000(\d): (\S+)", line).groups() for line in lines[1:]] == [
        ("3", "model-r00000.safetensors:"), ("2", "model-r00000.safetensors:"), ("1", "INDEX.json.zst:"),
    ]  # fmt: skip
    assert len(caught.value.steps) == 3
    assert isinstance(caught.value, DamageError)
    assert float(state.model.weight.detach().mean()) == pytest.approx(0.0, abs=0.01)


HOSTILE = """
import sys
loaded = []
sys.addaudithook(lambda name, args: loaded.append(args) if name == "pickle.find_class" else None)
import torch
from titan_ckpt import Checkpointer, TrainState
loaded.clear()
state = TrainState(model=torch.nn.Linear(300, 900), extra={"table": torch.ones(4000)}, rng=False)
try:
    Checkpointer(sys.argv[1]).restore(state)
except Exception as err:
    print(type(err).__name__)
print(len(loaded))
"""


def test_a_pickle_in_place_of_any_file_runs_no_code(saved, tmp_path):
    class Evil:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    import pickle

    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    for file in (root / "step-00000007").rglob("*"):
        if file.is_file():
            file.write_bytes(pickle.dumps(Evil()))
    done = subprocess.run([sys.executable, "-c", HOSTILE, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["DamageError", "0"]
    assert not (tmp_path / "ran").exists()


def test_a_step_of_a_newer_format_is_refused_with_the_way_out(saved, tmp_path):
    from titan_ckpt.format.manifest import _self_digest

    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    file = root / "step-00000007" / "MANIFEST.json"
    value = json.loads(file.read_bytes())
    value["format"] = 99
    del value["digest"]
    file.write_text(json.dumps({**value, "digest": _self_digest(value)}))
    with pytest.raises(ValueError, match="has format 99"):
        Checkpointer(root).restore(make_state(0.0))


NO_DIST = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own


# No checkpoint can hold an `object`; torch pickles it on its way between ranks, so its class must be one that they find.
@NO_DIST
def test_a_failed_dcp_save_leaves_nothing_and_the_step_before(tmp_path):
    dcp.save({"w": torch.ones(4)}, storage_writer=TitanStorageWriter(tmp_path, 1), no_dist=True)
    for value in (object(), torch.ones(2, dtype=torch.complex128)):
        with pytest.raises(dcp.CheckpointException, match="x"):
            dcp.save({"w": torch.zeros(4), "x": value}, storage_writer=TitanStorageWriter(tmp_path, 1), no_dist=True)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=TitanStorageReader(tmp_path / "step-00000001"), no_dist=True)
    assert loaded["w"].tolist() == [1.0] * 4


def fail_on_one_rank(root: str) -> str:
    rank = torch.distributed.get_rank()
    try:
        dcp.save(
            {f"w{rank}": torch.ones(4), f"x{rank}": object() if rank else 5}, storage_writer=TitanStorageWriter(root, 1)
        )
    except dcp.CheckpointException as err:  # of torch, and no Exception
        return str(err)
    return ""


@NO_DIST
def test_a_dcp_save_that_fails_on_one_rank_leaves_nothing(tmp_path):
    errors = run_ranks(fail_on_one_rank, 2, str(tmp_path))
    assert all("x1 is an object" in error for error in errors), errors
    assert list(tmp_path.iterdir()) == []


@NO_DIST
def test_a_step_saved_again_through_dcp_replaces_the_old_one(tmp_path):
    for fill in (1.0, 2.0):
        dcp.save({"w": torch.full((4,), fill)}, storage_writer=TitanStorageWriter(tmp_path, 1), no_dist=True)
    (path,) = tmp_path.iterdir()
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=TitanStorageReader(path), no_dist=True)
    assert loaded["w"].tolist() == [2.0] * 4


def test_a_negative_step_is_refused_by_the_writer_for_dcp(tmp_path):
    with pytest.raises(ValueError, match="step=-2 is negative"):
        TitanStorageWriter(tmp_path, -2)
