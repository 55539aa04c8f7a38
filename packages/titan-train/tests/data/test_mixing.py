import hashlib

import numpy as np
import pytest
from titan_train.data.order.mixture import Mixture, largest_remainder

NAMES = ("a", "b", "c", "d", "e")
GOLDEN_MIXTURE = "295c61696f910dbb81eb86a02468be3ce9664ac2336c260da6b7efc66b242471"
WEIGHTS = (0.5, 0.3, 0.15, 0.0499, 0.0001)


def test_every_block_holds_the_same_counts_within_a_64th_of_the_weights():
    mixture = Mixture(NAMES, WEIGHTS, seed=1)
    assert mixture.counts.sum() == mixture.block
    for block in (0, 3):
        sources, _ = mixture.locate(np.arange(mixture.block, dtype=np.int64) + block * mixture.block)
        assert np.array_equal(np.bincount(sources), mixture.counts)
    shares = mixture.counts / mixture.block
    assert np.all(np.abs(shares / np.array(WEIGHTS) - 1) <= 1 / 64)


def test_each_source_is_read_in_its_own_order_without_gap_or_repeat():
    mixture = Mixture(NAMES[:3], (0.7, 0.2, 0.1), seed=4)
    samples = np.arange(3 * mixture.block, dtype=np.int64)
    sources, local = mixture.locate(samples)
    for number in range(3):
        mine = local[sources == number]
        assert np.array_equal(mine, np.arange(mine.size))


def test_random_access_agrees_with_reading_in_order():
    mixture = Mixture(NAMES[:3], (0.7, 0.2, 0.1), seed=4)
    samples = np.arange(2 * mixture.block, dtype=np.int64)
    sources, local = mixture.locate(samples)
    some = np.random.default_rng(0).permutation(samples)[:200]
    assert np.array_equal(mixture.locate(some)[0], sources[some])
    assert np.array_equal(mixture.locate(some)[1], local[some])


def test_consumed_counts_what_was_located():
    mixture = Mixture(NAMES[:3], (0.7, 0.2, 0.1), seed=4)
    sources, _ = mixture.locate(np.arange(5000, dtype=np.int64))
    for samples in (0, 1, mixture.block, 5000):
        assert np.array_equal(mixture.consumed(samples), np.bincount(sources[:samples], minlength=3))


def test_adding_a_source_keeps_the_order_of_the_others(counting_dataset):
    def order_of(dataset, name):
        where = dataset.locate(np.arange(4096))
        return where.window[where.source == dataset.source_names.index(name)]

    two = order_of(counting_dataset(100, names=("a", "b"), weights={"a": 1.0, "b": 1.0}), "a")
    three = order_of(counting_dataset(100, names=("new", "b", "a"), weights={"a": 2.0, "b": 1.0, "new": 1.0}), "a")
    common = min(two.size, three.size)
    assert common > 1500
    assert np.array_equal(two[:common], three[:common])


def test_a_source_too_rare_to_be_exact_is_refused_with_the_smallest_weight():
    with pytest.raises(ValueError, match=r"data.sources\['rare'\].weight=1e-06 .* smallest weight .* is 6.1e-05"):
        Mixture(("common", "rare"), (1.0, 1e-6), seed=0)


def test_largest_remainder_sums_to_the_total_for_uneven_shares():
    for total in (1, 7, 2048):
        assert largest_remainder([0.1] * 10, total).sum() == total
    assert largest_remainder([0.5, 0.3, 0.2], 10).tolist() == [5, 3, 2]


def test_mixture_is_the_one_of_earlier_releases():
    """A changed mixture would silently repeat and skip data in every resumed run."""
    sources, local = Mixture(NAMES[:3], (0.7, 0.2, 0.1), seed=4).locate(np.arange(5000, dtype=np.int64))
    content = np.concatenate([sources, local]).astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest() == GOLDEN_MIXTURE
