"""The export is a Hugging Face float8 checkpoint that holds what the layers compute with."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import titan_fp8
import torch
from titan_fp8 import export
from titan_testing import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(256, 384)
        self.lm_head = nn.Linear(384, 40, bias=False)
        self.register_buffer("steps", torch.tensor(7))


def build() -> Model:
    model = Model().bfloat16()
    titan_fp8.convert_to_float8(model, "rowwise", min_speedup=0)
    return model


def read(path: Path) -> dict[str, Tensor]:
    """The safetensors format, read by its specification."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt", "written_by": "titan_fp8"}
    data, tensors, end = bytearray(raw[8 + length :]), {}, 0
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        assert begin == end  # no holes
        end = stop
        count = stop - begin
        flat = torch.frombuffer(data, dtype=torch.uint8, offset=begin, count=count) if count else torch.empty(0)
        tensors[name] = flat.clone().view(DTYPES[entry["dtype"]]).view(entry["shape"])
    assert end == len(data)
    return tensors


def check_weights(tensors: dict[str, Tensor], model: Model) -> None:
    weight = model.layer.weight.detach().float()
    codes, scale = tensors["model.layer.weight"], tensors["model.layer.weight_scale_inv"]
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == (3, 2)
    restored = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    # half a step of e4m3 is 2^-4 of a value; below 2^-6 of the block's scale steps are constant
    allowed = (weight.abs() * 2**-4).clamp(min=float(scale.max()) * 2**-10)
    assert ((restored - weight).abs() <= allowed).all()
    assert torch.equal(tensors["model.layer.bias"], model.layer.bias)
    assert torch.equal(tensors["model.lm_head.weight"], model.lm_head.weight)
    assert tensors["model.steps"] == 7


def test_the_export_holds_codes_scales_and_the_quantization_config(tmp_path: Path) -> None:
    model = build()
    files = titan_fp8.export_hf_fp8(
        model, tmp_path, config={"model_type": "llama"}, rename=lambda name: f"model.{name}"
    )
    assert [f.name for f in files] == ["model.safetensors", "config.json"]
    check_weights(read(files[0]), model)
    config = json.loads(files[1].read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.lm_head"],
    }


def test_exported_codes_are_those_of_the_blockwise_recipe(tmp_path: Path) -> None:
    model = build()
    titan_fp8.export_hf_fp8(model, tmp_path)
    q = titan_fp8.cast(model.layer.weight.detach(), titan_fp8.RECIPES["blockwise"].w)
    codes = read(tmp_path / "model.safetensors")["layer.weight"]
    assert torch.equal(codes.view(torch.uint8), q.data.view(torch.uint8))


def test_a_layer_with_two_names_is_in_float8_under_both(tmp_path: Path) -> None:
    layer = nn.Linear(128, 128, bias=False)
    model = nn.ModuleDict({"first": layer, "second": layer})
    titan_fp8.convert_to_float8(model, min_speedup=0)
    titan_fp8.export_hf_fp8(model, tmp_path)
    tensors = read(tmp_path / "model.safetensors")
    assert [tensors[f"{name}.weight"].dtype for name in model] == [torch.float8_e4m3fn] * 2
    assert torch.equal(tensors["first.weight_scale_inv"], tensors["second.weight_scale_inv"])


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 8))


