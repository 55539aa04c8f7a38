import contextlib
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_layouts import assert_equal
from ckpt_loop import build, finish, full_state, train
from titan_ckpt import (
    Checkpointer,
    DamageError,
    TitanStorageReader,
    TitanStorageWriter,
    TrainState,
    import_dcp,
)
from titan_ckpt.cli import main
from titan_ckpt.load.reader import StepReader
from titan_ckpt.storage.paths import as_path
from titan_testing import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# torch's own: saving without ranks, and deprecations inside it
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trained() -> TrainState:
    state = build(tied=False)
    train(state, 3)
    return state


def save_dcp(folder: str, flatten: bool, ranks: bool) -> None:
    warnings.simplefilter("ignore")
    state = trained()
    if ranks:
        model = state.model
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sharded = finish(model)
        for param, old in zip(model.parameters(), trained().model.parameters(), strict=True):
            param.grad = None
            assert tuple(param.shape) == tuple(old.shape)
        sharded.model.eval()
        sharded.model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        sharded.optim.step()
        state = sharded
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optim_state = get_state_dict(state.model, state.optim, options=options)
    whole = {"model": model_state, "optim": optim_state, "step": 7, "run": {"lr": [0.1, 0.2], "ema": torch.ones(3000)}}
    dcp.save(whole, checkpoint_id=folder, no_dist=not ranks)
    if not ranks or torch.distributed.get_rank() == 0:
        Path(folder).with_suffix(".ok").touch()


@pytest.mark.parametrize("flatten", [False, True], ids=["numbered-groups", "flattened"])
def test_a_dcp_checkpoint_is_imported_with_optimizer_and_the_rest(tmp_path, flatten, capsys):
    save_dcp(str(tmp_path / "dcp"), flatten, False)
    assert main(["import-dcp", str(tmp_path / "dcp"), str(tmp_path / "root"), "--step", "7"]) == 0
    assert "step-00000007" in capsys.readouterr().out
    got = build(seed=5, tied=False)
    plain = TrainState(model=got.model, optim=got.optim, rng=False, extra={"run.lr": []})
    assert Checkpointer(tmp_path / "root").restore(plain, verify="all") == 7
    assert_equal(full_state(got), full_state(trained()))
    assert plain.extra["step"] == 7
    assert plain.extra["run.lr"] == [0.1, 0.2]
    assert torch.equal(plain.extra["run.ema"], torch.ones(3000))
    want = trained().optim.param_groups[0]
    assert got.optim.param_groups[0]["lr"] == want["lr"]
    assert tuple(got.optim.param_groups[0]["betas"]) == tuple(want["betas"])


def full_of_ranks(folder: str) -> dict[str, torch.Tensor]:
    save_dcp(folder, False, True)
    return {}


