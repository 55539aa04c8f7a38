"""Text, and a byte-level BPE vocabulary with the plain encoder it must agree with."""

import base64
import random
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from titan_train.tokenizers import train_sentencepiece
from titan_train.tokenizers.tiktoken import PATTERNS


@pytest.fixture(scope="session")
def stdlib_texts():
    """Some modules of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.glob("[a-d]*.py") if path.stat().st_size)
    return [path.read_text(encoding="utf-8") for path in paths]


@pytest.fixture(scope="session")
def random_texts():
    """10,000 strings of any characters that UTF-8 can carry, awkward ones more often."""
    rng = random.Random(0)
    awkward = [0, 9, 10, 13, 32, 0x85, 0xA0, 0x2028, 0x2581, 0xFFFD, 0xFEFF, ord("<"), ord("s"), ord(">"), 0x10FFFF]

    def character():
        kind = rng.randrange(4)
        code = [rng.choice(awkward), rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000)][kind]
        return "" if 0xD800 <= code < 0xE000 else chr(code)

    return ["".join(character() for _ in range(rng.randrange(40))) for _ in range(10_000)]


@pytest.fixture(scope="session")
def small_sentencepiece(stdlib_texts):
    return train_sentencepiece(stdlib_texts, 1024)


def _merge(parts, pair):
    merged, i = [], 0
    while i < len(parts):
        if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
            merged.append(parts[i] + parts[i + 1])
            i += 2
        else:
            merged.append(parts[i])
            i += 1
    return merged


@pytest.fixture(scope="session")
def bpe_ranks(stdlib_texts):
    """Ranks of 256 bytes and 150 merges, learned the plain way on a little text."""
    words = Counter(regex.findall(PATTERNS["llama3"], stdlib_texts[0][:20_000]))
    split = {word: [bytes([b]) for b in word.encode()] for word in words}
    ranks = {bytes([b]): b for b in range(256)}
    for _ in range(150):
        pairs = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[best[0] + best[1]] = len(ranks)
        split = {word: _merge(parts, best) for word, parts in split.items()}
    return ranks


@pytest.fixture(scope="session")
def ranks_file(bpe_ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in bpe_ranks.items())


@pytest.fixture(scope="session")
def plain_encode(bpe_ranks):
    """Byte-level BPE by its definition: of all neighbours, merge the pair of the lowest rank until none is left."""

    def encode(text):
        ids = []
        for word in regex.findall(PATTERNS["llama3"], text):
            parts = [bytes([b]) for b in word.encode()]
            while True:
                ranked = [(bpe_ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in bpe_ranks]
                if not ranked:
                    break
                _, i = min(ranked)
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids += [bpe_ranks[part] for part in parts]
        return ids

    return encode