def test_what_readers_would_misread_stays_as_it_is_and_is_excepted(tmp_path: Path) -> None:
    """Transformers takes a block of 192 rows with two scales to be 96 rows, and every ``.experts`` for float8."""
    sizes = {"long": (192, 64), "wide": (64, 200), "short": (100, 128), "even": (256, 128)}
    sizes |= {"q_a_proj": (256, 128), "kv_a_proj_with_mqa": (192, 128), "gate_proj": (128, 64), "up_proj": (128, 64)}
    mlp = nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name, (n, k) in sizes.items()})
    experts = [nn.ModuleDict({"up": nn.Linear(64, n), "down": nn.Linear(64, 64)}) for n in (192, 64)]
    model = nn.ModuleDict({"mlp": mlp, "a": nn.ModuleDict({"experts": Stacked()})})
    model["b"] = nn.ModuleDict({"experts": nn.ModuleList(experts), "shared_experts": nn.Linear(64, 64)})
    titan_fp8.convert_to_float8(model, "blockwise", skip=[], min_speedup=0)
    titan_fp8.export_hf_fp8(model, tmp_path, rename=lambda name: name.replace("mlp.", "model.mlp."))
    tensors = read(tmp_path / "model.safetensors")
    scales = {name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")}
    suited = {f"model.mlp.{name}.weight" for name in ("short", "even", "gate_proj", "up_proj")}
    assert scales == suited | {"b.shared_experts.weight"}
    assert torch.equal(tensors["model.mlp.long.weight"], mlp["long"].weight)
    excepted = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    ours = {f"b.experts.{i}.{name}" for i in range(2) for name in ("up", "down")}
    apart = {f"model.mlp.{name}" for name in ("long", "wide", "q_a_proj", "kv_a_proj_with_mqa")}
    assert set(excepted) == apart | {"a.experts", "b.experts"} | ours


def test_offloaded_shards_are_gathered_on_the_device_that_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offloaded:
        device, device_mesh = (
            torch.device("cpu"),
            SimpleNamespace(device_type="meta"),
        )  # which stands for the accelerator

        def to(self, kind: str) -> SimpleNamespace:
            return SimpleNamespace(full_tensor=lambda: torch.ones(2, device=kind))

    monkeypatch.setattr(export, "is_dtensor", lambda value: isinstance(value, Offloaded))
    assert export._whole(Offloaded()).is_meta  # type: ignore[arg-type]


def test_large_models_are_split_over_files_with_an_index(tmp_path: Path) -> None:
    model = build()
    files = titan_fp8.export_hf_fp8(model, tmp_path, max_file_bytes=50_000, rename=lambda name: f"model.{name}")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for path in files:
        if path.suffix == ".safetensors":
            part = read(path)
            assert all(index["weight_map"][name] == path.name for name in part)
            tensors |= part
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    check_weights(tensors, model)


def test_nothing_stays_of_an_export_in_another_number_of_files(tmp_path: Path) -> None:
    model = build()
    for most in (5 * 10**9, 50_000, 20_000, 5 * 10**9):
        files = titan_fp8.export_hf_fp8(model, tmp_path, max_file_bytes=most)
        assert sorted(tmp_path.iterdir()) == sorted(files)


OTHERS = (
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
)


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_with_weights_of_others_is_refused_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"original")
    with pytest.raises(ValueError, match=r"holds 1 .* without the mark .* Give another folder"):
        titan_fp8.export_hf_fp8(build(), tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"original")]


def test_an_export_leaves_copies_of_weights_under_names_that_loaders_do_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.bak").write_bytes(b"original")
    titan_fp8.export_hf_fp8(build(), tmp_path)
    assert (tmp_path / "model.safetensors.bak").read_bytes() == b"original"


def refused_on_rank_0(folder: str) -> None:
    if torch.distributed.get_rank() == 0:  # machines may have folders of their own
        (Path(folder) / "0").mkdir()
        (Path(folder) / "0" / "model.safetensors").write_bytes(b"original")
    with pytest.raises(ValueError, match=r"holds 1 .* without the mark"):
        export_sharded(f"{folder}/{torch.distributed.get_rank()}")


def test_what_rank_0_refuses_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(refused_on_rank_0, 2, str(tmp_path))
    assert (tmp_path / "0" / "model.safetensors").read_bytes() == b"original"


def test_the_safetensors_package_reads_the_same(tmp_path: Path) -> None:
    safetensors: Any = pytest.importorskip("safetensors.torch")
    titan_fp8.export_hf_fp8(build(), tmp_path)
    ours, theirs = read(tmp_path / "model.safetensors"), safetensors.load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k].view(torch.uint8), theirs[k].view(torch.uint8)) for k in ours if ours[k].dim())


def export_sharded(folder: str) -> None:
    model = Model().bfloat16()
    titan_fp8.convert_to_float8(model, "blockwise", min_speedup=0)
    titan_fp8.apply_float8_all_gather(model)
    fully_shard(model)
    titan_fp8.export_hf_fp8(model, folder, rename=lambda name: f"model.{name}")


def test_sharded_weights_are_gathered_and_written_once(tmp_path: Path) -> None:
    run_ranks(export_sharded, 2, str(tmp_path))
    check_weights(read(tmp_path / "model.safetensors"), build())
    assert not list(tmp_path.glob("*.partial"))


def test_exports_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no float8 layer"):
        titan_fp8.export_hf_fp8(Model(), tmp_path)
    odd = nn.Sequential(titan_fp8.Float8Linear(64, 192))
    with pytest.raises(ValueError, match=r"0.weight has shape \[192, 64\].* at most 128 or a multiple"):
        titan_fp8.export_hf_fp8(odd, tmp_path)
    with pytest.raises(ValueError, match="both renamed to 'x'"):
        titan_fp8.export_hf_fp8(build(), tmp_path, rename=lambda _: "x")
