import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from titan_testing import assert_close
from titan_train.data import DataLoader, PackedDataset
from titan_train.data.loader.rows import whole_rows


def _global_step(dataset, *, global_batch, dp_size, step, microbatch=1):
    """All tokens of one step, ranks joined in order."""
    rows = []
    for rank in range(dp_size):
        loader = DataLoader(
            dataset, global_batch=global_batch, dp_rank=rank, dp_size=dp_size, microbatch=microbatch, prefetch=0
        )
        loader.load_state_dict({**loader.state_dict(), "samples": step * global_batch})
        rows += [next(loader).tokens for _ in range(loader.microbatches_per_step)]
    return torch.cat(rows)


@pytest.mark.parametrize("dp_size", [2, 4, 8, 16, 32])
def test_global_batches_do_not_depend_on_the_number_of_ranks(counting_dataset, dp_size):
    dataset = counting_dataset(37, names=("a", "b"), weights={"a": 3.0, "b": 1.0})
    # 4 steps of 32 samples are 96 of source a: past two and a half of its 37 windows
    for step in range(4):
        alone = _global_step(dataset, global_batch=32, dp_size=1, step=step)
        assert torch.equal(_global_step(dataset, global_batch=32, dp_size=dp_size, step=step), alone)


def test_each_window_comes_once_in_every_epoch(counting_dataset):
    windows, seq_len = 37, 8
    dataset = counting_dataset(windows, seq_len=seq_len)
    tokens = dataset.tokens(np.arange(3 * windows))
    orders = (tokens[:, 0] // seq_len).reshape(3, windows)
    for order in orders:
        assert sorted(order.tolist()) == list(range(windows))
    assert not np.array_equal(orders[0], orders[1])
    assert dataset.epochs(int(1.5 * windows)) == {"a": 55 / 37}


def test_windows_cover_every_token_and_overlap_by_one(counting_dataset):
    dataset = counting_dataset(37, seq_len=8)
    tokens = dataset.tokens(np.arange(37))
    tokens = tokens[np.argsort(tokens[:, 0])]
    assert np.array_equal(tokens[:, :-1].ravel(), np.arange(37 * 8))
    assert np.array_equal(tokens[1:, 0], tokens[:-1, -1])


def test_documents_rebuilt_from_packed_windows_equal_the_originals(documents_dataset):
    seq_len = 16
    dataset, documents = documents_dataset(seq_len=seq_len)
    where = dataset.locate(np.arange(dataset.num_windows))
    pieces = []
    for sample in np.argsort(where.window):  # in the order of the text
        batch = dataset.build_batch(np.array([sample]), ignore_index=-100, samples_consumed=0)
        assert batch.cu_seqlens is not None
        bounds = np.unique(batch.cu_seqlens[0])
        pieces += [batch.tokens[0, a:b] for a, b in pairwise(bounds)]
    rebuilt, current = [], []
    for piece in pieces:
        current.append(piece)
        if piece[-1] == 0:
            rebuilt.append(np.concatenate(current))
            current = []
    assert len(rebuilt) >= len(documents) - 2  # less than one window is left at the end
    for ours, original in zip(rebuilt, documents, strict=False):
        assert np.array_equal(ours, original)


def test_batch_agrees_with_a_plain_loop_over_tokens(documents_dataset):
    dataset, documents = documents_dataset(seq_len=16)
    joined = np.concatenate(documents)
    first_of_document = set(np.cumsum([d.size for d in documents]).tolist())
    samples = np.arange(dataset.num_windows)
    batch = dataset.build_batch(samples, ignore_index=-7, samples_consumed=0)
    windows = dataset.locate(samples).window
    longest = 0
    for row, window in enumerate(windows.tolist()):
        position, bounds = 0, [0]
        for column in range(16):
            place = window * 16 + column
            if place in first_of_document and column:
                position = 0
                bounds.append(column)
            assert batch.tokens[row, column] == joined[place]
            assert batch.positions[row, column] == position
            next_begins = place + 1 in first_of_document
            assert batch.labels[row, column] == (-7 if next_begins else joined[place + 1])
            position += 1
            longest = max(longest, position)
        bounds.append(16)
        assert batch.cu_seqlens is not None
        padded = bounds + [16] * (batch.cu_seqlens.shape[1] - len(bounds))
        assert batch.cu_seqlens[row].tolist() == padded
    assert batch.max_seqlen == longest


def test_end_of_document_is_learned_and_what_follows_it_is_not(array_source):
    source = array_source([1, 2, 0, 3, 4, 5, 0, 6, 7], document_ends=[3, 7])
    dataset = PackedDataset({"a": source}, seq_len=8, seed=0)
    batch = dataset.build_batch(np.array([0]), ignore_index=-100, samples_consumed=0)
    assert batch.labels[0].tolist() == [2, 0, -100, 4, 5, 0, -100, 7]


def test_without_document_mask_positions_run_on_and_boundaries_are_none(documents_dataset):
    dataset, _ = documents_dataset(document_mask=False, mask_boundary_labels=False)
    batch = dataset.build_batch(np.arange(4), ignore_index=-100, samples_consumed=0)
    assert batch.cu_seqlens is None
    assert batch.max_seqlen == dataset.seq_len
    assert np.array_equal(batch.positions, np.tile(np.arange(dataset.seq_len), (4, 1)))
    assert np.array_equal(batch.labels[:, :-1], batch.tokens[:, 1:])


def test_attention_inside_the_boundaries_equals_attention_of_separate_documents(documents_dataset):
    dataset, _ = documents_dataset(seq_len=64)
    batch = dataset.build_batch(np.array([2]), ignore_index=-100, samples_consumed=0)
    assert batch.cu_seqlens is not None
    bounds = np.unique(batch.cu_seqlens[0]).tolist()
    assert len(bounds) > 3
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8, generator=generator) for _ in range(3))
    document = torch.zeros(64, dtype=torch.long)
    document[torch.tensor(bounds[1:-1])] = 1
    document = document.cumsum(0)
    mask = (document[:, None] == document[None, :]) & torch.ones(64, 64, dtype=torch.bool).tril()
    packed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for a, b in pairwise(bounds):
        alone = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True
        )
        # float32 sums of at most 64 terms in another order
        assert_close(packed[:, :, a:b], alone, atol=1e-5, rtol=1e-5)


