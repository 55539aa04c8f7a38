import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ckpt_loop import Net
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from titan_ckpt import Checkpointer, TrainState, export_hf, import_hf
from titan_ckpt.cli import main
from titan_ckpt.interop.hf import import_hf_step
from titan_ckpt.interop.safetensors_folder import SafetensorsReader
from titan_ckpt.interop.views import read_box, row_boxes
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def odd_model() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    for name, value in {
        "scalar": torch.tensor(3.5),
        "count": torch.tensor([1, 2**62]),
        "flags": torch.tensor([True, False, True]),
        "eight": torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }.items():
        model.register_buffer(name, value)
    return model


def save_odd(root: str, sharded: bool) -> None:
    model = odd_model()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    Checkpointer(root).save(1, TrainState(model=model, rng=False))


def export_with(root: str, out: str, fails: bool) -> str:
    if fails and dist.get_rank() == 1:

        def full(nbytes: int) -> None:
            raise ValueError("the disk of this rank is full")
    else:

        def full(nbytes: int) -> None:
            pass

    try:
        export_hf(root, out, max_shard_bytes=800, config={"model_type": "x"}, progress=full, group=dist.group.WORLD)
    except ValueError as err:
        return str(err)
    return ""


def test_ranks_write_the_files_that_one_process_writes_and_fail_together(tmp_path):
    save_odd(str(tmp_path), False)
    step = tmp_path / "step-00000001"
    export_hf(step, tmp_path / "one", max_shard_bytes=800, config={"model_type": "x"})
    assert run_ranks(export_with, 2, str(step), str(tmp_path / "two"), False) == ["", ""]
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert len(files) > 4
    assert {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()} == files
    first, second = run_ranks(export_with, 2, str(step), str(tmp_path / "bad"), True)
    assert second == "the disk of this rank is full"
    assert "rank 1 failed (1 of 2 ranks did): the disk of this rank is full" in first
    assert sorted(path.name for path in tmp_path.iterdir() if "bad" in path.name) == []


def test_an_export_equals_the_state_bit_for_bit_and_opens_with_the_plain_library(tmp_path):
    run_ranks(save_odd, 2, str(tmp_path), True)
    files = export_hf(tmp_path / "step-00000001", tmp_path / "out", max_shard_bytes=800, config={"model_type": "x"})
    assert len(files) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    got = {}
    for file in files:
        loaded = load_file(file)
        assert {key for key, name in index["weight_map"].items() if name == file.name} == set(loaded)
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        got |= loaded
    want = odd_model().state_dict()
    del want["head.weight"]  # tied: stored once
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        assert got[name].shape == value.shape
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
    assert index["metadata"]["total_parameters"] == sum(value.numel() for value in want.values())
    assert json.loads((tmp_path / "out" / "config.json").read_bytes()) == {"model_type": "x"}


def test_an_export_converts_floats_with_rounding_and_leaves_integers(tmp_path):
    save_odd(str(tmp_path), False)
    export_hf(tmp_path / "step-00000001", tmp_path / "out", dtype=torch.bfloat16)
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = odd_model().state_dict()
    assert torch.equal(got["embed.weight"], want["embed.weight"].bfloat16())
    assert torch.equal(got["count"], want["count"])
    assert got["calls"].dtype == torch.int64


def import_sharded(folder: str) -> dict[str, torch.Tensor]:
    model = odd_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-1.0)
    import_hf(folder, model)
    return {k: v.full_tensor().clone() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


def test_an_import_fills_sharded_parameters_and_ties(tmp_path):
    save_odd(str(tmp_path), False)
    export_hf(tmp_path / "step-00000001", tmp_path / "out", max_shard_bytes=800)
    want = odd_model().state_dict()
    for got in run_ranks(import_sharded, 2, str(tmp_path / "out")):
        assert all(
            torch.equal(got[k].reshape(-1).view(torch.uint8), v.reshape(-1).view(torch.uint8)) for k, v in want.items()
        )


def test_an_import_refuses_what_does_not_fit_and_leaves_the_model(tmp_path):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensors missing \['bias'\]"):
        import_hf(tmp_path, model)
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"weight has shape \[2, 3\], but \[3, 2\]"):
        import_hf(tmp_path, model)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="was not written whole"):
        import_hf(tmp_path, model)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        import_hf(tmp_path, model)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "gone.safetensors"}}))
    with pytest.raises(ValueError, match=r"is missing \['gone.safetensors'\]"):
        import_hf(tmp_path, model)
    assert torch.equal(model.weight, before)


