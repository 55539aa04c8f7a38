import io
import time

import numpy as np
import pytest
import sentencepiece
from titan_train.tokenizers import IncrementalDecoder, SentencePieceTokenizer, load_tokenizer, train_sentencepiece


def test_every_text_comes_back_unchanged(small_sentencepiece, stdlib_texts, random_texts):
    for text in stdlib_texts + random_texts:
        assert small_sentencepiece.decode(small_sentencepiece.encode(text)) == text


def test_names_of_special_tokens_in_text_are_ordinary_text(small_sentencepiece):
    tokenizer = small_sentencepiece
    for text in ("<s>", "</s>", "<unk>", "<0x41>", "<pad>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids.tolist())


def test_special_tokens_give_no_text(small_sentencepiece):
    tokenizer = small_sentencepiece
    ids = [tokenizer.bos_id, *tokenizer.encode("x = 1").tolist(), tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == "x = 1"


def test_training_twice_gives_the_same_model_and_threads_do_not_change_a_piece(stdlib_texts, monkeypatch):
    first = train_sentencepiece(stdlib_texts[:10], 400)
    assert train_sentencepiece(stdlib_texts[:10], 400).fingerprint == first.fingerprint
    monkeypatch.setattr("titan_train.tokenizers.sentencepiece._TRAINER_THREADS", 1)
    alone = train_sentencepiece(stdlib_texts[:10], 400)
    assert [alone.token_bytes(i) for i in range(400)] == [first.token_bytes(i) for i in range(400)]


def test_long_lines_are_learned_from(tmp_path):
    """The trainer skips sentences over 4192 bytes in silence."""
    word = "zyxwvutsrqponm"
    seen = []
    tokenizer = train_sentencepiece([" ".join([word] * 5000)], 300, progress=seen.append)
    assert tokenizer.encode(f" {word}").size <= 4
    assert seen == [5000 * (len(word) + 1) - 1]


def test_unigram_takes_the_vocabulary_the_text_can_give(stdlib_texts):
    tokenizer = train_sentencepiece(stdlib_texts[:2], 60_000, model_type="unigram")
    assert 300 < tokenizer.vocab_size < 60_000
    assert tokenizer.decode(tokenizer.encode(stdlib_texts[0])) == stdlib_texts[0]


def test_batch_on_threads_equals_one_by_one(small_sentencepiece, stdlib_texts):
    alone = [small_sentencepiece.encode(text) for text in stdlib_texts[:8]]
    for ids, expected in zip(small_sentencepiece.encode_batch(stdlib_texts[:8], 3), alone, strict=True):
        assert ids.dtype == np.int32
        assert np.array_equal(ids, expected)


def test_models_that_put_a_space_in_front_decode_to_the_text(stdlib_texts):
    """Llama 2's models do."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(stdlib_texts[0].splitlines()),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(model.getvalue())
    for text in ("def f(x):", " two  spaces", "é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_tokenizer_loads_with_equal_ids(tmp_path, small_sentencepiece, stdlib_texts):
    folder = small_sentencepiece.save(tmp_path / "tok")
    for path in (folder, folder / "tokenizer.model"):
        loaded = load_tokenizer(path)
        assert loaded.fingerprint == small_sentencepiece.fingerprint
        assert np.array_equal(loaded.encode(stdlib_texts[0]), small_sentencepiece.encode(stdlib_texts[0]))


def test_incremental_decoding_gives_the_text_and_never_half_a_character(small_sentencepiece, random_texts):
    for text in random_texts[:300]:
        decoder = IncrementalDecoder(small_sentencepiece)
        pieces = [decoder.push(int(i)) for i in small_sentencepiece.encode(text)]
        assert "".join(pieces) + decoder.flush() == text
    decoder = IncrementalDecoder(small_sentencepiece)
    euro = small_sentencepiece.encode("\u4e0d")  # no piece of its own: three bytes
    assert [decoder.push(int(i)) for i in euro[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd"


def test_lone_surrogates_and_unknown_ids_are_refused(small_sentencepiece):
    with pytest.raises(UnicodeEncodeError):
        small_sentencepiece.encode("a\ud800")
    with pytest.raises(ValueError, match="token id 1024 is outside the vocabulary: ids run from 0 to 1023"):
        small_sentencepiece.decode([1024])


def test_texts_too_short_and_vocabularies_too_small_are_refused():
    with pytest.raises(ValueError, match=r"could not train vocab_size=5000 .* smaller vocabulary"):
        train_sentencepiece(["a short text"], 5000)
    with pytest.raises(ValueError, match="vocab_size=200 leaves no room"):
        train_sentencepiece(["text"], 200)


def test_a_file_that_is_no_model_is_refused():
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        SentencePieceTokenizer(b"not a model")


@pytest.mark.slow
def test_8192_pieces_train_in_10_processor_seconds_and_hold_3_2_bytes_each_on_unseen_files(tmp_path):
    from titan_train.cli.data import train_tokenizer
    from titan_train.config import SourceConfig

    started = time.process_time()  # other programs' load does not count
    report = train_tokenizer(
        (SourceConfig(name="stdlib", kind="stdlib"),), output_dir=tmp_path, vocab_size=8192, held_out_fraction=0.1
    )
    # training, judging (encode and decode of the held-out files) and the table
    assert time.process_time() - started < 10
    assert report.round_trips == report.documents > 20
    assert report.bytes_per_token >= 3.2


def test_an_error_of_the_text_is_raised_as_it_is():
    def texts(error):
        yield "some text"
        raise error

    for error in (OSError(5, "Input/output error"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            train_sentencepiece(texts(error), 300)
        assert caught.value is error
