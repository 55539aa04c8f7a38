"""``tokenizer.json`` gives the ids of the tokenizer it was written from."""

import base64
import io
import itertools
import json
import sysconfig
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import sentencepiece
from titan_train.export.gate import HARD_TEXTS
from titan_train.export.gguf.tokenizer import write_tokenizer
from titan_train.export.hf_folder import write_tokenizer_files
from titan_train.export.tokenizer_json import folder_text, special_tokens, tokenizer_json
from titan_train.tokenizers import (
    ByteTokenizer,
    ChatTemplate,
    HfTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    train_sentencepiece,
)
from titan_train.tokenizers.chat_template import BUILT_IN
from titan_train.tokenizers.sentencepiece_model import round_scores

hf = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
SOURCES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
TEXTS = [path.read_text(errors="ignore")[:20_000] for path in SOURCES]


def learned_ranks(texts: list[str], size: int) -> bytes:
    """A tiktoken file: bytes in order, then pairs joined by frequency, as byte-pair encoding learns them."""
    words: dict[tuple[bytes, ...], int] = {}
    for text in texts:
        for word in text.split(" "):
            key = tuple(bytes([byte]) for byte in f" {word}".encode()[:24])
            words[key] = words.get(key, 0) + 1
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < size:
        pairs: dict[tuple[bytes, bytes], int] = {}
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(best[0] + best[1])
        words = {joined(word, best): count for word, count in words.items()}
    unique = list(dict.fromkeys(tokens))
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(unique))


def joined(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    out: list[bytes] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "unigram", "llama3", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "sentencepiece":
        return train_sentencepiece(TEXTS[:10], 1500)
    if request.param == "unigram":
        return train_sentencepiece(TEXTS[:10], 1500, model_type="unigram")
    return TiktokenTokenizer(learned_ranks(TEXTS[:2], 400), pattern=request.param)


def test_ids_are_equal_on_hard_texts_and_on_source_code(tokenizer: Tokenizer) -> None:
    text = tokenizer_json(tokenizer)
    assert text is not None
    written = hf.Tokenizer.from_str(text)
    for case in (*HARD_TEXTS, *TEXTS):
        assert written.encode(case, add_special_tokens=False).ids == tokenizer.encode(case).tolist(), case[:60]
        assert written.decode(tokenizer.encode(case).tolist(), skip_special_tokens=False) == case
    assert written.get_vocab_size() == tokenizer.vocab_size
    for key, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        assert token_id is None or written.token_to_id(special_tokens(tokenizer)[key]) == token_id


def test_a_text_begins_as_documents_of_the_run_do(tokenizer: Tokenizer) -> None:
    written = hf.Tokenizer.from_str(tokenizer_json(tokenizer, add_bos=True))
    ids = tokenizer.encode("a b").tolist()
    assert written.encode("a b", add_special_tokens=False).ids == ids
    assert written.encode("a b").ids == (ids if tokenizer.bos_id is None else [tokenizer.bos_id, *ids])


def test_llama_cpp_begins_a_text_as_documents_of_the_run_do() -> None:
    pytest.importorskip("gguf")
    for add_bos in (False, True):
        writer = MagicMock()
        write_tokenizer(writer, ByteTokenizer(), rows=259, add_bos=add_bos)
        writer.add_add_bos_token.assert_called_once_with(add_bos)


HARDER = [
    "", "\r", "a\r\nb\rc\n\r", "\t\t \n \t", " " * 500, "\n" * 70, "1234567890" * 7, "3.14e-10 0x1F ١٢٣ ½",
    "\x01\x07\x1b[0m\x7f\x85\u2028",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea",
    "e\u0301a\u0308\u0323", "\u0915\u094d\u0937\u093f \u0ba8\u0bbf \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab",
    "\ufeffx\u200b\u00ad\u2066", "\U0010ffff\ufffd\ue000", "if (a&&b){c+=\"\\n\";}//--->>>===",
    "www.a-b.co/x?y=1&z=%20", "I'M we'LL 'S\u017f 's", "A" * 300, "aA1_b-C" * 40,
]  # fmt: skip


def test_ids_are_equal_on_harder_texts(tokenizer: Tokenizer) -> None:
    written = hf.Tokenizer.from_str(tokenizer_json(tokenizer))
    for case in HARDER:
        assert written.encode(case, add_special_tokens=False).ids == tokenizer.encode(case).tolist(), repr(case[:60])


def test_a_lone_surrogate_is_refused_by_every_tokenizer(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800b")


def test_the_written_folder_keeps_the_chat_template_and_loads_as_the_same_tokenizer(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    template = ChatTemplate.of(tokenizer, BUILT_IN["chatml"])
    write_tokenizer_files(tmp_path / "a", tokenizer, 64, template)
    read = HfTokenizer.from_folder(tmp_path / "a")
    assert read.chat_template == BUILT_IN["chatml"]
    assert (read.eos_id, read.bos_id, read.pad_id) == (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id)
    assert read.special_ids.items() >= tokenizer.special_ids.items()
    for case in (*HARDER, "<eos></s><|end_of_text|>", "<0x41><unk> <0x0A><s>", "\u4e2d<0xE4>\U0010ffff" * 40):
        assert read.encode(case).tolist() == tokenizer.encode(case).tolist(), repr(case[:60])
    write_tokenizer_files(tmp_path / "b", read, 64, template)  # and a tokenizer of the library's own kind
    again = HfTokenizer.from_folder(tmp_path / "b")
    assert again.fingerprint == read.fingerprint
    assert again.chat_template == BUILT_IN["chatml"]


def published(texts: list[str], **options: object) -> SentencePieceTokenizer:
    """A model as others train theirs: a space before every text, as Llama 2's has."""
    model = io.BytesIO()
    given = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": True,
        "model_type": "bpe",
    } | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines()),
        model_writer=model, vocab_size=1200, byte_fallback=True, allow_whitespace_only_pieces=True,
        split_digits=True, minloglevel=2, **given,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue())