WRONG_HEADERS = {
    "overlap": ([0, 4800], [0, 160], 4800),
    "hole": ([320, 5120], [0, 160], 5120),
    "bytes left over": ([0, 4800], [4800, 4960], 9999),
}


@pytest.mark.parametrize("wrong", WRONG_HEADERS)
def test_a_file_that_the_safetensors_library_refuses_is_refused(tmp_path, wrong):
    weight, bias, nbytes = WRONG_HEADERS[wrong]
    header = {
        "weight": {"dtype": "F32", "shape": [40, 30], "data_offsets": weight},
        "bias": {"dtype": "F32", "shape": [40], "data_offsets": bias},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    model = nn.Linear(30, 40)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        import_hf(tmp_path, model)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        import_hf_step(tmp_path, tmp_path / "steps")
    assert torch.equal(model.weight, before)


def line(rows: int = 2, columns: int = 2) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.constant_(layer.weight, -1)
    return layer


def write_index(folder, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_says_from_which_file_a_tensor_is_read(tmp_path):
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    save_file({"weight": torch.zeros(2, 2), "bias": torch.ones(2)}, tmp_path / "b.safetensors")  # holds a stale copy
    (tmp_path / "c.safetensors").write_bytes(b"no file of the index")
    write_index(tmp_path, {"weight": "a.safetensors", "bias": "b.safetensors"})
    model = nn.Linear(2, 2)
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, torch.ones(2, 2))
    write_index(tmp_path, {"weight": "b.safetensors", "bias": "a.safetensors"})
    with pytest.raises(ValueError, match=r"says that 'bias' is in 'a\.safetensors', but that file does not contain it"):
        import_hf(tmp_path, model)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json is not an index with a weight_map"):
        import_hf(tmp_path, model)


def test_a_tensor_in_two_files_without_an_index_is_refused_with_both_files(tmp_path):
    for name in ("one", "two"):
        save_file({"weight": torch.ones(2, 2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"'weight' is in 'one\.safetensors' and in 'two\.safetensors'"):
        import_hf(tmp_path, line())
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'weight' is in 'model\.safetensors' and in 'one\.safetensors'"):
        import_hf(tmp_path, line())


def test_a_consolidated_copy_is_read_only_if_there_is_no_other(tmp_path):
    model = line()
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "consolidated.00.safetensors")
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, torch.zeros(2, 2))
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_the_names_of_diffusers_are_read_and_a_variant_beside_the_plain_file_is_left_alone(tmp_path):
    model = line()
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, torch.zeros(2, 2))
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "diffusion_pytorch_model.safetensors")
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, torch.ones(2, 2))
    save_file({"weight": torch.full((2, 2), 3.0)}, tmp_path / "part.safetensors")
    index = {"weight_map": {"weight": "part.safetensors"}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, torch.full((2, 2), 3.0))


def write_four_bits(folder) -> None:
    """``x`` of a dtype that torch cannot hold, and a weight."""
    entries = {
        "x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [2, 6]},
    }
    head = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(6))


