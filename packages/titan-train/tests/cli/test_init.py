"""`titan-train init`: every configuration that it writes is one that `check` takes, and those for chats train."""

import pytest
from titan_train import Trainer, load_config
from titan_train.cli import main
from titan_train.cli.init import starting_point

KINDS = ("pretrain", "continue", "sft", "lora", "diffusion")


@pytest.mark.parametrize("kind", KINDS)
def test_check_takes_what_is_written(kind, tmp_path, monkeypatch, capsys):
    if kind == "lora":
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["init", kind]) == 0
    assert f"titan-train run {kind}.toml" in capsys.readouterr().out
    assert main(["check", f"{kind}.toml"]) == 0, capsys.readouterr().err
    assert main(["init", kind]) == 2
    assert f"{kind}.toml exists" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sft", "lora"])
def test_the_shipped_chats_are_learned(kind, tmp_path):
    if kind == "lora":
        pytest.importorskip("peft", reason="peft is not installed")
    config = load_config(
        kind,
        train={"steps": 8, "global_batch": 4},
        **{"run.dir": tmp_path, "data.cache_dir": tmp_path / "cache", "metrics.progress": "off", "validation.every": 0},
    )
    with Trainer(config) as trainer:
        trainer.fit()
    assert trainer.losses[-1] < trainer.losses[0]


def test_a_model_and_data_of_ones_own_are_filled_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    text = starting_point("continue", model="hf:org/name", data="text/*.txt")
    assert 'init = "hf:org/name"' in text
    assert 'kind = "text"\npaths = ["text/*.txt"]' in text
    assert "[tokenizer]" not in text
    assert 'kind = "text"' in starting_point("sft", data="A.TXT")
    assert main(["init", "lora", "--model", "hf:org/name", "--data", "hf:datasets/org/name"]) == 0
    assert "run lora.toml --download" in capsys.readouterr().out
    config = load_config("lora.toml")
    assert (config.model.name, config.model.init) == ("hf:org/name", "hf:org/name")
    assert (config.data.sources[0].kind, config.data.sources[0].paths) == ("parquet", ("hf:datasets/org/name",))
    assert main(["check", "lora.toml"]) == 2
    assert "titan-train data download hf:" in capsys.readouterr().err
    for words in (["sft", "--model", "llama3_8b"], ["pretrain", "--model", "hf:a/b"], ["stf"]):
        assert main(["init", *words]) == 2