def test_a_sentencepiece_model_that_adds_a_space_is_written_and_one_that_normalises_is_not() -> None:
    tokenizer = published(TEXTS[:10])
    assert tokenizer.adds_space
    written = hf.Tokenizer.from_str(tokenizer_json(tokenizer))
    for case in (*HARD_TEXTS, *HARDER, *TEXTS[:12]):
        ids = tokenizer.encode(case).tolist()
        assert written.encode(case, add_special_tokens=False).ids == ids, repr(case[:60])
        assert written.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)
    assert tokenizer_json(published(TEXTS[:10], normalization_rule_name="nmt_nfkc")) is None
    assert tokenizer_json(published(TEXTS[:10], remove_extra_whitespaces=True)) is None


def test_text_behind_a_prompt_keeps_the_space_that_it_begins_with(tmp_path: Path) -> None:
    tokenizer = published(TEXTS[:10])
    write_tokenizer_files(tmp_path, tokenizer, 64)
    prompt, whole = tokenizer.encode("import").tolist(), tokenizer.encode("import os").tolist()
    assert whole[: len(prompt)] == prompt
    ids = [*whole[len(prompt) :], tokenizer.eos_id, *prompt]
    assert folder_text(tmp_path, ids) == " os"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "of another vocabulary"}')
    assert folder_text(tmp_path, ids, [tokenizer.eos_id]) == " os"


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_model_file_alone_says_with_what_a_text_begins(add_bos: bool, tmp_path: Path) -> None:
    tokenizer = published(TEXTS[:10], normalization_rule_name="nmt_nfkc")
    write_tokenizer_files(tmp_path, tokenizer, 64, add_bos=add_bos)
    assert not (tmp_path / "tokenizer.json").exists()
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert content == {"add_bos_token": add_bos, "bos_token": "<s>", "eos_token": "</s>"}


def test_a_unigram_model_whose_sums_need_rounding_is_not_written() -> None:
    options = {"remove_extra_whitespaces": False, "user_defined_symbols": ["\n"], "add_dummy_prefix": False}
    model = published(TEXTS[:10], model_type="unigram", **options).model
    assert tokenizer_json(SentencePieceTokenizer(model)) is None
    assert tokenizer_json(SentencePieceTokenizer(round_scores(model))) is not None
