"""The guide "Add a model family": its files, written outside the repository, make a family that trains and exports."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_testing import run_ranks

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "add_a_model_family.md"
PARALLEL = Path(__file__).parents[1] / "parallel"
MODEL = {"model": {"name": "cohere_debug", "seq_len": 32, "args": {}}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as an installer would leave it: the guide's package, and its entry point."""
    site = tmp_path_factory.mktemp("site")
    blocks = re.findall(r"^```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    files = dict(blocks)
    info = site / "cohere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cohere\nVersion: 1.0\n")
    section = files.pop("pyproject.toml").replace("[project.entry-points.", "[").replace('"', "")
    (info / "entry_points.txt").write_text(section)
    assert sorted(files) == [f"cohere/{name}.py" for name in ("__init__", "args", "hf", "model", "tp")]
    for name, content in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(content)
    return site


def in_site(site: Path, name: str, *arguments: Any) -> Any:
    """Run a function of tests/parallel/composition.py where the package is installed."""
    from titan_train.models import registry

    sys.path[:0] = [str(site), str(PARALLEL)]
    registry._installed.cache_clear()
    import composition

    return getattr(composition, name)(*arguments)


def test_listing_and_planning_the_new_family_do_not_import_torch(site: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from titan_train.models.registry import families, list_models\n"
        "assert families()['cohere'].configs.keys() == {'cohere_debug', 'command_r'}\n"
        "assert 'cohere_debug' in list_models() and 'llama3_8b' in list_models()\n"
        "from titan_train.planner import find_shape\n"
        "assert find_shape('command_r').num_layers == 40\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_four_ranks_train_it_as_one_process_does(site: Path, tmp_path: Path) -> None:
    run_ranks(in_site, 1, site, "prepare", tmp_path, init=False)
    (want,) = run_ranks(in_site, 1, site, "run", tmp_path, "one", MODEL, init=False)
    layout = MODEL | {"parallel": {"tp": 2, "pp": 2}, "pipeline": {"schedule": "1f1b"}, "train": {"microbatch": 2}}
    ranks = run_ranks(in_site, 4, site, "run", tmp_path, "four", layout, timeout_s=150)
    losses, norms, validation, _ = ranks[0]
    # ten steps of float32: the layouts of the other families stay within the same bound of one process
    assert losses == pytest.approx(want[0], abs=2e-6)
    assert norms == pytest.approx(want[1], rel=1e-5)
    assert validation[0] == pytest.approx(want[2][0], abs=2e-6)
    got, whole = run_ranks(gradients, 1, site, [rank[3] for rank in ranks], [want[3]], init=False)[0]
    # the last stage holds a copy of the tied matrix, under its other name
    assert torch.equal(got.pop("lm_head.weight"), got["tok_embeddings.weight"])
    assert got.keys() == whole.keys()
    for name in whole:
        assert (got[name] - whole[name]).abs().max() <= 1e-6 + 1e-4 * whole[name].abs().max(), name


def gradients(site: Path, *ranks: Any) -> Any:
    return [in_site(site, "assemble", captured) for captured in ranks]


def test_the_export_gives_the_logits_of_transformers(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    ours, theirs = run_ranks(export, 1, site, tmp_path, init=False)[0]
    assert (ours - theirs).abs().max() <= 1e-5
    assert ours.std() > 0.01


def export(site: Path, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    sys.path.insert(0, str(site))
    from titan_train.models import registry

    registry._installed.cache_clear()
    import transformers
    from titan_ckpt import Checkpointer, TrainState, export_hf
    from titan_train.config.model import ModelConfig
    from titan_train.config.published import with_published
    from titan_train.models import build_model
    from titan_train.models.registry import family_of

    torch.manual_seed(0)
    model = build_model(ModelConfig(name="cohere_debug"), vocab_size=None, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    family = family_of(model)
    assert family is not None
    assert family.shape(model.args).parameters() == sum(parameter.numel() for parameter in model.parameters())
    hf = family.load_hf()
    with Checkpointer(folder / "ckpt", async_=False) as checkpointer:
        checkpointer.save(1, TrainState(model=model))
    (step,) = (folder / "ckpt").glob("step-*")
    config = hf.config_of(model.args)
    export_hf(step, folder / "hf", names=hf.key_map, config=config)
    assert hf.args_from(json.loads((folder / "hf" / "config.json").read_text())) == model.args
    other = replace(model.args, rope_theta=5e5)
    assert hf.args_from({key: value for key, value in hf.config_of(other).items() if key != "rope_theta"}) == other
    tree, _ = with_published({"model": {"init": f"hf:{folder / 'hf'}"}})
    assert tree["model"] == {"init": f"hf:{folder / 'hf'}", "name": "cohere_debug", "args": {}}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    assert type(theirs).__name__ == "CohereForCausalLM"
    tokens = torch.randint(512, (2, 40))
    with torch.no_grad():
        return model(tokens), theirs(tokens).logits
