import gc
import threading
import time

import numpy as np
import pytest
import torch
from titan_testing.contexts import fake_contexts
from titan_train.config.ramp import BatchRamp
from titan_train.data import DataLoader
from titan_train.data.loader import transfer
from titan_train.data.loader.data_loader import check_position


def _samples(dataset, loaders, steps):
    """First token of every sample of some steps, ranks joined in order: names the windows read."""
    found = []
    for _ in range(steps):
        for loader in loaders:
            found += [next(loader).tokens[:, 0] for _ in range(loader.microbatches_per_step)]
    return torch.cat(found).tolist()


def _loaders(dataset, dp_size, *, state=None, global_batch=32, **options):
    loaders = [
        DataLoader(dataset, global_batch=global_batch, dp_rank=rank, dp_size=dp_size, **options)
        for rank in range(dp_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


@pytest.fixture
def dataset(counting_dataset):
    return counting_dataset(101, names=("a", "b"), weights={"a": 2.0, "b": 1.0})


def test_two_resumes_on_other_numbers_of_ranks_continue_the_same_order(dataset):
    straight = _samples(dataset, _loaders(dataset, 1, prefetch=0), 12)
    on_8 = _loaders(dataset, 8, prefetch=0)
    resumed = _samples(dataset, on_8, 4)
    on_2 = _loaders(dataset, 2, state=on_8[3].state_dict(), microbatch=4)
    resumed += _samples(dataset, on_2, 4)
    on_16 = _loaders(dataset, 16, state=on_2[1].state_dict(), prefetch=0)
    resumed += _samples(dataset, on_16, 4)
    for loader in on_2:
        loader.close()
    assert resumed == straight


@pytest.mark.parametrize("prefetch", [1, 8])
def test_state_is_what_was_consumed_not_what_was_prefetched(dataset, prefetch):
    with DataLoader(dataset, global_batch=8, microbatch=2, prefetch=prefetch) as loader:
        for _ in range(3 * loader.microbatches_per_step):
            batch = next(loader)
        time.sleep(0.1)  # let the thread run ahead
        assert loader.state_dict()["samples"] == batch.samples_consumed == 24
        following = next(loader).tokens
    with DataLoader(dataset, global_batch=8, microbatch=2, prefetch=0) as plain:
        plain.load_state_dict(loader.state_dict())
        assert torch.equal(next(plain).tokens, following)


def test_state_in_the_middle_of_a_step_is_that_of_the_last_whole_step(dataset):
    loader = DataLoader(dataset, global_batch=8, microbatch=2, prefetch=0)
    consumed = [next(loader).samples_consumed for _ in range(6)]
    assert consumed == [0, 0, 0, 8, 8, 8]
    assert loader.state_dict()["samples"] == 8


def test_batch_ramp_reads_every_sample_once(dataset):
    ramp = BatchRamp((16, 32, 48), samples=70)
    loader = DataLoader(dataset, global_batch=ramp, microbatch=8)
    seen, consumed = [], []
    for step in range(6):
        assert loader.samples_consumed == ramp.consumed_after(step)
        consumed.append(loader.samples_consumed)
        for _ in range(loader.microbatches_per_step):
            seen.append(next(loader).tokens)
    loader.close()
    assert consumed == [0, 16, 32, 48, 80, 128]  # a size begins with the first step after its share of the 70
    total = ramp.consumed_after(6)
    assert loader.samples_consumed == total == 176
    assert torch.equal(torch.cat(seen), torch.from_numpy(dataset.tokens(np.arange(total)))[:, :-1])


def test_another_global_batch_after_resume_continues_without_gap(dataset):
    first = DataLoader(dataset, global_batch=24, microbatch=8, prefetch=0)
    seen = [next(first).tokens for _ in range(2 * 3)]
    second = DataLoader(dataset, global_batch=40, microbatch=8, prefetch=0)
    second.load_state_dict(first.state_dict())
    seen += [next(second).tokens for _ in range(5)]
    assert torch.equal(torch.cat(seen), torch.from_numpy(dataset.tokens(np.arange(88)))[:, :-1])


def test_prefetch_gives_the_same_batches_as_no_prefetch(dataset):
    with DataLoader(dataset, global_batch=8, microbatch=4, prefetch=8) as ahead:
        plain = DataLoader(dataset, global_batch=8, microbatch=4, prefetch=0)
        for _ in range(10):
            first, second = next(ahead), next(plain)
            for field in ("tokens", "labels", "positions", "cu_seqlens"):
                assert torch.equal(getattr(first, field), getattr(second, field)), field
            assert first.max_seqlen == second.max_seqlen


def test_batches_have_the_promised_types(dataset):
    batch = next(DataLoader(dataset, global_batch=4, microbatch=2, prefetch=0))
    assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (2, 8)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.dtype == torch.int32


def test_limited_steps_stop_and_reset_starts_again(dataset):
    loader = DataLoader(dataset, global_batch=8, microbatch=4, steps=3)
    first = [batch.tokens for batch in loader]
    assert len(first) == 6
    assert next(loader, None) is None
    loader.reset()
    again = [batch.tokens for batch in loader]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_error_in_the_thread_reaches_every_next(counting_dataset):
    dataset = counting_dataset(10, max_epochs={"a": 1})
    loader = DataLoader(dataset, global_batch=4, microbatch=4, prefetch=2)
    assert next(loader).samples_consumed == 4
    assert next(loader).samples_consumed == 8
    for _ in range(3):
        with pytest.raises(ValueError, match="max_epochs=1"):
            next(loader)
    loader.close()


def test_close_takes_less_than_a_second_and_iteration_can_go_on(dataset):
    loader = DataLoader(dataset, global_batch=4, microbatch=2, prefetch=4)
    next(loader), next(loader)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 1.0
    assert next(loader).tokens[:, 0].tolist() == dataset.tokens([4, 5])[:, 0].tolist()
    loader.close()
    assert not [t for t in threading.enumerate() if t.name == "titan-data-prefetch"]


def test_a_forgotten_loader_ends_its_thread(dataset):
    loader = DataLoader(dataset, global_batch=4, microbatch=2, prefetch=1)
    next(loader)
    del loader
    gc.collect()
    deadline = time.monotonic() + 5.0
    while [t for t in threading.enumerate() if t.name == "titan-data-prefetch"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"global_batch": 30, "dp_size": 4, "microbatch": 4}, r"= 16: .* Use global_batch=16 or 32"),
        ({"global_batch": 8, "dp_size": 4, "microbatch": 4}, r"Use global_batch=16, or microbatch=2"),
        ({"global_batch": 3, "dp_size": 4, "microbatch": 1}, r"Use global_batch=4\."),
        ({"global_batch": 8, "dp_rank": 4, "dp_size": 4}, r"dp_rank=4 is not one of the 4 .* 0 to 3"),
        ({"global_batch": 0}, "global_batch=0 is below 1"),
        ({"global_batch": 4, "microbatch": 0}, "microbatch=0 is below 1"),
        ({"global_batch": 4, "prefetch": -1}, "prefetch=-1 is below 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(dataset, sizes, message):
    with pytest.raises(ValueError, match=message):
        DataLoader(dataset, **sizes)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 6}, "seed"),
        ({"seq_len": 16, "windows": 50}, "seq_len"),
        ({"tokenizer": "other"}, "tokenizer"),
        ({"document_mask": False}, "fingerprint"),
        ({"weights": {"a": 1.0, "b": 1.0}}, "fingerprint"),
        ({"names": ("a", "c"), "weights": {"a": 2.0, "c": 1.0}}, "fingerprint"),
    ],
)
def test_resume_on_other_data_is_refused_naming_the_field_unless_allowed(counting_dataset, change, field, caplog):
    options = {"windows": 101, "names": ("a", "b"), "weights": {"a": 2.0, "b": 1.0}, "tokenizer": "one"}
    saved = DataLoader(counting_dataset(**options), global_batch=4, prefetch=0).state_dict() | {"samples": 40}
    loader = DataLoader(counting_dataset(**(options | change)), global_batch=4, prefetch=0)
    with pytest.raises(ValueError, match=rf"{field} was .* when the state was saved and is .* now"):
        loader.load_state_dict(saved)
    loader.load_state_dict(saved, allow_data_change=True)
    assert loader.samples_consumed == 40
    assert field in caplog.text


