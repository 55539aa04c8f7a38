"""A package gives a family of transformers its plan by an entry point; one that cannot be loaded stops nothing."""

import sys
from pathlib import Path
from typing import Any

import pytest
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.models.hf.plans import HF_PLANS, hf_plans

MODULE = """
from titan_train.models.hf.plans import HF_PLANS
GRANITE = HF_PLANS["llama"]
NO_PLAN = 3
"""
ENTRIES = """[titan_train.hf_plans]
granite = my_plans:GRANITE
smollm3 = my_plans:MISSING
cohere = my_plans:NO_PLAN
"""


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
    assert hf_plans().keys() - HF_PLANS.keys() == {"granite"}
    assert "smollm3 of titan_train.hf_plans could not be loaded" in caplog.text
    assert "cohere of titan_train.hf_plans is a int, not an HFPlan" in caplog.text


def test_a_family_with_such_a_plan_can_be_cut(installed: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_folders
    from titan_train.parallel.tensor import check_tensor_parallel, table_for

    folder = hf_folders.make(installed / "granite", "granite")
    model: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    assert model.plan is HF_PLANS["llama"]
    check_tensor_parallel(
        model, 2, table=table_for(model), seq_len_local=32, sequence_parallel=True, replicate_kv=False, async_tp=False
    )
