import json

import pytest
from titan_train.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer


def test_bytes_are_their_own_ids_and_every_text_comes_back(random_texts):
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    for text in random_texts[:2000]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.bos_id, 97, tokenizer.eos_id]) == "a"


def test_saved_bytes_load(tmp_path):
    assert load_tokenizer(ByteTokenizer().save(tmp_path / "tok")).kind == "bytes"


def test_a_folder_without_tokenizer_is_refused_with_the_way_to_get_one(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer: expected .*titan-train data tokenizer"):
        load_tokenizer(tmp_path)


def test_a_saved_tokenizer_that_was_changed_is_refused(tmp_path, small_sentencepiece):
    folder = small_sentencepiece.save(tmp_path / "tok")
    saved = json.loads((folder / "titan_tokenizer.json").read_text())
    (folder / "titan_tokenizer.json").write_text(json.dumps(saved | {"fingerprint": "0" * 64}))
    with pytest.raises(ValueError, match="was changed after it was saved"):
        load_tokenizer(folder)
    (folder / "titan_tokenizer.json").write_text(json.dumps(saved | {"kind": "wordpiece"}))
    with pytest.raises(ValueError, match="kind='wordpiece'"):
        load_tokenizer(folder)
    (folder / "titan_tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_tokenizer(folder)
    (folder / "titan_tokenizer.json").write_text(json.dumps(saved))
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match="Copy the whole folder"):
        load_tokenizer(folder)
