"""A run's folder keeps its tokenizer and chat template: it is used where the original files are not."""

import base64
import shutil

import pytest
from titan_train.config import parse_config
from titan_train.inputs import (
    load_saved_tokenizer,
    open_inputs,
    prepare_inputs,
    save_tokenizer,
    vocab_size_without_training,
)


def test_a_tokenizer_has_its_size_however_its_path_is_written(tmp_path, monkeypatch):
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "ranks.model").write_text(ranks)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (f"{tmp_path}/ranks.model", "~/ranks.model", f"hf:{tmp_path}/ranks.model"):
        config = parse_config({"tokenizer": {"kind": "tiktoken", "path": path}})
        assert vocab_size_without_training(config) == 512, path  # 256 bytes and Llama 3's 256 special tokens


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_run_needs_neither_cache_nor_template_file_any_more(tmp_path, kind):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of some text, é\n" for i in range(400)))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    config = parse_config(
        {
            "model": {"name": "llama3_debug", "seq_len": 64},
            "tokenizer": {"kind": kind, "vocab_size": 303, "chat_template": str(tmp_path / "chat.jinja")},
            "data": {
                "cache_dir": str(tmp_path / "cache"),
                "sources": [{"name": "a", "kind": "text", "paths": [str(tmp_path / "text.txt")]}],
                "validation_fraction": 0.0,
            },
        }
    )
    prepare_inputs(config, quiet=True)
    inputs = open_inputs(config)
    save_tokenizer(tmp_path / "run", inputs.tokenizer, inputs.template)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "chat.jinja").unlink()
    (tmp_path / "text.txt").unlink()
    tokenizer, template = load_saved_tokenizer(tmp_path / "run", config)
    assert tokenizer.fingerprint == inputs.tokenizer.fingerprint
    assert template is not None
    name = next(name for name, number in tokenizer.special_ids.items() if number == tokenizer.eos_id)
    assert template.render([{"role": "user", "content": "x"}]) == f"x{name}"
    (tmp_path / "run" / "tokenizer" / "titan_tokenizer.json").unlink()
    if kind == "bytes":
        with pytest.raises(ValueError, match="holds no tokenizer"):
            load_saved_tokenizer(tmp_path / "run", config)