def test_a_sharded_dcp_checkpoint_with_weights_at_the_top_is_imported(tmp_path):
    run_ranks(full_of_ranks, 2, str(tmp_path / "dcp"))
    import_dcp(tmp_path / "dcp", tmp_path / "root")
    got = build(seed=5, tied=False)
    Checkpointer(tmp_path / "root").restore(TrainState(model=got.model, rng=False))
    loaded = {"model": {k: torch.zeros_like(v) for k, v in got.model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal(got.model.state_dict(), loaded["model"])
    flat = {k: v.clone() for k, v in trained().model.state_dict().items()}
    dcp.save(flat, checkpoint_id=tmp_path / "flat", no_dist=True)
    import_dcp(tmp_path / "flat", tmp_path / "root", step=1)
    Checkpointer(tmp_path / "root").restore(TrainState(model=got.model, rng=False), 1)
    assert_equal(got.model.state_dict(), flat)


def test_a_dcp_checkpoint_shaped_as_torchtitans_restores_model_and_optimizer_strictly(tmp_path, caplog):
    source = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    whole, optim_state = get_state_dict(source.model, source.optim, options=options)
    whole = {**whole, "optimizer": optim_state, "lr_scheduler": {"last_epoch": 3}, "dataloader": {"dp_rank_0": b"abc"}}
    whole["train_state"] = {"step": torch.tensor(5, dtype=torch.int32), "ntokens_seen": torch.tensor(7)}
    dcp.save(whole, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with caplog.at_level("INFO", logger="titan_ckpt"):
        import_dcp(tmp_path / "dcp", tmp_path / "root")
    assert "kept as extra, neither model nor optimizer: ['dataloader.dp_rank_0', 'lr_scheduler.last" in caplog.text
    got = build(seed=5, tied=False)
    state = TrainState(model=got.model, optim=got.optim, rng=False, extra={})
    Checkpointer(tmp_path / "root").restore(state, verify="all")
    assert_equal(full_state(got), full_state(source))
    assert state.extra == {
        "train_state.step": torch.tensor(5), "train_state.ntokens_seen": torch.tensor(7),
        "lr_scheduler.last_epoch": 3, "dataloader.dp_rank_0": b"abc",
    }  # fmt: skip


def two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    groups = [
        {"params": layer.parameters(), "lr": torch.tensor(rate)} for layer, rate in zip(model, (0.5, 0.25), strict=True)
    ]
    optim = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    return model, optim


@pytest.mark.parametrize("flatten", [False, True], ids=["numbered-groups", "flattened"])
def test_learning_rates_that_are_tensors_are_imported(tmp_path, flatten):
    model, optim = two_groups()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optim_state = get_state_dict(model, optim, options=options)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "root")
    got, fresh = two_groups()
    for group in fresh.param_groups:
        group.update(lr=torch.tensor(9.0), betas=(0.0, 0.0))
    Checkpointer(tmp_path / "root").restore(TrainState(model=got, optim=fresh, rng=False))
    assert [(float(group["lr"]), group["betas"]) for group in fresh.param_groups] == [
        (0.5, (0.8, 0.9)),
        (0.25, (0.8, 0.9)),
    ]


def test_nested_optimizer_state_of_a_dcp_checkpoint_is_refused_with_the_way_out(tmp_path):
    model, optim = two_groups()
    optim.state[model[0].weight]["average"] = {"fast": torch.ones(2, 3)}
    model_state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(
        ValueError, match=r"'optim\.state\.0\.weight\.average\.fast' is nested in the optimizer's state"
    ):
        import_dcp(tmp_path / "dcp", tmp_path / "root")
    import_dcp(tmp_path / "dcp", tmp_path / "root", optim="")


def test_weights_at_the_top_of_a_dcp_checkpoint_may_be_called_model(tmp_path):
    state = {"model.norm.weight": torch.rand(3), "lm_head.weight": torch.rand(2)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    step = import_dcp(tmp_path / "dcp", tmp_path / "root")
    assert StepReader(step).index.tensors["model"].keys() == state.keys()


def test_an_import_of_a_dcp_checkpoint_names_the_entries_if_none_is_the_model(tmp_path):
    dcp.save({"net": {"w": torch.ones(3)}, "step": 4}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ValueError, match=r"no weights at the top; its entries are \['net', 'step'\]"):
        import_dcp(tmp_path / "dcp", tmp_path / "root")
    with pytest.raises(ValueError, match="no weights in 'mode'"):
        import_dcp(tmp_path / "dcp", tmp_path / "root", model="mode")
    step = import_dcp(tmp_path / "dcp", tmp_path / "root", model="net")
    assert [*StepReader(step).index.tensors["model"]] == ["w"]


def test_missing_and_damaged_dcp_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="is not a DCP checkpoint"):
        import_dcp(tmp_path, tmp_path / "root")
    dcp.save({"w": torch.ones(500, 4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = next((tmp_path / "dcp").glob("*.distcp"))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="'w' is damaged or not plain data and tensors"):
        import_dcp(tmp_path / "dcp", tmp_path / "root")
    file.unlink()
    with pytest.raises(ValueError, match=r"is missing '__0_0\.distcp', which holds 'w'"):
        import_dcp(tmp_path / "dcp", tmp_path / "root")
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x04K\x05.")
    with pytest.raises(ValueError, match="holds a int, not DCP's metadata"):
        import_dcp(tmp_path / "dcp", tmp_path / "root")
    assert not list((tmp_path / "root").glob("step-*"))


class Evil:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def metadata_with(folder: Path, evil: object) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("parts", [[0, 0], [0], [], [0, 8], [-4, 4]], ids=str)
def test_dcp_metadata_whose_parts_do_not_cover_the_tensor_is_refused(tmp_path, parts):
    """Two equal halves have as many elements as the whole."""
    dcp.save({"w": torch.ones(8, 4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with (tmp_path / "dcp" / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (chunk,) = metadata.state_dict_metadata["w"].chunks
    metadata.state_dict_metadata["w"].chunks = [
        type(chunk)(torch.Size([begin, 0]) if begin >= 0 else (begin, 0), torch.Size([4, 4])) for begin in parts
    ]
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"parts of 'w' do not cover its shape \[8, 4\]"):
        import_dcp(tmp_path / "dcp", tmp_path / "root")
    assert not list((tmp_path / "root").glob("step-*"))


def pickles(mark: str) -> dict[str, bytes]:
    """Ways a metadata pickle may try to run code."""
    call = f"touch {mark}"
    return {
        "reduce": pickle.dumps(Evil(mark)),
        "system": f"cposix\nsystem\n(V{call}\ntR.".encode(),
        "getattr": f"cbuiltins\ngetattr\n(cbuiltins\nobject\nV__subclasses__\ntR(V{call}\ntR.".encode(),
        "torch.load": f"ctorch\nload\n(V{call}\ntR.".encode(),
        "dotted": f"\x80\x04\x8c\x05torch\x8c\x09os.system\x93(V{call}\ntR.".encode("latin-1"),
        "metadata-module": f"ctorch.distributed.checkpoint.metadata\nos\n(V{call}\ntR.".encode(),
        "persistent": b"Pname\n.",
        "instance": f"(V{call}\niposix\nsystem\n.".encode(),
    }


IMPORT = """
import sys
found, ran = [], []
import torch, titan_ckpt.interop.dcp_import
def hook(name, args):
    if name == "pickle.find_class":
        found.append(args)
    if name in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        ran.append(name)
from pathlib import Path
from titan_ckpt import import_dcp
sys.addaudithook(hook)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        import_dcp(folder, sys.argv[2])
        print(folder.name, "loaded")
    except ValueError as err:
        print(folder.name, "refused")
print(len(found), len(ran))
"""


def test_hostile_pickles_in_a_dcp_checkpoint_run_no_code(tmp_path):
    mark = str(tmp_path / "ran")
    folders = tmp_path / "hostile"
    folders.mkdir()
    for name, data in pickles(mark).items():
        dcp.save({"w": torch.ones(3), "n": 1}, checkpoint_id=folders / name, no_dist=True)
        (folders / name / ".metadata").write_bytes(data)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folders / "in-planner-data", no_dist=True)
    metadata_with(folders / "in-planner-data", Evil(mark))
    dcp.save({"w": torch.ones(3), "n": Evil(mark)}, checkpoint_id=folders / "in-an-item", no_dist=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT, str(folders), str(tmp_path / "root")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *verdicts, counts = done.stdout.splitlines()
    assert len(verdicts) == len(pickles(mark)) + 2
    assert all(verdict.endswith("refused") for verdict in verdicts), verdicts
    assert counts == "0 0"
    assert not Path(mark).exists()


def save_and_load_with_dcp(root: str, load_only: bool = False) -> bool:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 5))
    want = {k: v.clone() for k, v in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    state = {"model": model.state_dict(), "step": 3, "plain": [1, (2, "x")], "scalar": torch.tensor(2.5)}
    if not load_only:
        dcp.save(state, storage_writer=TitanStorageWriter(root, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-1)
    state |= {"model": model.state_dict(), "step": 0, "plain": None, "scalar": torch.zeros(())}
    dcp.load(state, storage_reader=TitanStorageReader(Path(root) / "step-00000003"))
    assert state["step"] == 3
    assert list(state["plain"]) == [1, (2, "x")]
    assert state["scalar"] == 2.5
    return all(torch.equal(v.full_tensor(), want[k]) for k, v in model.state_dict().items())


def test_dcp_saves_and_loads_through_this_storage_on_any_number_of_ranks(tmp_path):
    assert all(run_ranks(save_and_load_with_dcp, 2, str(tmp_path)))
    assert all(run_ranks(save_and_load_with_dcp, 3, str(tmp_path), True))
    assert main(["verify", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_steps_of_dcp_and_of_the_checkpointer_read_each_other(tmp_path):
    source = trained().model
    writer = TitanStorageWriter(tmp_path, 1)
    dcp.save(source.state_dict(), storage_writer=writer, no_dist=True)
    assert writer.path == tmp_path / "step-00000001"
    got = build(seed=4, tied=False).model
    Checkpointer(tmp_path).restore(TrainState(model=got, rng=False))
    assert_equal(got.state_dict(), source.state_dict())
    tied = build(seed=6)
    path = Checkpointer(tmp_path).save(2, TrainState(model=tied.model, rng=False)).path
    state = {k: torch.zeros_like(v) for k, v in tied.model.state_dict().items()}
    dcp.load(state, storage_reader=TitanStorageReader(path), no_dist=True)
    assert_equal(state, tied.model.state_dict())


def test_dcp_asynchronous_saves_go_through_this_storage(tmp_path):
    writer = TitanStorageWriter(tmp_path, 4)
    source = trained().model
    dcp.async_save(source.state_dict(), storage_writer=writer, no_dist=True).result()
    got = build(seed=4, tied=False).model
    Checkpointer(tmp_path).restore(TrainState(model=got, rng=False))
    assert_equal(got.state_dict(), source.state_dict())


@pytest.mark.parametrize("store", [False, True], ids=["disk", "store"])
def test_plans_that_dcp_cached_for_an_earlier_save_are_refused(tmp_path, store, monkeypatch):
    for name, found in vars(dcp.SavePlanner).items():
        if name.startswith("_cached"):
            monkeypatch.setattr(dcp.SavePlanner, name, type(found)())
    root = as_path(f"memory://{tmp_path}") if store else tmp_path
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in (1, 2):
        refused = pytest.raises((ValueError, dcp.api.CheckpointException), match="enable_plan_caching=True")
        with refused if step == 2 else contextlib.nullcontext():
            state = {"w": torch.full((4,), float(step))}
            dcp.save(state, storage_writer=TitanStorageWriter(root, step), planner=planner, no_dist=True)
    assert Checkpointer(root).steps() == [1]
    dcp.save({"w": torch.zeros(4)}, storage_writer=TitanStorageWriter(root, 3), no_dist=True)
    for step, value in ((1, 1.0), (3, 0.0)):
        module = nn.Module()
        module.register_buffer("w", torch.ones(4) * 9)
        Checkpointer(root).restore(TrainState(model=module, rng=False), step)
        assert module.w.tolist() == [value] * 4


def test_dcp_load_through_this_storage_finds_damage_and_objects_are_refused(tmp_path):
    dcp.save({"w": torch.ones(50)}, storage_writer=TitanStorageWriter(tmp_path, 1), no_dist=True)
    file = tmp_path / "step-00000001" / "model-r00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises((DamageError, dcp.api.CheckpointException), match=r"block 0 .*tensors w"):
        dcp.load({"w": torch.zeros(50)}, storage_reader=TitanStorageReader(tmp_path / "step-00000001"), no_dist=True)
    with pytest.raises((TypeError, dcp.api.CheckpointException), match="only plain data and tensors"):
        dcp.save({"x": Evil("x")}, storage_writer=TitanStorageWriter(tmp_path, 2), no_dist=True)


def test_optimizer_state_by_number_is_refused_with_the_way_out(tmp_path):
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    dcp.save(
        {"model": model.state_dict(), "optim": optim.state_dict()}, checkpoint_id=tmp_path / "by_number", no_dist=True
    )
    with pytest.raises(ValueError, match="get_state_dict"):
        import_dcp(tmp_path / "by_number", tmp_path / "root")
    import_dcp(tmp_path / "by_number", tmp_path / "root", optim="")


def test_dcp_load_takes_nested_names_of_a_native_step(tmp_path):
    model = torch.nn.Linear(6, 4)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optim.step()
    path = Checkpointer(tmp_path).save(1, TrainState(model=model, optim=optim, rng=False)).path
    moments = {
        name: {key: torch.zeros_like(value) for key, value in optim.state[param].items()}
        for name, param in model.named_parameters()
    }
    weights = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load({"model": weights, "optim": {"state": moments}}, storage_reader=TitanStorageReader(path), no_dist=True)
    for name, param in model.named_parameters():
        assert torch.equal(weights[name], param)
        for key, value in optim.state[param].items():
            assert torch.equal(moments[name][key], value)


def test_a_dtype_that_a_step_cannot_hold_is_refused_without_a_traceback(tmp_path, capsys):
    state = {"model": {"w": torch.zeros(2)}, "odd": torch.zeros(2, dtype=torch.complex128)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert main(["import-dcp", str(tmp_path / "dcp"), str(tmp_path / "root")]) == 2
    assert "odd has dtype torch.complex128, which safetensors cannot hold" in capsys.readouterr().err
