import hashlib
import tracemalloc

import numpy as np
import pytest
from titan_train.data.order.permutation import permute

GOLDEN_ORDER = "4dd2b34479abda11fe779f5987a50eb9507d467187ea0c43abd2f795db89f231"
LARGE = [100_003, 131_072, 262_145]


def test_every_index_appears_once_for_each_size_up_to_300():
    for n in range(1, 301):
        image = permute(np.arange(n, dtype=np.int64), n, 1, "code", 0)
        assert np.array_equal(np.sort(image), np.arange(n)), n


@pytest.mark.parametrize("n", LARGE)
def test_every_index_appears_once_for_large_sizes(n):
    image = permute(np.arange(n, dtype=np.int64), n, 1, "code", 0)
    assert np.array_equal(np.sort(image), np.arange(n))


@pytest.mark.parametrize("n", LARGE)
def test_order_looks_random(n):
    index = np.arange(n, dtype=np.int64)
    image = permute(index, n, 1, "code", 0)
    # A random permutation's correlation has standard deviation 1 / sqrt(n), 0.003 here.
    assert abs(np.corrcoef(index, image)[0, 1]) < 0.02
    assert abs(np.abs(index - image).mean() / n - 1 / 3) < 0.01
    # neighbours do not stay together: a random order keeps one in n
    assert np.count_nonzero(np.abs(np.diff(image)) == 1) < 20


def test_seed_name_and_epoch_each_change_the_order():
    index = np.arange(1000, dtype=np.int64)
    orders = [permute(index, 1000, *key) for key in [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1)]]
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            assert np.count_nonzero(first == second) < 20


def test_one_index_at_a_time_gives_the_same_order():
    index = np.arange(1001, dtype=np.int64)
    together = permute(index, 1001, 9, "x", 2)
    alone = [int(permute(np.array([i]), 1001, 9, "x", 2)[0]) for i in range(1001)]
    assert together.tolist() == alone


def test_order_of_a_trillion_windows_takes_no_memory():
    tracemalloc.start()
    image = permute(np.arange(10**12 - 1000, 10**12, dtype=np.int64), 10**12, 3, "web", 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6
    assert np.unique(image).size == 1000
    assert 0 <= image.min() < image.max() < 10**12


def test_order_is_the_one_of_earlier_releases():
    """A changed order would silently repeat and skip data in every resumed run."""
    image = permute(np.arange(1000, dtype=np.int64), 1000, 7, "code", 1)
    assert hashlib.sha256(image.astype("<i8").tobytes()).hexdigest() == GOLDEN_ORDER
