import json
import math
import struct

import pytest
import torch
import zstandard
from ckpt_layouts import assert_equal
from titan_ckpt import Checkpointer, DamageError, Manifest, TrainState
from titan_ckpt.cli import main
from titan_ckpt.format.codec import FRAME_BYTES, Packer, unpack_frame
from titan_ckpt.format.names import FORMAT_VERSION
from titan_ckpt.load.copies import read_tensor
from titan_ckpt.load.reader import StepReader
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROWS, COLUMNS = 1300, 1024  # 5.3 MB of float32: more than one frame


def trained(layout: str = "plain") -> TrainState:
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, ROWS, bias=True)
    if layout != "plain":
        dim = 0 if layout == "rows" else 1
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(dim)]))
        model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh, [Shard(0)]))
    optim = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        torch.manual_seed(1)
        whole = torch.randn(param.shape) * 1e-3
        param.grad = whole if layout == "plain" else distribute_tensor(whole, param.device_mesh, param.placements)
    optim.step()
    return TrainState(model=model, optim=optim, rng=False)


def moments(state: TrainState) -> dict[str, torch.Tensor]:
    values = {f"{i}.{k}": v for i, s in enumerate(state.optim.state.values()) for k, v in s.items()}
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in values.items()}


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("nbytes", [0, 8, 4096, FRAME_BYTES, FRAME_BYTES + 8, 2 * FRAME_BYTES])
def test_frames_come_back_bit_for_bit(item, nbytes):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(4, (nbytes,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    frames = list(Packer().frames(raw, item))
    back = b""
    for n, frame in enumerate(frames):
        back += bytes(unpack_frame(frame, min(FRAME_BYTES, nbytes - n * FRAME_BYTES), item))
    assert back == raw
    assert sum(memoryview(f).nbytes for f in frames) <= nbytes


def test_noise_is_stored_as_it_is_and_a_frame_of_the_wrong_length_is_refused():
    noise = torch.randint(256, (FRAME_BYTES,), dtype=torch.uint8).numpy().tobytes()
    packer = Packer()
    assert not packer.gains(noise, 4)
    assert [bytes(f) for f in packer.frames(noise, 4)] == [noise]
    with pytest.raises(ValueError, match="holds 8 bytes, 16 were expected"):
        unpack_frame(zstandard.compress(b"\0" * 8), 16, 4)
    with pytest.raises(ValueError, match="cannot be read"):
        unpack_frame(b"nonsense", 16, 4)


@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
def test_compressed_optimizer_state_is_smaller_and_comes_back_bit_for_bit(tmp_path, async_):
    state = trained()
    with Checkpointer(tmp_path, compress="auto", async_=async_) as ck:
        ck.save(1, state)
    step = ck.path(1)
    raw = 2 * 4 * ROWS * COLUMNS
    assert (step / "optim/optim-r00000.safetensors").stat().st_size < 0.9 * raw
    assert (step / "model-r00000.safetensors").stat().st_size > 4 * ROWS * COLUMNS, "weights stay plain"
    got = trained()
    for values in got.optim.state.values():
        for value in values.values():
            value.fill_(-1)
    Checkpointer(tmp_path).restore(got, verify="all")
    assert_equal(moments(got), moments(state))


def save_sharded(root: str, layout: str) -> None:
    Checkpointer(root, compress="auto").save(1, trained(layout))


def load_sharded(root: str, layout: str) -> dict[str, torch.Tensor]:
    state = trained(layout)
    for values in state.optim.state.values():
        for value in values.values():
            value.fill_(-1)
    Checkpointer(root).restore(state)
    return moments(state)


def test_compressed_state_is_read_by_overlapping_ranges_in_another_layout(tmp_path):
    run_ranks(save_sharded, 2, str(tmp_path), "rows")
    want = moments(trained())
    for layout, ranks in (("rows", 3), ("columns", 2)):
        for got in run_ranks(load_sharded, ranks, str(tmp_path), layout):
            assert_equal(got, want)
    reader = StepReader(tmp_path / "step-00000001")
    stored = reader.index.tensors["optim"]["weight/exp_avg"]
    packed = [chunk for chunk in stored.chunks if chunk.frames is not None]
    assert packed, "nothing was compressed"
    begin, end = reader.stored_range(stored, packed[0], 0, 100)
    assert end - begin == packed[0].frames[0], "one frame for a few bytes"


def test_a_flipped_bit_in_a_compressed_tensor_names_it(tmp_path):
    Checkpointer(tmp_path, compress="auto").save(1, trained())
    file = tmp_path / "step-00000001/optim/optim-r00000.safetensors"
    data = bytearray(file.read_bytes())
    for at in (10, len(data) // 2, len(data) - 9000):
        data[at] ^= 8
        file.write_bytes(data)
        with pytest.raises(DamageError, match=r"optim/optim-r00000.safetensors block \d"):
            Checkpointer(tmp_path).restore(trained(), verify="all")
        data[at] ^= 8


def test_only_a_step_with_compressed_state_needs_the_second_version_of_the_format(tmp_path):
    assert FORMAT_VERSION == 3
    for name, compress in (("a", "none"), ("b", "auto")):
        path = Checkpointer(tmp_path / name, compress=compress).save(1, trained()).path
        told = json.loads((path / "MANIFEST.json").read_text())["format"]
        assert told == {"a": 1, "b": 2}[name]
        assert Manifest.open(path).step == 1
    assert main(["diff", str(tmp_path / "a/step-00000001"), str(tmp_path / "b/step-00000001")]) == 0
    assert main(["verify", str(tmp_path / "b")]) == 0


def test_a_compressed_file_can_be_read_from_the_format_description_alone(tmp_path):
    state = trained()
    step = Checkpointer(tmp_path, compress="auto").save(1, state).path
    index = json.loads(zstandard.decompress((step / "INDEX.json.zst").read_bytes()))
    tensor = index["tensors"]["optim"]["weight/exp_avg_sq"]
    columns = tensor["chunks"]
    file = index["files"][columns["file"]]
    data = (step / file["name"]).read_bytes()
    at = file["data_start"] + columns["start"]
    total = math.prod(tensor["shape"]) * 4
    raw = b""
    for length in columns["frames"][0]:
        want = min(4 << 20, total - len(raw))
        frame = data[at : at + length]
        if length < want:
            planes = zstandard.decompress(frame)
            frame = bytes(planes[p * want // 4 + i] for i in range(want // 4) for p in range(4))
        raw += frame
        at += length
    got = torch.tensor(struct.unpack(f"<{total // 4}f", raw)).view(tensor["shape"])
    assert torch.equal(got, next(iter(state.optim.state.values()))["exp_avg_sq"])
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    assert header["weight/exp_avg_sq"]["dtype"] == "U8"
    assert torch.equal(read_tensor(StepReader(step), "optim", "weight/exp_avg_sq"), got)
