import time

import numpy as np
import pytest
from titan_train.config import DataConfig, TokenizerConfig
from titan_train.data import build_tokenizer
from titan_train.tokenizers import IncrementalDecoder, TiktokenTokenizer, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def llama3(ranks_file):
    return TiktokenTokenizer(ranks_file)


def test_ids_equal_byte_level_bpe_by_its_definition(llama3, plain_encode, stdlib_texts, random_texts):
    for text in [stdlib_texts[1][:20_000], *random_texts[:500]]:
        assert llama3.encode(text).tolist() == plain_encode(text)


def test_every_text_comes_back_unchanged(llama3, stdlib_texts, random_texts):
    for text in stdlib_texts + random_texts:
        assert llama3.decode(llama3.encode(text)) == text


def test_special_tokens_follow_the_ranks_as_in_llama_3(llama3, bpe_ranks):
    first = len(bpe_ranks)
    assert llama3.vocab_size == first + 256
    assert (llama3.bos_id, llama3.eos_id, llama3.pad_id) == (first, first + 1, first + 4)
    assert llama3.token_bytes(llama3.eos_id) == b""
    assert llama3._name(first + 9) == "<|eot_id|>"
    assert llama3._name(first + 255) == "<|reserved_special_token_247|>"


def test_names_of_special_tokens_in_text_are_ordinary_text(llama3):
    text = "a<|end_of_text|>b<|begin_of_text|>"
    ids = llama3.encode(text)
    assert ids.max() < llama3.bos_id
    assert llama3.decode(ids) == text


@pytest.mark.parametrize("pattern", ["cl100k", "gpt2", r"\S+|\s+"])
def test_other_patterns_end_documents_with_endoftext(ranks_file, bpe_ranks, stdlib_texts, pattern):
    tokenizer = TiktokenTokenizer(ranks_file, pattern=pattern)
    assert tokenizer.eos_id == len(bpe_ranks)
    assert tokenizer.bos_id is None
    assert tokenizer.decode(tokenizer.encode(stdlib_texts[0])) == stdlib_texts[0]


def test_saved_tokenizer_loads_with_equal_ids_and_options(tmp_path, ranks_file, stdlib_texts):
    tokenizer = TiktokenTokenizer(
        ranks_file, pattern="gpt2", special_tokens=("<a>", "<b>"), bos_token="<a>", eos_token="<b>"
    )
    loaded = load_tokenizer(tokenizer.save(tmp_path / "tok"))
    assert isinstance(loaded, Tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.bos_id, loaded.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert np.array_equal(loaded.encode(stdlib_texts[0]), tokenizer.encode(stdlib_texts[0]))


def test_pattern_and_special_tokens_change_the_fingerprint(ranks_file):
    prints = {
        TiktokenTokenizer(ranks_file).fingerprint,
        TiktokenTokenizer(ranks_file, pattern="gpt2").fingerprint,
        TiktokenTokenizer(ranks_file, special_tokens=("<|end_of_text|>",)).fingerprint,
        TiktokenTokenizer(ranks_file, eos_token="<|eot_id|>").fingerprint,
    }
    assert len(prints) == 4


def test_a_bare_ranks_file_loads_as_llama_3(tmp_path, ranks_file, llama3):
    (tmp_path / "tokenizer.model").write_bytes(ranks_file)
    assert load_tokenizer(tmp_path).fingerprint == llama3.fingerprint


def test_incremental_decoding_gives_the_text(llama3, random_texts):
    for text in random_texts[:300]:
        decoder = IncrementalDecoder(llama3)
        assert "".join(decoder.push(int(i)) for i in llama3.encode(text)) + decoder.flush() == text


def test_files_and_tokens_that_do_not_fit_are_refused(ranks_file):
    with pytest.raises(ValueError, match="line 2 is not `base64"):
        TiktokenTokenizer(b"YQ== 0\nmodel\n")
    with pytest.raises(ValueError, match=r"255 of the 256 single bytes have no rank \(first: 0x00\)"):
        TiktokenTokenizer(b"YQ== 0\n")
    with pytest.raises(ValueError, match="eos_token='<eos>' is not among the special tokens"):
        TiktokenTokenizer(ranks_file, eos_token="<eos>")
    with pytest.raises(ValueError, match="ends a document as eos_token"):
        TiktokenTokenizer(ranks_file, special_tokens=("<x>",))
    with pytest.raises(ValueError, match="rejected the pattern"):
        TiktokenTokenizer(ranks_file, pattern="([")
    with pytest.raises(UnicodeEncodeError):
        TiktokenTokenizer(ranks_file).encode("\udfff")


@pytest.mark.slow
def test_one_core_encodes_3_million_tokens_a_processor_second(llama3, stdlib_texts):
    best = 0.0
    for _ in range(5):
        started = time.process_time()  # other programs' load does not count
        tokens = sum(ids.size for ids in llama3.encode_batch(stdlib_texts))
        best = max(best, tokens / (time.process_time() - started))
    assert best >= 3e6


def test_settings_count_for_a_folder_of_ranks_as_for_their_file(tmp_path, ranks_file):
    """One that a run saved has its own: others are refused."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.model").write_bytes(ranks_file)
    given = {"kind": "tiktoken", "pattern": "gpt2", "special_tokens": ("<a>", "<b>"), "eos_token": "<b>"}
    of_file, of_folder = (
        build_tokenizer(TokenizerConfig(path=str(path), **given), DataConfig())
        for path in (tmp_path / "bare" / "tokenizer.model", tmp_path / "bare")
    )
    assert of_folder.fingerprint == of_file.fingerprint
    assert of_folder.eos_id == of_folder.special_ids["<b>"]
    saved = str(of_file.save(tmp_path / "saved"))
    assert build_tokenizer(TokenizerConfig(path=saved, **given), DataConfig()).fingerprint == of_file.fingerprint
    for other, message in (
        ({"eos_token": "<a>"}, "eos_token='<a>'"),
        ({"special_tokens": ("<c>",)}, "special_tokens has '<c>'"),
    ):
        with pytest.raises(ValueError, match=message):
            build_tokenizer(TokenizerConfig(path=saved, **(given | other)), DataConfig())
