"""The bytes that labels stand for, whatever the tokenizer."""

import pytest
import torch
from titan_train.tokenizers import ByteTokenizer, HfTokenizer, LabelBytes, TiktokenTokenizer, bits_per_byte

TEXT = "def add(x):\n    return x + 1  # größer, 数 and \U0001f642\n"


@pytest.fixture
def hugging_face(stdlib_texts):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(stdlib_texts[:2], trainer)
    return HfTokenizer(made.to_str().encode())


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "tiktoken", "hf"])
def test_labels_stand_for_the_bytes_of_their_text_and_masked_ones_for_none(kind, request, small_sentencepiece):
    if kind == "hf":
        tokenizer = request.getfixturevalue("hugging_face")
    elif kind == "tiktoken":
        tokenizer = TiktokenTokenizer(request.getfixturevalue("ranks_file"))
    else:
        tokenizer = {"bytes": ByteTokenizer(), "sentencepiece": small_sentencepiece}[kind]
    ids = tokenizer.encode(TEXT).tolist()
    count = LabelBytes(tokenizer)
    # the end of a text, masked labels and ids of a padded vocabulary have no bytes
    beside = [tokenizer.eos_id, -100, -100, tokenizer.vocab_size, tokenizer.vocab_size + 70]
    found = count(torch.tensor([ids + beside]))
    assert found.shape == ()
    assert int(found) == len(TEXT.encode())
    half = [token if i % 2 else -100 for i, token in enumerate(ids)]
    assert int(count(torch.tensor(half))) == sum(len(tokenizer.token_bytes(token)) for token in ids[1::2])


def test_bits_are_those_of_one_bit_a_byte_and_none_without_a_byte():
    assert bits_per_byte(0.6931471805599453 * 40, 40) == pytest.approx(1.0)
    assert bits_per_byte(12.0, 0) is None