def test_a_tensor_of_an_unreadable_dtype_is_refused_only_by_who_asks_for_it(tmp_path):
    write_four_bits(tmp_path)
    model = line(1, 1)
    import_hf(tmp_path, model, strict=False)
    assert model.weight.item() == 0
    with pytest.raises(ValueError, match=r"1 unexpected \['x'\]"):
        import_hf(tmp_path, model)
    model.register_buffer("x", torch.zeros(4))
    with pytest.raises(ValueError, match="tensor 'x' has dtype F4, which this version cannot read"):
        import_hf(tmp_path, model)
    with pytest.raises(ValueError, match="tensor 'x' has dtype F4"):
        import_hf_step(tmp_path, tmp_path / "steps")
    assert not (tmp_path / "steps").exists()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "held"),
    [
        (torch.float32, torch.int64),
        (torch.int64, torch.float32),
        (torch.bool, torch.bfloat16),
        (torch.float16, torch.bool),
        (torch.int64, torch.int32),
        (torch.complex64, torch.float32),
    ],
    ids=str,
)
def test_an_import_converts_nothing_but_floating_point_numbers(tmp_path, saved, held, strict):
    save_file({"x": torch.tensor([1.5, 2.0]).to(saved)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.register_buffer("x", torch.zeros(2, dtype=held))
    with pytest.raises(ValueError, match=f"x is {held}, but {saved} was saved"):
        import_hf(tmp_path, model, strict=strict)
    model.x = torch.zeros(2, dtype=saved)
    import_hf(tmp_path, model, strict=strict)
    assert torch.equal(model.x, torch.tensor([1.5, 2.0]).to(saved))


def test_an_import_into_the_meta_device_is_refused_with_the_way_out(tmp_path):
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"weight is on the meta device.*to_empty"):
        import_hf(tmp_path, model)
    model.to_empty(device="cpu")
    import_hf(tmp_path, model)
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_an_export_leaves_out_what_leave_out_names(tmp_path):
    save_odd(str(tmp_path), False)
    export_hf(tmp_path / "step-00000001", tmp_path / "out", leave_out=["count|flags", ".*calls"])
    assert odd_model().state_dict().keys() - load_file(tmp_path / "out" / "model.safetensors").keys() == {
        "count", "flags", "calls", "head.weight",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"leave_out='coun' matches no tensor .* as a whole"):
        export_hf(tmp_path / "step-00000001", tmp_path / "again", leave_out=["coun"])
    assert not (tmp_path / "again").exists()


def test_an_import_refuses_a_tied_weight_that_the_folder_has_twice_and_differently(tmp_path):
    state = {k: v.clone() for k, v in Net().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    import_hf(tmp_path, Net())
    state["head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="are one tied weight in this model, but differ"):
        import_hf(tmp_path, Net())


def test_rows_are_cut_in_order_and_cover_everything():
    for shape in [(), (0, 3), (5,), (7, 3), (2, 3, 50), (1, 40), (3, 1, 4, 2)]:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        parts = []
        for offsets, sizes in row_boxes(shape, 10):
            part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            assert 0 < part.numel() <= 10
            parts.append(part.reshape(-1))
        assert torch.equal(torch.cat(parts) if parts else whole.reshape(-1), whole.reshape(-1)), shape


def test_the_command_line_exports_and_imports(tmp_path, capsys):
    save_odd(str(tmp_path), False)
    assert main(["export-hf", str(tmp_path / "step-00000001"), str(tmp_path / "hf")]) == 0
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "back"), "--step", "4"]) == 0
    assert main(["diff", str(tmp_path / "step-00000001"), str(tmp_path / "back" / "step-00000004")]) == 0
    model = odd_model()
    nn.init.zeros_(model.embed.weight)
    assert Checkpointer(tmp_path / "back").restore(TrainState(model=model, rng=False)) == 4
    assert torch.equal(model.embed.weight, odd_model().embed.weight)
    assert main(["export-hf", str(tmp_path / "step-00000001"), str(tmp_path / "hf")]) == 2
    assert "exists" in capsys.readouterr().err


EXPORT = """
import sys, threading, time, torch
from titan_ckpt import export_hf
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024
before = anonymous()
peak = [0]
export_hf(sys.argv[1], sys.argv[2], dtype=torch.bfloat16, progress=lambda n: peak.append(anonymous()))
print(max(peak) - before)
"""


