"""DeepSeek-V4 of transformers: gradients, published and resaved names, float8 files, tables of experts, refusals."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import titan_fsdp as fsdp
import torch
from safetensors.torch import load_file, save_file
from titan_ckpt import import_hf
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, init_for
from titan_train.models.hf.probe import probe
from titan_train.train.warm_start import check_init

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders

KIND = "deepseek_v4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folders.make(tmp_path_factory.mktemp("published") / KIND, KIND)


def choice(folder: Path, **args: Any) -> ModelConfig:
    return ModelConfig(name=f"hf:{folder}", init=f"hf:{folder}", args=args, seq_len=32)


def read(folder: Path) -> Any:
    """The model with the folder's weights, after the checks of a run."""
    model: Any = build_model(choice(folder), vocab_size=96)
    check_init(f"hf:{folder}", model, choice(folder))
    fsdp.materialize(model, "cpu", init_for(model), seed=3)
    import_hf(folder, model, names=model.own_family.load_hf().key_map)
    return model


def theirs(folder: Path) -> Any:
    return hf_folders.auto_class(KIND).from_pretrained(folder, dtype=torch.float32)


def their_gradients(model: Any) -> dict[str, torch.Tensor]:
    """By the names here, where each projection of the experts is a stack."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if name.endswith(".gate_up_proj"):
            for leaf, part in zip(("w1", "w3"), parameter.grad.chunk(2, dim=1), strict=True):
                found[name.replace("gate_up_proj", leaf)] = part
        elif ".experts.down_proj" in name and ".shared" not in name:
            found[name.replace("down_proj", "w2")] = parameter.grad
        else:
            found[name] = parameter.grad
    return found


@pytest.mark.parametrize("length", [32, 30, 7, 3], ids=["whole windows", "a rest", "one window", "none"])
def test_logits_and_gradients_are_those_of_transformers(folder: Path, length: int) -> None:
    model, reference = read(folder).train(), theirs(folder).train()
    ids = torch.randint(0, 96, (2, length), generator=torch.Generator().manual_seed(1))
    got, want = model(ids), reference(ids, use_cache=False).logits
    torch.testing.assert_close(
        got, want, atol=1e-5, rtol=0
    )  # float32: sinks are a key here, and experts add in another order
    for logits in (got, want):
        (logits * torch.linspace(-1, 1, 96)).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = their_gradients(reference)
    assert gradients.keys() == expected.keys()
    floor = 0.01 * max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        off = float((gradients[name] - gradient).abs().max()) / max(float(gradient.abs().max()), floor)
        assert off <= 2e-5, f"{name} differs by {off:.1g}"


def test_scores_of_experts_are_clamped_in_these_folders(folder: Path) -> None:
    """Or the limit would not be seen."""
    model = read(folder)
    limits = [
        experts.limit
        for _, experts in model.named_modules()
        if getattr(experts, "limit", None) and hasattr(experts, "w1")
    ]
    assert limits == [0.5] * 4
    ids = torch.arange(64).view(2, 32)
    with torch.no_grad():
        clamped = model(ids)
        for module in model.modules():
            if hasattr(module, "w1"):
                module.limit = None
        assert (model(ids) - clamped).abs().max() > 1e-3


def test_files_that_transformers_wrote_itself_are_read_too(folder: Path, tmp_path: Path) -> None:
    theirs(folder).save_pretrained(tmp_path)
    published, resaved = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert {"embed.weight", "norm.weight", "layers.1.attn.kv_norm.weight", "hc_head_fn"} <= published.keys()
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.attn.norm.weight"} <= resaved.keys()
    want, got = read(folder).state_dict(), read(tmp_path).state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    missing = {name: value for name, value in resaved.items() if not name.endswith("tid2eid")}
    save_file(missing, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tid2eid"):
        read(tmp_path)


def quantized(folder: Path, target: Path, scale: torch.dtype) -> dict[str, torch.Tensor]:
    """A folder with matrices in float8, their scales named as published; the values that they stand for."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if ".attn.w" in name or ".experts." in name]:
        factor = torch.full((1, 1), 2.0**-5)
        stored = (tensors[name] / factor).to(torch.float8_e4m3fn)
        values[name] = stored.float() * factor
        tensors[name], tensors[name.replace(".weight", ".scale")] = stored, factor.to(scale)
    # further layers are left out
    tensors["mtp.0.attn.wkv.weight"] = torch.ones(8, 32).to(torch.float8_e4m3fn)
    tensors["mtp.0.attn.wkv.scale"] = torch.ones(1, 1).to(scale)
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return values


