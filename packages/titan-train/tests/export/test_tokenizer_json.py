"""``tokenizer.json`` gives the ids of the tokenizer it was written from."""

import base64
import itertools
import sysconfig
from pathlib import Path

import pytest
from titan_train.export.gate import HARD_TEXTS
from titan_train.export.tokenizer_json import special_tokens, tokenizer_json
from titan_train.tokenizers import ByteTokenizer, TiktokenTokenizer, Tokenizer, train_sentencepiece

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


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "llama3", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "sentencepiece":
        return train_sentencepiece(TEXTS[:10], 1500)
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


def test_a_unigram_model_is_not_written() -> None:
    assert tokenizer_json(train_sentencepiece(TEXTS[:10], 1000, model_type="unigram")) is None
