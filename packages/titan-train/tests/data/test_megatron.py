import hashlib
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from titan_train.config import DataConfig, SourceConfig
from titan_train.data import MegatronTokens, build_datasets, prepare


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


def index(lengths, offsets, entries, *, code=8, version=1, magic=b"MMIDIDX\x00\x00", counts=None):
    """The bytes of an index, from its published layout; ``counts`` replaces the true numbers in the header."""
    head = magic + struct.pack("<QBQQ", version, code, *(counts or (len(lengths), len(entries))))
    return head + b"".join(
        np.array(values, dtype=kind).tobytes()
        for values, kind in ((lengths, "<i4"), (offsets, "<i8"), (entries, "<i8"))
    )


GOOD = ([3, 4, 5], [0, 6, 14], [0, 1, 2, 3])
TOKENS = np.arange(12, dtype="<u2").tobytes()
HEAD = 34  # bytes
MALFORMED = {
    "an index of nothing": (b"", TOKENS, "is not a Megatron index"),
    "an index of another format": (b"no index" * 9, TOKENS, "does not begin with MMIDIDX"),
    "a header cut": (index(*GOOD)[:30], TOKENS, "a header of 34 bytes"),
    "another version": (index(*GOOD, version=2), TOKENS, "format version 2"),
    "an unknown type": (index(*GOOD, code=99), TOKENS, "dtype code 99 (unknown"),
    "tokens as floats": (index(*GOOD, code=6), TOKENS, "dtype code 6 (float64"),
    "signed bytes": (index(*GOOD, code=2), TOKENS, "dtype code 2 (int8"),
    "the type of another file": (index(*GOOD, code=4), TOKENS, "byte 54); it must follow from the lengths"),
    "an index cut": (index(*GOOD)[:-8], TOKENS, "has 94 bytes, but its header lists 3 sequences"),
    "an index with more": (index(*GOOD) + b"12345678", TOKENS, "has 110 bytes"),
    "a count beyond memory": (index(*GOOD, counts=(2**62, 4)), TOKENS, "4611686018427387904 sequences"),
    "no sequences": (index([], [], [0]), b"", "the data set is empty"),
    "no document entries": (index([3], [0], []), TOKENS[:6], "0 document entries"),
    "no tokens": (index([0, 0], [0, 0], [0, 2]), b"", "without a token"),
    "a negative length": (index([3, -1, 10], *GOOD[1:]), TOKENS, f"sequence 1 is -1 (byte {HEAD + 4})"),
    "lengths that wrap around": (index([2**31 - 1, 2**31 - 1, 14], *GOOD[1:]), TOKENS, "offset of sequence 1 is 6"),
    "a moved sequence": (index(GOOD[0], [0, 14, 6], GOOD[2]), TOKENS, f"sequence 1 is 14 (byte {HEAD + 12 + 8})"),
    "a negative offset": (index(GOOD[0], [0, -6, 14], GOOD[2]), TOKENS, "sequence 1 is -6"),
    "an offset beyond the file": (index(GOOD[0], [0, 6, 2**62], GOOD[2]), TOKENS, "sequence 2 is 4611686018427387904"),
    "unsorted documents": (index(*GOOD[:2], [0, 2, 1, 3]), TOKENS, f"entry 2 is 1 (byte {HEAD + 36 + 16})"),
    "a negative document": (index(*GOOD[:2], [0, -1, 2, 3]), TOKENS, "entry 1 is -1"),
    "a document beyond the sequences": (index(*GOOD[:2], [0, 1, 9, 3]), TOKENS, "entry 2 is 9"),
    "a first document that is not the first": (index(*GOOD[:2], [1, 2, 3]), TOKENS, "entry 0 is 1"),
    "a last document that is not the last": (index(*GOOD[:2], [0, 1, 2]), TOKENS, "entry 2 is 2"),
    "one document entry": (index(*GOOD[:2], [0]), TOKENS, "entry 0 is 0"),
    "tokens cut": (index(*GOOD), TOKENS[:-2], "has 22 bytes, but"),
    "half a token": (index(*GOOD), TOKENS[:-1], "it was cut"),
    "more tokens": (index(*GOOD), TOKENS * 2, "the index is of another file"),
    "no tokens at all": (index(*GOOD), b"", "has 0 bytes"),
    "an id beyond the vocabulary": (index(*GOOD), TOKENS[:-2] + b"\xe7\x03", "id 999 at token 11 (byte 22)"),
    "a negative id": (
        index([3], [0], [0, 1], code=4), np.array([1, -1, 2], dtype="<i4").tobytes(), "id -1 at token 1 (byte 4)",
    ),
    "an id beyond 32 bits": (
        index([2], [0], [0, 1], code=5), np.array([2**40, 1], dtype="<i8").tobytes(), "id 1099511627776 at token 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_a_malformed_pair_is_refused_with_the_file_and_the_place_in_it(case, tmp_path, tokenizer):
    idx, tokens, expected = MALFORMED[case]
    (tmp_path / "m.idx").write_bytes(idx)
    (tmp_path / "m.bin").write_bytes(tokens)
    config = DataConfig(sources=(SourceConfig(name="m", kind="megatron", paths=(str(tmp_path / "m"),)),))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    assert str(tmp_path / "m") in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_the_good_pair_of_these_cases_is_taken(tmp_path, tokenizer):
    (tmp_path / "m.idx").write_bytes(index(*GOOD))
    (tmp_path / "m.bin").write_bytes(TOKENS)
    assert MegatronTokens(tmp_path / "m", vocab_size=256, verify="full").num_tokens == 12
    (tmp_path / "m.idx").write_bytes(index(*GOOD[:2], [0, 0, 2, 2, 3]))  # documents of nothing
    assert MegatronTokens(tmp_path / "m", vocab_size=256).document_starts(0, 12).tolist() == [7]


@pytest.mark.parametrize("stretch", [1, 2, 2**16])
def test_documents_of_several_sequences_or_none_and_sequences_of_nothing(tmp_path, monkeypatch, stretch):
    monkeypatch.setattr("titan_train.data.shards.megatron._CHECKED", stretch)
    lengths = [0, 3, 0, 2, 4, 0, 1, 0, 0]
    offsets = np.cumsum([0, *lengths[:-1]]) * 2
    entries = [0, 0, 1, 3, 3, 5, 7, 9, 9, 9]
    (tmp_path / "m.idx").write_bytes(index(lengths, offsets, entries))
    (tmp_path / "m.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    source = MegatronTokens(tmp_path / "m", vocab_size=256)
    assert source.num_tokens == 10
    ends = np.unique([sum(lengths[:entry]) for entry in entries])
    for start in range(10):
        for n in range(1, 11 - start):
            found = source.document_starts(start, n)
            assert found.dtype == np.int64
            assert found.tolist() == (ends[(ends > start) & (ends < start + n)] - start).tolist()
    entries[5] = 2
    (tmp_path / "m.idx").write_bytes(index(lengths, offsets, entries))
    with pytest.raises(ValueError, match=rf"entry 5 is 2 \(byte {HEAD + 12 * 9 + 5 * 8}\)"):
        MegatronTokens(tmp_path / "m", vocab_size=256)
    offsets[6] += 2
    (tmp_path / "m.idx").write_bytes(index(lengths, offsets, entries))
    with pytest.raises(ValueError, match=rf"sequence 6 is 20 \(byte {HEAD + 4 * 9 + 6 * 8}\)"):
        MegatronTokens(tmp_path / "m", vocab_size=256)


def test_the_fingerprint_is_the_hash_of_the_index_and_of_64_pieces(tmp_path, documents):
    write_megatron(tmp_path / "m", documents)
    joined = np.concatenate(documents).astype("<u2").tobytes()
    sampled = b"".join(joined[: 2 * 4096] for _ in range(64))
    expected = hashlib.sha256((tmp_path / "m.idx").read_bytes() + sampled).hexdigest()
    assert MegatronTokens(tmp_path / "m", vocab_size=256).fingerprint == expected


OPEN = """
import sys
from titan_train.data import MegatronTokens

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
source = MegatronTokens(sys.argv[1], vocab_size=256)
assert source.document_starts(1000, 5).tolist() == [1, 2, 3, 4]
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_opening_takes_little_more_memory_than_the_map_of_the_index(tmp_path):
    count = 3_000_000
    ones = np.ones(count, dtype="<i4")
    (tmp_path / "m.idx").write_bytes(index(ones, np.arange(count), np.arange(count + 1), code=1))
    (tmp_path / "m.bin").write_bytes(bytes(count))
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "m")], capture_output=True, text=True, timeout=120, check=True
    )
    size = (tmp_path / "m.idx").stat().st_size
    # The map itself counts while its pages stay in memory, which ranks share; read and copied, it was five times as much.
    assert int(done.stdout) < 1.5 * size


def test_only_a_full_check_reads_every_id(tmp_path):
    size = 64 * 4096 * 4
    ids = np.zeros(size, dtype="<u2")
    ids[5000] = 300  # between the first two of 64 pieces of 4096
    write_megatron(tmp_path / "m", [ids])
    assert MegatronTokens(tmp_path / "m", vocab_size=256).num_tokens == size
    with pytest.raises(ValueError, match="id 300 at token 5000"):
        MegatronTokens(tmp_path / "m", vocab_size=256, verify="full")


def test_a_missing_file_and_another_vocabulary_are_refused(tmp_path, documents):
    prefix = tmp_path / "m"
    with pytest.raises(ValueError, match=r"m.bin is missing"):
        MegatronTokens(prefix, vocab_size=256)
    write_megatron(prefix, documents)
    with pytest.raises(ValueError, match=r"holds token id 2[0-9]+ at token .* but the tokenizer has 200"):
        MegatronTokens(prefix, vocab_size=200)
    (tmp_path / "m.idx").unlink()
    with pytest.raises(ValueError, match=r"m.idx is missing"):
        MegatronTokens(prefix, vocab_size=256)
