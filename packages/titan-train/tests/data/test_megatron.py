import struct

import numpy as np
import pytest
from titan_train.config.data import DataConfig, SourceConfig
from titan_train.data import MegatronTokens, build_datasets


def write_megatron(prefix, documents, *, dtype="<u2", code=8, version=1):
    """Write a pair as Megatron-LM's preprocessing does, from its published layout."""
    arrays = [np.asarray(document, dtype=dtype) for document in documents]
    np.concatenate(arrays).tofile(f"{prefix}.bin")
    lengths = np.array([array.size for array in arrays], dtype="<i4")
    offsets = np.concatenate([[0], np.cumsum([a.nbytes for a in arrays])[:-1]]).astype("<i8")
    entries = np.arange(len(arrays) + 1, dtype="<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(arrays), len(entries))
    with open(f"{prefix}.idx", "wb") as file:  # noqa: PTH123 - the prefix is a string here
        file.write(head + lengths.tobytes() + offsets.tobytes() + entries.tobytes())


@pytest.fixture
def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size=rng.integers(1, 50)) for _ in range(100)]


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
def test_tokens_and_documents_are_those_written(tmp_path, documents, dtype, code):
    write_megatron(tmp_path / "m", documents, dtype=dtype, code=code)
    source = MegatronTokens(tmp_path / "m", vocab_size=256)
    joined = np.concatenate(documents)
    ends = np.cumsum([d.size for d in documents])
    assert source.num_tokens == joined.size
    assert np.array_equal(source.window(10, 500), joined[10:510])
    assert np.array_equal(source.document_starts(10, 500), ends[(ends > 10) & (ends < 510)] - 10)
    assert source.fingerprint == MegatronTokens(tmp_path / "m.bin", vocab_size=256).fingerprint


def test_a_megatron_source_is_packed_like_any_other(tmp_path, documents, tokenizer):
    write_megatron(tmp_path / "m", documents)
    config = DataConfig(sources=(SourceConfig(name="m", kind="megatron", paths=(str(tmp_path / "m"),)),))
    train, validation = build_datasets(config, tokenizer, seq_len=32, seed=0, cache_dir=tmp_path)
    assert validation is None
    where = train.locate(np.arange(train.num_windows)).window
    tokens = train.tokens(np.argsort(where))
    assert np.array_equal(tokens[:, :-1].ravel(), np.concatenate(documents)[: tokens[:, :-1].size])


def test_files_that_are_not_whole_or_not_of_the_vocabulary_are_refused(tmp_path, documents):
    prefix = tmp_path / "m"
    with pytest.raises(ValueError, match=r"m.bin is missing"):
        MegatronTokens(prefix, vocab_size=256)
    write_megatron(prefix, documents)
    with pytest.raises(ValueError, match=r"holds token id 2[0-9]+, but the tokenizer has 200"):
        MegatronTokens(prefix, vocab_size=200)
    (tmp_path / "m.bin").write_bytes((tmp_path / "m.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match="it was cut"):
        MegatronTokens(prefix, vocab_size=256)
    write_megatron(prefix, documents, code=7)
    with pytest.raises(ValueError, match="dtype code 7"):
        MegatronTokens(prefix, vocab_size=256)
    (tmp_path / "m.idx").write_bytes(b"no index")
    with pytest.raises(ValueError, match="is not a Megatron index"):
        MegatronTokens(prefix, vocab_size=256)