@pytest.mark.slow
def test_an_export_of_two_gigabytes_takes_less_than_200_mb(tmp_path):
    model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(8)))
    Checkpointer(tmp_path).save(1, TrainState(model=model, rng=False))
    del model
    command = [sys.executable, "-c", EXPORT, str(tmp_path / "step-00000001"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200e6


def packed_experts(experts=3, rows=5, groups=2):
    """Random 4-bit codes and exponents, and what they mean by the format: a sign, two bits of exponent, one of fraction."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, groups), dtype=torch.uint8)

    def value(code):
        exponent, fraction = code >> 1 & 3, code & 1
        size = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
        return -size if code & 8 else size

    want = torch.empty(experts, groups * 32, rows)
    for e, r, g, b in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
        byte, unit = int(blocks[e, r, g, b]), 2.0 ** (int(scales[e, r, g]) - 127)
        want[e, 32 * g + 2 * b, r] = value(byte & 15) * unit
        want[e, 32 * g + 2 * b + 1, r] = value(byte >> 4) * unit
    return blocks, scales, want


def test_experts_in_four_bits_are_read_exactly_whole_and_in_part(tmp_path):
    blocks, scales, want = packed_experts()
    save_file({"w_blocks": blocks}, tmp_path / "model-1.safetensors")
    save_file({"w_scales": scales, "blocks": torch.ones(2)}, tmp_path / "model-2.safetensors")
    model = nn.Module()
    model.w, model.blocks = nn.Parameter(torch.empty(3, 64, 5)), nn.Parameter(torch.empty(2))
    import_hf(tmp_path, model)
    assert torch.equal(model.w.data, want)
    view = SafetensorsReader(tmp_path).views()["w"]
    for box in [((1, 0, 0), (1, 64, 5)), ((0, 30, 1), (3, 5, 2)), ((2, 63, 4), (1, 1, 1)), ((0, 32, 0), (2, 32, 5))]:
        places = tuple(slice(at, at + n) for at, n in zip(*box, strict=True))
        assert torch.equal(read_box(view, box).float(), want[places])


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "there is no 'w_scales'"),
        (torch.zeros(3, 5, 3, dtype=torch.uint8), r"of shape \[3, 5, 3\] is U8: MXFP4 has blocks"),
        (torch.zeros(3, 5, 2), r"is F32: MXFP4 has blocks"),
    ],
)
def test_experts_in_four_bits_without_their_exponents_are_refused(tmp_path, scales, message):
    blocks, _, _ = packed_experts()
    save_file({"w_blocks": blocks} | ({} if scales is None else {"w_scales": scales}), tmp_path / "model.safetensors")
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(3, 64, 5))
    with pytest.raises(ValueError, match=message):
        import_hf(tmp_path, model)


def test_float8_matrices_carry_their_scales_and_are_read_back_within_a_rounding(tmp_path):
    torch.manual_seed(0)
    model = nn.Module()
    model.a, model.b = nn.Linear(300, 200, bias=False), nn.Linear(40, 1000, bias=False)
    model.a.weight.data[130:, 140:] *= 1e-4  # a block of small weights keeps its resolution
    model.b.weight.data[:128] = 0
    Checkpointer(tmp_path / "steps").save(1, TrainState(model=model, rng=False))
    export_hf(tmp_path / "steps" / "step-00000001", tmp_path / "out", float8=["a.weight", "b.weight"])
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got["a.weight"].dtype == torch.float8_e4m3fn
    assert got["a.weight_scale_inv"].shape == (2, 3)
    assert got["b.weight_scale_inv"].shape == (8, 1)
    assert got["a.weight_scale_inv"].dtype == torch.float32
    back = nn.Module()
    back.a, back.b = nn.Linear(300, 200, bias=False), nn.Linear(40, 1000, bias=False)
    import_hf(tmp_path / "out", back)
    for rows in range(0, 200, 128):
        for columns in range(0, 300, 128):
            want = model.a.weight.data[rows : rows + 128, columns : columns + 128]
            have = back.a.weight.data[rows : rows + 128, columns : columns + 128]
            # e4m3: 3 bits of fraction, half a unit of the last place of the block's largest; reading rounds to bfloat16
            assert (have - want).abs().max() <= want.abs().max() * (2**-4 + 2**-8)
    assert torch.equal(back.b.weight.data[:128], torch.zeros(128, 40))
    model.bias = nn.Parameter(torch.zeros(3))
    Checkpointer(tmp_path / "steps").save(2, TrainState(model=model, rng=False))
    with pytest.raises(ValueError, match="it is not a floating-point matrix"):
        export_hf(tmp_path / "steps" / "step-00000002", tmp_path / "bad", float8=["bias"])
    with pytest.raises(ValueError, match="are not exported"):
        export_hf(tmp_path / "steps" / "step-00000002", tmp_path / "bad", float8=["gone"])
    assert not (tmp_path / "bad").exists()


def test_an_import_reaches_a_module_through_the_entry_that_its_hook_makes(tmp_path):
    linear = nn.Linear(3, 3, bias=False)

    def write(module, state, prefix, _):
        state[prefix + "weight"] = state[prefix + "weight"].detach().clone()

    linear.register_state_dict_post_hook(write)
    save_file({"weight": torch.full((3, 3), 4.0)}, tmp_path / "model.safetensors")
    import_hf(tmp_path, linear)
    assert bool((linear.weight == 4.0).all())
