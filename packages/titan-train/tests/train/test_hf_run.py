"""A run of ``model.name = "hf:DIR"`` needs the folder once: its own keeps what resuming, generating and exporting need."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from titan_testing import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_runs


def start_then_lose_the_folder(folder: Path, kind: str, adapters: dict[str, Any]) -> Any:
    """Two steps, the folder is gone, two more steps from the checkpoint, a sample, and both exports."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import composition
    import hf_runs
    from titan_train.export.run import export_run
    from titan_train.generation import load_run
    from titan_train.run_folder import with_kept_model

    composition.prepare(folder)
    source = hf_runs.publish(folder, kind)
    before = load_file(Path(source) / "model.safetensors")
    tree = hf_runs.sections(source, {})
    tree["model"] = tree["model"] | adapters
    composition.continue_run(folder, "run", tree, 2)
    shutil.rmtree(source)
    first, _ = composition.continue_run(folder, "run", tree, 4)
    assert first == 2
    run_dir = folder / "runs" / "run"
    run = load_run(run_dir)
    assert run.complete("def add", max_new_tokens=4, seed=1)
    export_run(run_dir, folder / "out", dtype="fp32")
    config = run.config
    assert with_kept_model(config, run_dir) == config
    assert (run_dir / "model" / "config.json").is_file()
    return before


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [
        ("phi3", {}),
        ("llama", {"lora_rank": 4}),
        *(
            pytest.param(k, {}, marks=pytest.mark.slow)
            for k in ("mixtral", "gpt_neox", "gemma3_text", "deepseek_v3", "gpt2")
        ),
    ],
)
def test_a_run_goes_on_and_is_exported_without_the_folder(kind: str, adapters: dict[str, Any], tmp_path: Path) -> None:
    (before,) = run_ranks(start_then_lose_the_folder, 1, tmp_path, kind, adapters, init=False, timeout_s=300)
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == before.keys()  # the names that the folder came with
    assert any(not torch.equal(out[name], before[name]) for name in out)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"][0].endswith(("ForCausalLM", "LMHeadModel"))
    if kind == "gpt2":
        return
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file() == bool(adapters)


def test_the_tokens_that_end_texts_are_kept_from_run_to_run(tmp_path: Path) -> None:
    from titan_train.config import parse_config
    from titan_train.run_folder import keep_model, kept_stop_ids

    published = tmp_path / "published"
    published.mkdir()
    (published / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    starts: list[dict[str, Any]] = [{"init": f"hf:{published}"}, {"init": f"run:{tmp_path / '0'}"}]
    starts.append(starts[0] | {"init_changes": ["tokenizer"]})
    for number, start in enumerate(starts):
        keep_model(parse_config({"model": start | {"name": "llama3_debug"}}), tmp_path / str(number))
    shutil.rmtree(published)
    keep_model(parse_config({"model": starts[0] | {"name": "llama3_debug"}}), tmp_path / "0")
    assert [kept_stop_ids(tmp_path / str(number)) for number in range(3)] == [(3, 7), (3, 7), ()]


def test_a_changed_config_json_is_refused(tmp_path: Path) -> None:
    from titan_train.config import dump_config, parse_config
    from titan_train.run_folder import keep_model, read_config, with_kept_model

    source = hf_runs.publish(tmp_path, "llama")
    config = parse_config({"model": {"name": f"hf:{source}"}})
    run_dir = tmp_path / "run"
    keep_model(config, run_dir)
    (run_dir / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-00000001" / "MANIFEST.json").touch()
    assert with_kept_model(config, run_dir).model.name == f"hf:{run_dir / 'model'}"
    file = Path(source) / "config.json"
    file.write_text(file.read_text().replace("500000.0", "10000.0"))
    with pytest.raises(ValueError, match="is not what this run was started with"):
        with_kept_model(config, run_dir)
    (run_dir / "config.toml").write_text(dump_config(config))  # what only reads a run takes its copy
    assert read_config(run_dir).model.name == f"hf:{run_dir / 'model'}"