def test_a_stream_may_be_added_if_other_data_is_allowed(dataset):
    """Its part of the saved state is missing: it begins at its start."""
    saved = DataLoader(dataset, global_batch=4, prefetch=0).state_dict() | {"samples": 8, "fingerprint": "another"}
    assert "streams" not in saved
    dataset.stream_states = lambda samples: {"web": {"block": 0}}
    loaded = []
    dataset.load_stream_states = loaded.append
    loader = DataLoader(dataset, global_batch=4, prefetch=0)
    with pytest.raises(ValueError, match="fingerprint was"):
        loader.load_state_dict(saved)
    loader.load_state_dict(saved, allow_data_change=True)
    assert (loader.samples_consumed, loaded) == (8, [{}])


def test_a_run_of_an_iterable_goes_on_with_numbered_samples_if_other_data_is_allowed(dataset, caplog):
    loader = DataLoader(dataset, global_batch=4, prefetch=0)
    with pytest.raises(ValueError, match=r"read 40 samples of an iterable .* checkpoint\.allow_data_change"):
        loader.load_state_dict({"iterated_samples": 40})
    with pytest.raises(ValueError, match="allow_data_change"):
        check_position({"iterated_samples": 40}, dataset)
    loader.load_state_dict({"iterated_samples": 40}, allow_data_change=True)
    assert loader.samples_consumed == 40
    assert "of an iterable" in caplog.text


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": 3}, "has no 'fingerprint'"),
        ({"version": 2}, "has version 2"),
        ({"samples": -1}, "has samples=-1"),
        ({"samples": 1.5}, "has samples=1.5"),
    ],
)
def test_a_state_that_is_none_is_refused(dataset, state, message):
    loader = DataLoader(dataset, global_batch=4, prefetch=0)
    whole = state if "step" in state else loader.state_dict() | state
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(whole)
    assert loader.samples_consumed == 0


def test_the_prefetch_thread_opens_no_context_on_device_0(dataset, monkeypatch):
    contexts = fake_contexts(monkeypatch)
    contexts.opened = {3}  # the rank's own
    monkeypatch.setattr(transfer._PinnedSlot, "stage", lambda slot, tensors: list(tensors))
    monkeypatch.setattr(transfer, "_moved", lambda tensor, device: tensor)
    monkeypatch.setattr(transfer.HostToDevice, "receive", lambda *_: None)
    with DataLoader(dataset, global_batch=8, microbatch=4, prefetch=2, device="cuda:3") as loader:
        next(loader), next(loader)
    assert contexts.opened == {3}


@pytest.mark.gpu
def test_batches_on_cuda_equal_those_on_cpu(dataset):
    with DataLoader(dataset, global_batch=8, microbatch=4, prefetch=4, device="cuda") as loader:
        plain = DataLoader(dataset, global_batch=8, microbatch=4, prefetch=0)
        for _ in range(50):
            first, second = next(loader), next(plain)
            assert first.tokens.is_cuda
            for field in ("tokens", "labels", "positions", "cu_seqlens"):
                assert torch.equal(getattr(first, field).cpu(), getattr(second, field)), field
