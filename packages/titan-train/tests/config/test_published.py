"""`model.init = "hf:DIR"` sets what config.json and the tokenizer's files decide, and keeps what the user set."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from titan_train.config import dump_config, load_config
from titan_train.models.gpt.hf import GPT_HF
from titan_train.models.llama.args import LlamaArgs
from titan_train.models.llama.hf import LLAMA_HF
from titan_train.models.registry import families, find_model

LLAMA = LlamaArgs(
    dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=300, head_dim=16, norm_eps=1e-3,
    tied_embeddings=True, rope_theta=12345.0, rope_factor=4.0, rope_original_seq_len=64,
)  # fmt: skip


def publish(folder: Path, **changes: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_HF.config_of(LLAMA) | changes))
    return f"hf:{folder}"


def load(folder: Path, text: str, *words: str) -> tuple[Any, list[str]]:
    lines: list[str] = []
    file = folder / "run.toml"
    file.write_text(text)
    return load_config(str(file), words, note=lines.append), lines


def test_arguments_that_nobody_set_are_those_of_config_json(tmp_path: Path) -> None:
    init = publish(tmp_path / "m")
    config, lines = load(tmp_path, f'[model]\nname = "llama3_8b"\ninit = "{init}"\n')
    assert config.model.name == "llama3_8b"
    made = LlamaArgs(
        **{name: getattr(find_model("llama3_8b")[1], name) for name in LLAMA.__dataclass_fields__} | config.model.args
    )
    assert made == LLAMA
    (line,) = lines
    assert line.startswith(f"{init} sets model.args.dim=32, ")
    assert "rope_factor=4.0" in line


def test_the_command_line_is_enough_and_the_family_is_found(tmp_path: Path) -> None:
    config, lines = load(tmp_path, "", "--model.init", publish(tmp_path / "m"))
    assert config.model.name == "llama3_debug"  # the configuration of the family that is nearest
    assert config.model.args["num_layers"] == 3
    assert "model.name=llama3_debug" in lines[0]
    assert load_config_again(tmp_path, config) == config


def load_config_again(folder: Path, config: Any) -> Any:
    file = folder / "again.toml"
    file.write_text(dump_config(config))
    return load_config(str(file))


@pytest.mark.parametrize("family", ["llama", "gpt", "qwen3", "deepseek", "qwen3_vl"])
def test_every_shipped_model_is_found_by_its_config_json(family: str, tmp_path: Path) -> None:
    for name, args in families()[family].configs.items():
        hf = families()[family].load_hf()
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hf.config_of(args)))
        config, _ = load(tmp_path, "", "--model.init", f"hf:{folder}")
        base = find_model(config.model.name)[1]
        made = type(args)(**{f.name: getattr(base, f.name) for f in fields(args)} | config.model.args)
        assert hf.settings_of(made) == hf.settings_of(args)


@pytest.mark.parametrize("name", ["", 'name = "deepseek_v3"', 'name = "deepseek_v2_lite"'])
def test_experts_have_a_bias_where_the_folder_has_one(name: str, tmp_path: Path) -> None:
    family = families()["deepseek"]
    lite = family.configs["deepseek_v2_lite"]
    scored = replace(lite, scores="sigmoid", group_score="top2_sum", normalize_weights=True, bias_rate=0.001)
    for args in (lite, scored):  # V2-Lite's shape with the routing of V3 is Moonlight's
        (tmp_path / "config.json").write_text(json.dumps(family.load_hf().config_of(args)))
        config, _ = load(tmp_path, f'[model]\ninit = "hf:{tmp_path}"\n{name}\n')
        made = replace(find_model(config.model.name)[1], **config.model.args)
        assert (made.bias_rate > 0) == (args.bias_rate > 0)
        assert family.load_hf().settings_of(made) == family.load_hf().settings_of(args)


def test_a_list_in_config_json_is_an_argument_too(tmp_path: Path) -> None:
    family = families()["qwen3_vl"]
    args = replace(family.configs["qwen3_vl_debug"], vision_layers=5, deepstack_layers=(1, 3, 4))
    (tmp_path / "config.json").write_text(json.dumps(family.load_hf().config_of(args)))
    config, _ = load(tmp_path, "", "--model.init", f"hf:{tmp_path}")
    assert config.model.args["deepstack_layers"] == (1, 3, 4)
    assert load_config_again(tmp_path, config) == config


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    init = publish(tmp_path / "m")
    text = f'[model]\ninit = "{init}"\ninit_changes = ["vocab_size"]\nargs = {{ rope_theta = 5.0, dim = 64 }}\n'
    config, _ = load(tmp_path, text)
    assert (config.model.args["rope_theta"], config.model.args["dim"]) == (5.0, 64)
    assert "vocab_size" not in config.model.args  # the tokenizer's, as the user wants another vocabulary


def test_a_family_that_is_not_here_is_trained_as_transformers_own(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "granite", "vocab_size": 9}')
    config, lines = load(tmp_path, f'[model]\ninit = "hf:{tmp_path / "m"}"\n')
    assert config.model.name == f"hf:{tmp_path / 'm'}"
    assert config.model.args == {}
    assert len(lines) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": 3}', '{"model_type": "llama"}'])
def test_a_damaged_config_json_is_left_to_the_check_of_the_model(content: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(content)
    config, _ = load(tmp_path, f'[model]\nname = "llama3_debug"\ninit = "hf:{tmp_path / "m"}"\n')
    assert config.model.args == {}


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("", "hf"),
        ('kind = "hf"', "hf"),
        ('kind = "sentencepiece"\nvocab_size = 4096', "hf"),  # no file: it would train one
        ('kind = "bytes"', "bytes"),
        ('kind = "sentencepiece"\npath = "mine.model"', "sentencepiece"),
    ],
)
def test_the_tokenizer_is_the_folders_unless_another_is_named(section: str, kind: str, tmp_path: Path) -> None:
    init = publish(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    text = f'[model]\ninit = "{init}"\n[tokenizer]\n{section}\n'
    config, lines = load(tmp_path, text)
    assert config.tokenizer.kind == kind
    assert (config.tokenizer.path == str(tmp_path / "m")) == (kind == "hf")
    assert ("tokenizer.kind=hf" in lines[0]) == (kind == "hf")
    kept, _ = (
        load(tmp_path, text.replace("[tokenizer]", 'init_changes = ["tokenizer"]\n[tokenizer]'))
        if kind == "bytes"
        else (config, [])
    )
    assert kept.tokenizer.kind == kind


@pytest.mark.parametrize("home", [False, True])
def test_a_run_goes_on_without_the_folder(home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    init = publish(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    text = f'[run]\nname = "r"\ndir = "{"~" if home else tmp_path}"\n[model]\ninit = "{init}"\n'
    config, _ = load(tmp_path, text)
    (tmp_path / "r" / "tokenizer").mkdir(parents=True)
    (tmp_path / "r" / "config.toml").write_text(dump_config(config))
    (tmp_path / "m" / "config.json").unlink()
    again, _ = load(tmp_path, text)
    assert again.model == config.model
    assert (again.tokenizer.kind, again.tokenizer.path) == ("hf", str(tmp_path / "r" / "tokenizer"))


BEGINS = {
    "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 1, "content": "[gMASK]"}],
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
}


def test_documents_begin_as_texts_of_the_folders_tokenizer(tmp_path: Path) -> None:
    init = publish(tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    file.write_text(json.dumps(BEGINS))
    text = f'[run]\nname = "r"\ndir = "{tmp_path}"\n[model]\ninit = "{init}"\n'
    config, lines = load(tmp_path, text)
    assert config.data.add_bos
    assert "data.add_bos=true" in lines[0]
    assert not load(tmp_path, text + "[data]\nadd_bos = false\n")[0].data.add_bos  # what the user set stays
    changes = 'init_changes = ["tokenizer"]\n'
    assert not load(tmp_path, f'{text}{changes}[tokenizer]\nkind = "bytes"\n')[0].data.add_bos
    ranks = f'kind = "tiktoken"\npath = "{tmp_path / "m" / "original" / "tokenizer.model"}"'  # the same ids otherwise
    for section in (f'kind = "hf"\npath = "{file}"', f'kind = "hf"\npath = "{file.parent}"', ranks):
        assert load(tmp_path, f"{text}[tokenizer]\n{section}\n")[0].data.add_bos
        assert load(tmp_path, f"{text}{changes}[tokenizer]\n{section}\n")[0].data.add_bos == (section != ranks)
    assert load_config_again(tmp_path, config) == config
    (tmp_path / "r" / "tokenizer").mkdir(parents=True)
    (tmp_path / "r" / "config.toml").write_text(dump_config(config))
    onward, lines = load(tmp_path, f'[model]\ninit = "run:{tmp_path / "r"}"\n')
    assert onward.data.add_bos
    assert load(tmp_path, f'[model]\ninit = "run:{tmp_path / "r"}"\n[tokenizer]\n{ranks}\n')[0].data.add_bos
    assert "data.add_bos=true" in lines[0]
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"bos_token": "[gMASK]"}')  # which texts do not begin with
    assert not load(tmp_path, text)[0].data.add_bos
    (tmp_path / "m" / "config.json").unlink()
    assert load(tmp_path, text)[0].data.add_bos  # as this run was started


@pytest.mark.parametrize("began", [False, True])
def test_a_run_goes_on_as_its_documents_began(began: bool, tmp_path: Path) -> None:
    init = publish(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps({} if began else BEGINS))  # now says otherwise
    text = f'[run]\nname = "r"\ndir = "{tmp_path}"\n[model]\ninit = "{init}"\n'
    before, _ = load(tmp_path, f"{text}[data]\nadd_bos = {str(began).lower()}\n")
    step = tmp_path / "r" / "checkpoints" / "step-000000010"
    step.mkdir(parents=True)
    (tmp_path / "r" / "config.toml").write_text(dump_config(before))
    assert load(tmp_path, text)[0].data.add_bos != began  # nothing to go on from
    (step / "MANIFEST.json").write_text("{}")
    assert load(tmp_path, text)[0].data.add_bos == began
    assert load(tmp_path, f"{text}[data]\nadd_bos = {str(not began).lower()}\n")[0].data.add_bos != began


@pytest.mark.parametrize("kind", ["hf", "bytes"])
def test_a_tokenizer_that_was_named_is_the_runs_copy_once_its_folder_has_gone(kind: str, tmp_path: Path) -> None:
    init, path = publish(tmp_path / "m"), tmp_path / "m" if kind == "hf" else ""
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(BEGINS))
    changes = 'init_changes = ["tokenizer"]\n' if kind == "bytes" else ""
    text = f'[run]\nname = "r"\ndir = "{tmp_path}"\n[model]\ninit = "{init}"\n{changes}'
    text += f'[tokenizer]\nkind = "{kind}"\npath = "{path}"\n'
    config, _ = load(tmp_path, text)
    (tmp_path / "r" / "tokenizer").mkdir(parents=True)
    (tmp_path / "r" / "config.toml").write_text(dump_config(config))
    (tmp_path / "m" / "config.json").unlink()
    assert load(tmp_path, text)[0].tokenizer == config.tokenizer
    shutil.rmtree(tmp_path / "m")
    again, _ = load(tmp_path, text)
    kept = str(tmp_path / "r" / "tokenizer") if kind == "hf" else ""
    assert (again.tokenizer.kind, again.tokenizer.path) == (kind, kept)
    assert again.data.add_bos == config.data.add_bos == (kind == "hf")


def test_gpt_2_keeps_its_learned_positions(tmp_path: Path) -> None:
    args = find_model("gpt_debug")[1]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(GPT_HF.config_of(args) | {"n_positions": 96}))
    config, _ = load(tmp_path, "", "--model.init", f"hf:{tmp_path / 'm'}")
    assert config.model.args["max_seq_len"] == 96
