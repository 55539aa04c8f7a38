"""A run's folder keeps its tokenizer and chat template: it is used where the original files are not."""

import base64
import shutil
import threading
from dataclasses import replace

import pytest
from titan_train.cli import main
from titan_train.config import dump_config, parse_config
from titan_train.data import prepared, tokenizer
from titan_train.inputs import (
    load_saved_tokenizer,
    open_inputs,
    prepare_inputs,
    save_tokenizer,
    vocab_size_without_training,
)
from titan_train.tokenizers import load_tokenizer, train_sentencepiece
from titan_train.train import Trainer


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


def configure(folder, name="run", *, stream=False, text="*.jsonl", steps=2, **checkpoint):
    return parse_config(
        {
            "run": {"dir": str(folder / "runs"), "name": name},
            "model": {"name": "llama3_debug", "seq_len": 16},
            "tokenizer": {"vocab_size": 303},
            "data": {
                "cache_dir": str(folder / "cache"),
                "sources": [
                    {"name": "a", "kind": "jsonl", "paths": [str(folder / text)]}
                    | ({"stream": True, "stream_window": 8} if stream else {})
                ],
                "validation_fraction": 0.0,
            },
            "train": {"steps": steps, "global_batch": 4},
            "validation": {"every": 0},
            "checkpoint": {"every": 2, **checkpoint},
            "metrics": {"progress": "off", "report": False},
            "launch": {"device": "cpu", "nproc": 1},
        }
    )


def write_texts(file, word):
    file.write_text("".join(f'{{"text": "line {i} of {word * (1 + i % 3)}"}}\n' for i in range(300)))


def train(config):
    with Trainer(config) as trainer:
        first = trainer.step
        trainer.fit()
    return first, load_tokenizer(trainer.run_dir / "tokenizer").fingerprint


def test_a_stream_that_grew_goes_on_with_the_vocabulary_that_the_run_began_with(tmp_path):
    write_texts(tmp_path / "1.jsonl", "apples")
    _, began = train(configure(tmp_path, stream=True))
    write_texts(tmp_path / "9.jsonl", "pears")
    assert train(configure(tmp_path, stream=True, steps=4)) == (2, began)


def test_changed_text_keeps_the_vocabulary_of_the_weights_in_the_run_and_its_branches(tmp_path):
    write_texts(tmp_path / "1.jsonl", "apples")
    _, began = train(configure(tmp_path))
    write_texts(tmp_path / "1.jsonl", "pears")
    grown = configure(tmp_path, steps=4)
    with pytest.raises(ValueError, match="the data: its tokens"):
        train(grown)
    grown = replace(grown, checkpoint=replace(grown.checkpoint, allow_data_change=True))
    assert train(grown) == (2, began)
    write_texts(tmp_path / "other.txt", "plums")
    mix = {"text": "other.txt", "start_from": f"{tmp_path / 'runs/run'}@2", "allow_data_change": True}
    assert train(configure(tmp_path, "branch", steps=4, **mix)) == (2, began)
    assert train(configure(tmp_path, "new", text="other.txt"))[1] != began

    weights = r" To begin that one with these weights .*model.init='run:\S*/runs/run' and model.init_changes=\['tokenizer'\]\."
    larger = r" To begin .* larger vocabulary, run `titan-train export \S*/runs/run --out DIR`, .*model.args.vocab_size=306\."
    for change, remedy in (
        ({"vocab_size": 306}, larger),
        ({"vocab_size": 301}, ""),
        ({"model_type": "unigram"}, weights),
    ):
        other = replace(grown, tokenizer=replace(grown.tokenizer, **change))
        refusal = r"run/tokenizer: 303 ids, bpe. Restore these settings, or begin from nothing .*without checkpoint.start_from\."
        with pytest.raises(ValueError, match=f"{refusal}{remedy}$"):
            prepare_inputs(other, quiet=True)
    same_size = replace(configure(tmp_path, "same"), model=replace(grown.model, init=f"run:{tmp_path / 'runs/run'}@2"))
    same_size = replace(same_size, model=replace(same_size.model, init_changes=("tokenizer",)))
    first, vocabulary = train(same_size)
    assert first == 0
    assert vocabulary != began


def test_data_prepare_refuses_a_vocabulary_that_the_weights_have_not_learned(tmp_path, capsys):
    write_texts(tmp_path / "1.jsonl", "apples")
    train(configure(tmp_path))
    (tmp_path / "run.toml").write_text(dump_config(configure(tmp_path)))
    assert main(["data", "prepare", str(tmp_path / "run.toml"), "--tokenizer.vocab-size", "306"]) == 2
    assert "run/tokenizer: 303 ids, bpe. Restore these settings" in capsys.readouterr().err


def test_a_run_in_a_folder_of_its_own_is_prepared_with_the_vocabulary_of_that_folder(tmp_path):
    write_texts(tmp_path / "1.jsonl", "apples")
    config, elsewhere = configure(tmp_path), tmp_path / "elsewhere"
    with Trainer(config, elsewhere) as trainer:
        trainer.fit()
    write_texts(tmp_path / "1.jsonl", "pears")
    grown = configure(tmp_path, steps=4, allow_data_change=True)
    prepare_inputs(grown, elsewhere, quiet=True)
    opened = open_inputs(replace(grown, run=replace(grown.run, dir=str(tmp_path), name="elsewhere")))
    assert opened.tokenizer.fingerprint == load_tokenizer(elsewhere / "tokenizer").fingerprint


def test_what_is_prepared_waits_for_no_other_preparation_and_what_is_not_waits_for_its_own_and_says_so(
    tmp_path, caplog, monkeypatch
):
    training, go_on, trained = threading.Event(), threading.Event(), []

    def train_slowly(*args, **kwargs):
        training.set()
        go_on.wait(60)
        trained.append(1)
        return train_sentencepiece(*args, **kwargs)

    def prepares(config):
        thread = threading.Thread(target=prepare_inputs, args=(config,), kwargs={"quiet": True})
        thread.start()
        return thread

    write_texts(tmp_path / "1.jsonl", "apples")
    write_texts(tmp_path / "other.txt", "pears")
    ready, other = configure(tmp_path), configure(tmp_path, text="other.txt")
    prepare_inputs(ready, quiet=True)
    monkeypatch.setattr(tokenizer, "train_sentencepiece", train_slowly)
    monkeypatch.setattr(prepared, "_PATIENCE_S", 0.0)
    first = prepares(other)
    training.wait(60)
    second, done = prepares(other), prepares(ready)
    done.join(20)
    was_done = not done.is_alive()
    second.join(0.5)
    go_on.set()
    for thread in (first, second, done):
        thread.join()
    assert (was_done, trained) == (True, [1])
    assert "waiting for another process that prepares" in caplog.text
