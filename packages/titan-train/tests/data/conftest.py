"""Sources in memory, whose tokens say where they lie, and small corpora on disk."""

import json

import numpy as np
import pytest
from titan_train.data import PackedDataset
from titan_train.tokenizers import ByteTokenizer


class ArraySource:
    """A token source in memory."""

    def __init__(self, tokens, document_ends=(), fingerprint="array"):
        self.array = np.asarray(tokens, dtype=np.int64)
        self.ends = np.asarray(document_ends, dtype=np.int64)
        self.num_tokens = self.array.size
        self.fingerprint = fingerprint
        self.not_learned_from = None

    def document_ends(self):
        return self.ends

    def window(self, start, n):
        return self.array[start : start + n]

    def document_starts(self, start, n):
        return self.ends[(self.ends > start) & (self.ends < start + n)] - start


@pytest.fixture
def array_source():
    """Build `ArraySource`s."""
    return ArraySource


@pytest.fixture
def counting_dataset():
    """Build a dataset whose token values are their own places: a window's first token names it."""

    def build(windows=37, *, seq_len=8, seed=5, names=("a",), weights=None, **options):
        sources = {
            name: ArraySource(np.arange(windows * seq_len + 1) + 10_000_000 * number)
            for number, name in enumerate(names)
        }
        return PackedDataset(sources, seq_len=seq_len, seed=seed, weights=weights, **options)

    return build


@pytest.fixture
def documents_dataset():
    """A dataset of random documents that end with token 0, and the documents."""

    def build(*, num_documents=60, seq_len=16, seed=3, **options):
        rng = np.random.default_rng(0)
        documents = [
            np.append(rng.integers(1, 1000, size=rng.integers(1, 40)), 0).astype(np.int64) for _ in range(num_documents)
        ]
        source = ArraySource(np.concatenate(documents), np.cumsum([d.size for d in documents]))
        return PackedDataset({"a": source}, seq_len=seq_len, seed=seed, **options), documents

    return build


@pytest.fixture
def tokenizer():
    return ByteTokenizer()


@pytest.fixture
def write_jsonl():
    """Write documents as JSON lines, and return the text of each."""

    def write(path, num_documents, *, seed=0):
        rng = np.random.default_rng(seed)
        texts = [
            f"document {seed}-{i} " + "".join(rng.choice(list("abc é\n"), size=rng.integers(1, 200)))
            for i in range(num_documents)
        ]
        path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))
        return texts

    return write