def test_a_source_shorter_than_a_sample_is_refused_with_the_longest_that_fits(array_source):
    with pytest.raises(ValueError, match=r"source 'a' has 5 tokens.*Use seq_len=4 or less"):
        PackedDataset({"a": array_source(np.arange(5))}, seq_len=5, seed=0)


def test_more_epochs_than_allowed_are_refused(counting_dataset):
    dataset = counting_dataset(10, max_epochs={"a": 2})
    dataset.tokens(np.arange(20))
    dataset.check_samples(20)
    with pytest.raises(ValueError, match=r"source 'a' has been read 2 times"):
        dataset.check_samples(21)
    with pytest.raises(ValueError, match=r"source 'a' has been read 2 times.*max_epochs=2"):
        dataset.tokens([20])


def test_negative_sample_and_unmatched_weights_are_refused(counting_dataset, array_source):
    with pytest.raises(ValueError, match="sample -1 does not exist"):
        counting_dataset().tokens([-1])
    with pytest.raises(ValueError, match=r"the weights name \['b'\], but the sources are \['a'\]"):
        PackedDataset({"a": array_source(np.arange(50))}, seq_len=4, seed=0, weights={"b": 1.0})


def test_finding_rows_of_whole_documents_takes_little_more_memory_than_their_bounds():
    ends = np.arange(1, 20_001) * 8
    tracemalloc.start()
    rows = whole_rows(ends, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(rows, np.stack([ends - 8, ends], axis=1))
    assert peak < 3 * rows.nbytes
    assert whole_rows(ends[:0], 8).shape == (0, 2)
