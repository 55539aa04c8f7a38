"""A package gives a family of transformers its plan by an entry point; one that cannot be loaded stops nothing."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.models.hf.plan import HFPlan
from titan_train.models.hf.plans import HF_PLANS, hf_plans

MODULE = """
import dataclasses
from titan_train.models.hf.plans import HF_PLANS
MINE = dataclasses.replace(HF_PLANS["llama"])
NO_PLAN = 3
"""
ENTRIES = """[titan_train.hf_plans]
doge = my_plans:MINE
granite = my_plans:MINE
smollm3 = my_plans:MISSING
cohere = my_plans:NO_PLAN
"""
OPT = HFPlan(
    styles={}, layers="model.decoder.layers", embedding="model.decoder.embed_tokens", norm="model.decoder.final_layer_norm",
    feed_forward="fc1",
)  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder as an installer would leave it, on this process's path."""
    info = tmp_path / "site" / "my_plans-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plans\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "site" / "my_plans.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    hf_plans.cache_clear()
    yield tmp_path
    hf_plans.cache_clear()
    sys.modules.pop("my_plans", None)


def test_a_package_adds_a_plan(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert hf_plans().keys() - HF_PLANS.keys() == {"doge"}
    assert hf_plans()["granite"] is hf_plans()["doge"] is not HF_PLANS["granite"]
    assert "smollm3 of titan_train.hf_plans could not be loaded" in caplog.text
    assert "cohere of titan_train.hf_plans is a int, not an HFPlan" in caplog.text


def test_a_family_with_such_a_plan_can_be_cut(installed: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders
    from titan_train.parallel.tensor.checks import check_tensor_parallel
    from titan_train.parallel.tensor.styles import table_for

    folder = hf_folders.make(installed / "granite", "granite")
    model: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    assert model.plan is hf_plans()["granite"]
    check_tensor_parallel(
        model, 2, table=table_for(model), seq_len_local=32, sequence_parallel=True, replicate_kv=False, async_tp=False
    )


def chain_and_whole(folder: Path) -> tuple[Any, Any]:
    """Logits and gradients of three pipeline stages, one after the other, and of the whole model."""
    import titan_fsdp as fsdp
    import torch
    from titan_train.models import init_for

    whole: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    fsdp.materialize(whole, "cpu", init_for(whole), seed=3)
    whole.eval()
    stages = [whole.take_stage(layers, first=layers.start == 0, last=layers.stop == 4)
              for layers in (range(1), range(1, 3), range(3, 4))]  # fmt: skip
    tokens = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    results: list[Any] = []
    for parts in (stages, [whole]):
        states: Any = tokens
        for part in parts:
            states = part(states)
        states.square().mean().backward()
        found: dict[str, Any] = {}
        for part in parts:
            found |= {name: p.grad for name, p in part.named_parameters()}
        results.append({"logits": states.detach()} | found)
    return results[0], results[1]


def test_what_a_family_does_around_its_layers_is_done_in_one_stage_only(installed: Path) -> None:
    """granite scales its embeddings by a field of ``config.json``, and its logits."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders

    chain, whole = chain_and_whole(hf_folders.make(installed / "granite", "granite"))
    assert chain.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(
            chain[name], value, atol=1e-7, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_parts_that_a_plan_does_not_name_are_in_the_first_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Learned positions of opt: no field of a plan is about them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders

    monkeypatch.setattr("titan_train.models.hf.build.hf_plans", lambda: {"opt": OPT})
    chain, whole = chain_and_whole(hf_folders.make(tmp_path / "opt", "opt"))
    assert chain.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(
            chain[name], value, atol=1e-7, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_family_that_its_plan_cannot_cut_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A linear between the last norm and the head is in no stage that needs it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders
    from titan_train.models.hf.probe import probe

    monkeypatch.setattr("titan_train.models.hf.build.hf_plans", lambda: {"opt": OPT})
    folder = hf_folders.make(tmp_path / "opt", "opt", word_embed_proj_dim=16)
    model: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    probe(model, "hf:opt", packed=True, staged=False, drawn=True)
    with pytest.raises(ValueError, match=r"a chain of pipeline stages of this opt .*Set parallel.pp=1"):
        probe(model, "hf:opt", packed=True, staged=True, drawn=True)


def test_a_family_that_changes_its_logits_computes_its_loss_from_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By whatever name its field goes: nothing here knows that of granite."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders
    from titan_train.models.hf.probe import probe

    monkeypatch.setattr("titan_train.models.hf.build.hf_plans", lambda: {"granite": HF_PLANS["llama"]})
    monkeypatch.setattr("titan_train.models.hf.decoder._LOGITS_CHANGED", {})
    model: Any = build_model(ModelConfig(name=f"hf:{hf_folders.make(tmp_path, 'granite')}", seq_len=32), vocab_size=96)
    assert model.loss_head == "lm_head"
    probe(model, "hf:granite", packed=True, staged=True, drawn=True)
    assert model.loss_head is None


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("cohere", {"logit_scale": 0.5}),
        ("granite", {"logits_scaling": 2.0}),
        ("nanochat", {"final_logit_softcapping": 4.0}),
    ],
)
def test_logits_that_are_scaled_or_capped_in_a_known_way_are_changed_in_the_head(
    kind: str, change: dict[str, float], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders
    from titan_train.models.hf.probe import probe

    folder = hf_folders.make(tmp_path / kind, kind, **change)
    model: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    probe(model, f"hf:{folder}", packed=False, staged=True, drawn=True)
    assert model.loss_head == "lm_head"
    (value,) = change.values()
    x = torch.linspace(-8, 8, 9)
    want = value * torch.tanh(x / value) if "final_logit_softcapping" in change else x * 0.5
    assert torch.allclose(model.logits_change(x), want)
    plain: Any = build_model(
        ModelConfig(name=f"hf:{hf_folders.make(tmp_path / 'llama', 'llama')}", seq_len=32), vocab_size=96
    )
    assert plain.logits_change is None
