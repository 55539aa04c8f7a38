"""The texts of files that perplexity is taken of."""

import json

import pytest
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
