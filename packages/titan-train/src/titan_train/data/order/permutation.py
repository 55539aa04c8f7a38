"""The order of samples: a permutation of ``0 .. n-1`` computed index by index.

Problem. A shuffled order must be the same on every rank and after every restart, for any number of windows. A stored
permutation costs 8 bytes a window and time to draw; an iterator's state must be saved, moved and replayed.

Idea. A Feistel network maps ``2 h``-bit numbers one to one: split the number into halves ``(L, R)`` and repeat
``(L, R) = (R, L xor f(R, key))``. For an ``n`` that is not a power of four, walk: apply it again until the result is
below ``n``. The domain is the smallest power of four that holds ``n``, so fewer than four walks are needed on average.
Six rounds of the splitmix64 mixer under 64-bit keys drawn by blake2b pass for a random permutation here.

Cost. No memory, 64 ns an index in large arrays. Limits: not a cipher; n up to 2**62.

Papers: Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions" (1988); Black and
Rogaway, "Ciphers with arbitrary finite domains" (2002) for the walk; Steele et al., "Fast splittable pseudorandom
number generators" (2014) for splitmix64.
"""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permute(indices: IndexArray, n: int, *key: int | str) -> IndexArray:
    """Image of each index under the permutation of ``0 .. n-1`` that ``key`` names.

    Args:
        indices: Indices in ``[0, n)``, any shape, int64.
        n: Size of the permuted set, 1 to 2**62.
        key: What names the permutation, such as a seed, a source's name and an epoch.

    Returns:
        int64 array of the shape of ``indices``.
    """
    assert 1 <= n <= 2**62, n
    if n == 1:
        return np.zeros_like(indices)
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    result = _feistel(indices.astype(np.uint64), half_bits, keys)
    bound = np.uint64(n)
    outside = result >= bound
    while outside.any():
        result[outside] = _feistel(result[outside], half_bits, keys)
        outside = result >= bound
    return result.astype(np.int64)


@lru_cache(maxsize=256)
def _round_keys(key: tuple[int | str, ...]) -> npt.NDArray[np.uint64]:
    # repr separates the parts: ("a", "b") and ("ab", "") must not share a key.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS, person=b"titan order 1").digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(value: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (_splitmix64(right ^ key) & mask)
    return (left << bits) | right


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
