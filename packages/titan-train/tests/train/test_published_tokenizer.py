"""A run that starts from published weights must use their ids: a tokenizer that gives others is refused by what differs."""

import json
from pathlib import Path
from typing import Any

import pytest
from titan_train.config import Config, parse_config
from titan_train.tokenizers import HfTokenizer
from titan_train.train.published_tokenizer import check_tokenizer, difference

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")


def write(folder: Path, *, merges: int = 3, special: tuple[str, ...] = ("<|endoftext|>",), end: int = 0) -> Path:
    """A byte-level BPE of 256 bytes, a few merges and special tokens."""
    from titan_train.tokenizers.byte import BYTE_OF_CHARACTER

    pairs = [("e", "l"), ("l", "o"), ("r", "e"), ("o", "r")][:merges]
    vocab = {character: number for number, character in enumerate(BYTE_OF_CHARACTER)}
    for left, right in pairs:
        vocab[left + right] = len(vocab)
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(list(special))
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[end]}))
    return folder


def config(folder: Path, tokenizer: dict[str, Any], **model: Any) -> Config:
    return parse_config({"model": {"init": f"hf:{folder}", **model}, "tokenizer": tokenizer})


def named(folder: Path) -> dict[str, Any]:
    return {"kind": "hf", "path": str(folder)}


def test_the_folders_own_tokenizer_and_a_copy_of_it_pass(tmp_path: Path) -> None:
    folder, copy = write(tmp_path / "a"), write(tmp_path / "b")
    check_tokenizer(config(folder, named(folder)))
    check_tokenizer(config(folder, named(copy)))


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ({"kind": "sentencepiece"}, "trains a vocabulary of its own"),
        ({"kind": "bytes"}, "ids here and 260 there"),
        ({"merges": 2, "special": ("<|endoftext|>", "<pad>")}, "is 258 here and 259 there"),
        ({"merges": 2}, "259 ids here and 260 there"),
    ],
)
def test_another_tokenizer_is_refused(tokenizer: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    if "merges" in tokenizer:
        tokenizer = named(write(tmp_path / "b", **tokenizer))
    with pytest.raises(ValueError, match=words) as caught:
        check_tokenizer(config(folder, tokenizer))
    assert "model.init_changes=['tokenizer']" in str(caught.value)
    assert "Leave tokenizer.kind and tokenizer.path out" in str(caught.value)
    check_tokenizer(config(folder, tokenizer, init_changes=["tokenizer"]))


def test_the_same_vocabulary_with_other_merges_gives_other_ids_of_a_text(tmp_path: Path) -> None:
    folder, other = write(tmp_path / "a"), write(tmp_path / "b")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"is \[\d.* here and"):
        check_tokenizer(config(folder, named(other)))


def test_a_larger_vocabulary_passes_where_new_tokens_are_asked_for(tmp_path: Path) -> None:
    small = HfTokenizer.from_folder(write(tmp_path / "a"))
    large = HfTokenizer.from_folder(write(tmp_path / "b", special=("<|endoftext|>", "<tool>")))
    assert "261 ids here and 260 there" in difference(large, small)
    assert difference(large, small, larger=True) == ""
    assert difference(small, large, larger=True)


def test_a_chat_models_end_of_text_is_another_choice_of_the_same_ids(tmp_path: Path) -> None:
    special = ("<|end_of_text|>", "<|eot_id|>")
    base, chat = write(tmp_path / "base", special=special), write(tmp_path / "chat", special=special, end=1)
    assert HfTokenizer.from_folder(base).eos_id != HfTokenizer.from_folder(chat).eos_id
    check_tokenizer(config(base, named(chat)))
    moved = write(tmp_path / "moved", special=special[::-1])
    with pytest.raises(ValueError, match="the special token"):
        check_tokenizer(config(base, named(moved)))


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "vocab.json"])
def test_a_vocabulary_trained_anew_is_refused_where_the_folders_is_of_a_kind_not_read(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer that is read here"):
        check_tokenizer(config(tmp_path, {}))
    check_tokenizer(config(tmp_path, {}, init_changes=["tokenizer"]))
    check_tokenizer(config(tmp_path, {}, name="flux_tiny"))  # which reads no ids


def test_a_folder_without_a_tokenizer_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    check_tokenizer(config(tmp_path / "a", {"kind": "bytes"}))
