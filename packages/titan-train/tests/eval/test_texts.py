"""The texts of files that perplexity is taken of, and what a folder is asked for."""

import json

import pytest
from titan_train.eval.model import load_eval_model
from titan_train.eval.perplexity import read_texts


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
