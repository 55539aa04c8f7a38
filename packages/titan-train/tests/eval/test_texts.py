"""The texts of files that perplexity is taken of, and what a folder is asked for."""

import json

import pytest
from titan_train.eval.model import EvalModel, load_eval_model
from titan_train.eval.perplexity import read_texts
from titan_train.export.hf_folder import write_tokenizer_files
from titan_train.export.load import continue_text
from titan_train.tokenizers import ByteTokenizer


def test_a_line_of_json_may_hold_any_character(tmp_path):
    texts = ["one\u2028two\u2029three\x85four", "five\r\nsix", "seven"]
    file = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file.write_bytes("\r\n".join([lines[0], "", *lines[1:]]).encode())
    assert read_texts([file]) == texts
    file.write_text('{"text": "a"}\n\n{"words": 1}\n')
    with pytest.raises(ValueError, match="line 3 is not an object with a text"):
        read_texts([file])


@pytest.mark.parametrize(("option", "given"), [("--step", {"step": 0}), ("--code", {"code": ["mine"]})])
def test_what_only_a_run_has_is_refused_for_an_exported_folder(option, given, tmp_path):
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ValueError, match=f"{option} is for a run's folder"):
        load_eval_model(tmp_path, **given)


def test_suffixes_in_capitals_count_and_a_byte_order_mark_is_no_text(tmp_path):
    lines, text = tmp_path / "A.JSONL", tmp_path / "b.TXT"
    lines.write_text('\ufeff{"text": "one"}\n{"text": "two"}\n')
    text.write_text("\ufeffthree\ufeff")
    assert read_texts([lines, text]) == ["one", "two", "three\ufeff"]


def test_a_text_of_an_export_ends_at_every_token_that_its_files_name(tmp_path, monkeypatch):
    write_tokenizer_files(tmp_path, ByteTokenizer(), 64, add_bos=True)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "vocab_size": 259}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    prompts = []

    class Fixed:
        def greedy(self, prompt, count):
            prompts.append(list(prompt))
            return [*b" ab", 258, *b"cd", 257][:count]

    monkeypatch.setattr("titan_train.eval.model.load_exported", lambda *_, **__: Fixed())
    model = load_eval_model(tmp_path)
    assert model.greedy([1], 6) == list(b" ab")
    assert continue_text(Fixed(), tmp_path, "x", 6) == " ab"
    assert prompts == [[1], [256, *b"x"]]
    assert model.encode_begun("x") == model.encode_begun("<bos>x") == [256, *b"x"]


def test_a_text_of_the_harness_begins_once_unless_special_tokens_are_refused():
    pytest.importorskip("lm_eval")
    from titan_train.eval.harness import HarnessModel

    model = EvalModel(
        name="", logits=lambda tokens: tokens, encode=lambda text: list(text.encode()), decode=str,
        greedy=lambda prompt, count: [], prefix_id=256, eos_id=257, max_length=8, begin_ids=(256,), begin_name="<bos>",
    )  # fmt: skip
    harness = HarnessModel(model)
    assert harness.tok_encode("ab") == harness.tok_encode("<bos>ab") == [256, *b"ab"]
    assert harness.tok_encode("<bos>", add_special_tokens=False) == list(b"<bos>")