@pytest.mark.parametrize("scale", [torch.float32, torch.float8_e8m0fnu], ids=["base", "e8m0"])
def test_float8_matrices_of_published_files_are_read_with_their_scales(
    folder: Path, tmp_path: Path, scale: torch.dtype
) -> None:
    values = quantized(folder, tmp_path, scale)
    state = read(tmp_path).state_dict()
    assert torch.equal(state["model.layers.0.self_attn.q_a_proj.weight"], values["layers.0.attn.wq_a.weight"])
    assert torch.equal(state["model.layers.3.mlp.experts.w3"][1], values["layers.3.ffn.experts.1.w3.weight"])
    assert torch.equal(
        state["model.layers.3.attn_hc.scale"], load_file(folder / "model.safetensors")["layers.3.hc_attn_scale"]
    )


def test_experts_of_four_bits_are_those_that_transformers_dequantizes(folder: Path, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantized(folder, tmp_path, torch.float8_e8m0fnu)
    file = tmp_path / "model.safetensors"
    tensors, gen = load_file(file), torch.Generator().manual_seed(0)
    want = []
    for name in [f"layers.2.ffn.experts.{j}.w1" for j in range(4)]:  # two numbers a byte, a scale for each 32 of a row
        rows, columns = tensors[f"{name}.weight"].shape
        packed = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=gen)
        scale = torch.randint(118, 124, (rows, columns // 32), dtype=torch.uint8, generator=gen).view(
            torch.float8_e8m0fnu
        )
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = packed, scale
        want.append(Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32))
    save_file(tensors, file)
    assert torch.equal(read(tmp_path).state_dict()["model.layers.2.mlp.experts.w1"], torch.stack(want))


def test_drawn_tables_give_each_token_experts_of_its_own(folder: Path) -> None:
    model: Any = build_model(choice(folder), vocab_size=96)
    fsdp.materialize(model, "cpu", init_for(model), seed=3)
    tables = {name: buffer for name, buffer in model.named_buffers() if name.endswith("tid2eid")}
    assert len(tables) == 2
    for table in tables.values():
        assert bool((table[:, 0] != table[:, 1]).all())
        assert table.flatten().bincount().tolist() == [48] * 4


@pytest.mark.parametrize("rates", [[0, 128] * 2, [0, 4] * 2], ids=["heavily compressed", "compressed"])
def test_windows_that_know_no_documents_are_found_however_long_they_are(
    folder: Path, tmp_path: Path, rates: list[int]
) -> None:
    fields = json.loads((folder / "config.json").read_text())
    del fields["layer_types"], fields["compress_rates"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"compress_ratios": rates}))
    model: Any = build_model(choice(tmp_path), vocab_size=96)
    with pytest.raises(
        ValueError, match=r"in this deepseek_v4, documents of one row leak .* Set data.document_mask=false"
    ):
        probe(model, f"hf:{tmp_path}", packed=True, staged=False, drawn=True)
    probe(model, f"hf:{tmp_path}", packed=False, staged=True, drawn=True)


def test_what_it_cannot_do_is_refused_with_the_reason(folder: Path) -> None:
    from titan_train.parallel.tensor.checks import check_tensor_parallel
    from titan_train.parallel.tensor.styles import table_for

    model: Any = build_model(choice(folder), vocab_size=96)
    with pytest.raises(
        ValueError, match=r"tp=4 does not divide n_groups=2 of .*o_a_proj: a rank would hold part of a group"
    ):
        check_tensor_parallel(model, 4, table=table_for(model), seq_len_local=32, sequence_parallel=True)
    further: Any = build_model(choice(folder, mtp_depth=1), vocab_size=96)
    with pytest.raises(ValueError, match=r"it takes \[2, 32, 3, 32\] .*not hidden states \[B, S, d\].*Set mtp_depth=0"):
        probe(further, f"hf:{folder}", packed=False, staged=False, drawn=True)
