"""What a folder of the hub says beside its weights."""

import json
import shutil

import pytest
from titan_train.export.hf_folder import write_tokenizer_files
from titan_train.export.step_model import SteppedModel
from titan_train.generation import encode_prompt
from titan_train.models.hf.folder import stop_ids_of
from titan_train.serve.folder import load_served
from titan_train.tokenizers import ByteTokenizer, ChatTemplate, train_sentencepiece
from titan_train.tokenizers.chat_template import BUILT_IN


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": '{"eos_token_id": [7, 9]}', "config.json": '{"eos_token_id": 3}'}, (7, 9)),
        ({"generation_config.json": '{"eos_token_id": 7}'}, (7,)),
        ({"generation_config.json": '{"eos_token_id": null}', "config.json": '{"eos_token_id": [3]}'}, (3,)),
        ({"config.json": '{"model_type": "llama4", "text_config": {"eos_token_id": [3, 5]}}'}, (3, 5)),
        ({"config.json": "{}"}, ()),
        ({}, ()),
    ],
)
def test_the_tokens_that_end_a_text_are_read(files, ids, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert stop_ids_of(tmp_path) == ids
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, "</s>"]}')
    with pytest.raises(
        ValueError, match=r"generation_config.json: eos_token_id=\[7, '</s>'\] must be the id of a token"
    ):
        stop_ids_of(tmp_path)


class Steps(SteppedModel):
    description = {"max_positions": None, "seq_len": 4096, "step": 3}  # noqa: RUF012

    def __init__(self) -> None:
        pass

    def step(self, tokens, positions, caches):
        raise NotImplementedError


@pytest.mark.parametrize("add_bos", [False, True])
def test_an_export_is_served_with_its_chat_template_and_beginning_whatever_its_tokenizer(
    add_bos, tmp_path, monkeypatch
):
    tokenizer = train_sentencepiece(["def f(value):\n    return value + other\nclass Thing: pass\n"] * 50, 300)
    write_tokenizer_files(tmp_path, tokenizer, 64, ChatTemplate.of(tokenizer, BUILT_IN["plain"]), add_bos=add_bos)
    (tmp_path / "model.onnx").touch()
    monkeypatch.setattr("titan_train.serve.folder.load_exported", lambda *_, **__: Steps())
    served = load_served(tmp_path)
    assert served.tokenizer.kind == "sentencepiece"
    assert served.config.model.seq_len == 4096  # of the training, which limits prompts
    assert served.template is not None
    assert served.template.source == BUILT_IN["plain"]
    begun = [*([tokenizer.bos_id] if add_bos else []), *tokenizer.encode("def")]
    assert encode_prompt(served, "def") == begun
    (tmp_path / "tokenizer.json").unlink()  # as of a vocabulary that cannot be written as one
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": add_bos}))
    assert encode_prompt(load_served(tmp_path), "def") == begun


def test_a_published_folder_with_both_files_is_served_with_its_tokenizer_json(tmp_path, monkeypatch):
    write_tokenizer_files(tmp_path / "folder", ByteTokenizer(), 64)
    train_sentencepiece(["def f(value):\n    return value\n"] * 50, 300).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "tokenizer.model", tmp_path / "folder")
    (tmp_path / "folder" / "model.onnx").touch()
    monkeypatch.setattr("titan_train.serve.folder.load_exported", lambda *_, **__: Steps())
    served = load_served(tmp_path / "folder")
    assert served.tokenizer.kind == "hf"
    assert encode_prompt(served, "def") == list(b"def")
