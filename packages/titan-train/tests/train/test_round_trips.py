"""A folder of transformers comes into ranks under every layout, and the same ranks write it back bit for bit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from titan_testing import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import composition
import hf_folders
import hf_runs

PP = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "fsdp4": (4, {}),
    "tp": (2, {"parallel": {"tp": 2}}),
    "pp": (2, PP),
    "ep": (2, {"parallel": {"ep": 2}}),
    "tp pp": (4, {"parallel": {"tp": 2, "pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    "ep tp": (4, {"parallel": {"ep": 2, "tp": 2}}),
}
PLANNED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "phi3", "gpt_neox", "olmo3", "llama4_text", "ministral",
    "ministral3", "gemma4_text", "ernie4_5", "hunyuan_v1_dense", "qwen3_5_text", "olmo_hybrid",
    *hf_folders.LIKE_LLAMA,
)  # fmt: skip
ROUTED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "deepseek_v32", "deepseek_v4", "granitemoehybrid", "nemotron_h", "kimi_linear", "minimax_m2",
    "ernie4_5_moe", "hunyuan_v1_moe", *hf_folders.LIKE_LLAMA_ROUTED,
)  # fmt: skip
UNPLANNED = ("phimoe", "opt", "gpt2", "bloom")
DEFAULT = {
    "fsdp": [("gpt2", True), ("phimoe", False)],
    "pp": [("gemma3_text", True)],
    "tp pp": [("phi3", True), ("olmo2", False)],
    "ep tp": [("qwen2_moe", False)],
}


def works(kind: str, layout: str, tied: bool) -> bool:
    if kind in (*hf_folders.LIKE_LLAMA, *hf_folders.LIKE_LLAMA_ROUTED) and tied and layout not in ("one", "tp pp"):
        return False  # how a tie is kept depends on the layout, not on the family
    if kind in UNPLANNED:
        return layout in ("one", "fsdp", "fsdp4")
    return kind in ROUTED or "ep" not in layout


CASES = [pytest.param(layout, cases, id=layout) for layout, cases in DEFAULT.items()]
FAMILIES = [(kind, tied) for tied in (False, True) for kind in (*PLANNED, *ROUTED, *UNPLANNED)]
CASES += hf_runs.in_thirds(
    {layout: [case for case in FAMILIES if works(case[0], layout, case[1])] for layout in LAYOUTS},
    "family",
    timeout=1200,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("round_trips")
    run_ranks(composition.prepare, 1, str(made), init=False)
    return made


def source_of(folder: Path, kind: str, tied: bool) -> Path:
    return folder / f"{kind}-{'tied' if tied else 'untied'}"


def in_and_out(folder: Path, layout: dict[str, Any], cases: list[tuple[str, bool]], to: Path) -> None:
    from titan_train.config import parse_config
    from titan_train.export.run import export_run
    from titan_train.train import Trainer

    group = dist.group.WORLD if dist.is_initialized() else None
    for case in cases:
        source = source_of(folder, *case)
        run, out = (to / source.name / name for name in ("run", "out"))
        tree = hf_runs.sections(str(source), layout)
        tree["data"] = {"document_mask": False}  # one family has no positions
        with Trainer(parse_config(composition.tree(folder, to.name, tree)), run_dir=run) as trainer:
            trainer.save()
        export_run(run, out, dtype="fp32", gate=False, max_shard_bytes=50_000, group=group)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("layout", "cases"), CASES)
def test_a_folder_comes_in_and_leaves_bit_for_bit(
    folder: Path, layout: str, cases: list[tuple[str, bool]], tmp_path: Path
) -> None:
    for kind, tied in cases:
        if not source_of(folder, kind, tied).exists():
            hf_folders.make(source_of(folder, kind, tied), kind, vocab_size=264, tie_word_embeddings=tied)
    ranks, settings = LAYOUTS[layout]
    run_ranks(in_and_out, ranks, folder, settings, cases, tmp_path, init=ranks > 1, timeout_s=240 + 30 * len(cases))
    for kind, tied in cases:
        source, out = source_of(folder, kind, tied), tmp_path / source_of(folder, kind, tied).name / "out"
        want, got = tensors_of(source), tensors_of(out)
        assert want.keys() == got.keys(), (kind, tied)
        assert all(torch.equal(want[name], got[name]) for name in want), (kind, tied)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == tied
