"""Streams: the samples of the documents in order, the same on every layout, thread count and after every resume."""

import gzip
import json
import multiprocessing
import threading

import numpy as np
import pytest
from titan_train.config import DataConfig, SourceConfig
from titan_train.data import DataLoader, MalformedInputError, PackedDataset, build_datasets, prepare
from titan_train.data.prepared import one_process
from titan_train.data.sources.document import CorpusFile
from titan_train.data.sources.encoding import DocumentTokens
from titan_train.data.stream.token_stream import TokenStream
from titan_train.tokenizers import ByteTokenizer

SEQ, WINDOW = 16, 8


def write_files(folder, num_files=3, documents=40, suffix=".jsonl"):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(num_files):
        texts = [f"{number}-{i} " + "x" * int(rng.integers(0, 30)) for i in range(documents)]
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        (folder / f"{number}{suffix}").write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    return folder


def source_of(folder, **options):
    return SourceConfig(
        **{"name": "web", "kind": "jsonl", "paths": (str(folder),), "stream": True, "stream_window": WINDOW, **options}
    )


def dataset_of(source, cache, *more, **options):
    config = DataConfig(sources=(source, *more), validation_fraction=0.0, **options)
    train, held_out = build_datasets(config, ByteTokenizer(), seq_len=SEQ, seed=3, cache_dir=cache)
    assert held_out is None
    return train


def whole_stream(folder, passes=1):
    """The tokens of all documents in order, the plain way."""
    ids = []
    for path in sorted(folder.glob("*")):
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path) as file:
            for line in file:
                ids += [*ByteTokenizer().encode(json.loads(line)["text"]).tolist(), 257]
    return np.array(ids * passes)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_each_window_of_the_documents_comes_once_within_its_block(tmp_path, suffix):
    folder = write_files(tmp_path / "text", suffix=suffix)
    dataset = dataset_of(source_of(folder), tmp_path / "cache")
    stream = whole_stream(folder, passes=3)  # the stream goes on with the next pass
    blocks = (stream.size - 1) // (SEQ * WINDOW)
    assert blocks > 20
    order = []
    for block in range(blocks):
        rows = dataset.rows(np.arange(block * WINDOW, (block + 1) * WINDOW))
        expected = [
            stream[(block * WINDOW + w) * SEQ : (block * WINDOW + w) * SEQ + SEQ + 1].tolist() for w in range(WINDOW)
        ]
        found = [row.tokens.tolist() for row in rows]
        assert sorted(found) == sorted(expected)
        order.append([expected.index(tokens) for tokens in found])
        for row in rows:
            assert row.document_starts.tolist() == [i for i in range(1, SEQ + 1) if row.tokens[i - 1] == 257]
    assert len({tuple(places) for places in order}) > blocks // 2  # each block is shuffled in its own way
    dataset.close()


def batches(dataset, steps, *, dp_size=1, state=None, prefetch=0, global_batch=4):
    """The tokens of each global batch, joined over data-parallel ranks, and the state after the last."""
    loaders = [
        DataLoader(dataset, global_batch=global_batch, dp_rank=rank, dp_size=dp_size, prefetch=prefetch)
        for rank in range(dp_size)
    ]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
    made = [
        np.concatenate([next(loader).tokens.numpy() for loader in loaders for _ in range(loader.microbatches_per_step)])
        for _ in range(steps)
    ]
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    for loader in loaders:
        loader.close()
    return made, states[0]


def test_order_and_state_are_the_same_for_every_number_of_ranks_and_threads(tmp_path):
    folder = write_files(tmp_path / "text")
    plain, state = batches(dataset_of(source_of(folder), tmp_path / "a"), 30)
    for number, (dp_size, threads, prefetch) in enumerate([(2, 1, 0), (4, 3, 0), (2, 2, 3)]):
        dataset = dataset_of(source_of(folder), tmp_path / f"cache{number}", num_threads=threads)
        made, other = batches(dataset, 30, dp_size=dp_size, prefetch=prefetch)
        assert np.array_equal(made, plain)
        assert other == state
        dataset.close()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_run_resumes_at_any_step_with_and_without_the_cache(tmp_path, suffix):
    folder = write_files(tmp_path / "text", suffix=suffix)
    plain, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), 40)
    for step in (1, 7, 16):
        _, state = batches(dataset_of(source_of(folder), tmp_path / "a"), step)
        for dp_size, cache in ((1, "a"), (4, f"new{step}")):
            rest, later = batches(
                dataset_of(source_of(folder), tmp_path / cache), 40 - step - 3, dp_size=dp_size, state=state
            )
            assert np.array_equal(rest, plain[step:37])
            last, _ = batches(dataset_of(source_of(folder), tmp_path / f"{cache}-2"), 3, state=later)  # a second resume
            assert np.array_equal(last, plain[37:])


def test_a_resume_reads_nothing_of_the_files_before_it(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "text")
    _, state = batches(dataset_of(source_of(folder), tmp_path / "a"), 24)
    assert state["streams"]["web"][1]["file"] != "0.jsonl"
    opened = []
    from titan_train.data.sources.files import FileReader

    class Watched(FileReader):
        def __init__(self, path):
            opened.append(path.name)
            super().__init__(path)

    monkeypatch.setattr("titan_train.data.stream.reader.FileReader", Watched)
    batches(dataset_of(source_of(folder), tmp_path / "b"), 1, state=state)
    assert opened
    assert opened[0] == state["streams"]["web"][1]["file"]


def test_a_stream_asks_the_disk_once_for_each_file_when_it_opens_however_many_blocks_it_keeps(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "text", num_files=6)
    dataset = dataset_of(source_of(folder), tmp_path / "cache")
    batches(dataset, 30)
    dataset.close()
    asked = count_stamps(monkeypatch)
    dataset_of(source_of(folder), tmp_path / "cache").close()
    assert sorted(asked) == [f"{number}.jsonl" for number in range(6)]


def test_a_block_that_is_there_asks_for_its_own_files_and_a_save_for_none(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "text", num_files=6, documents=10)
    dataset = dataset_of(source_of(folder), tmp_path / "cache")
    _, state = batches(dataset, 12)
    dataset.close()
    reader = dataset_of(source_of(folder), tmp_path / "cache")
    loader = DataLoader(reader, global_batch=4, microbatch=4, prefetch=0)
    asked = count_stamps(monkeypatch)
    for step in range(12):
        next(loader)
        assert len(asked) <= 3 * (step % 2 == 0)  # two steps a block
        asked.clear()
        last = loader.state_dict()
        assert not asked
    assert last == state


def test_a_block_that_is_there_opens_while_another_process_has_the_folder(tmp_path):
    folder = write_files(tmp_path / "text")
    dataset = dataset_of(source_of(folder), tmp_path / "a")
    plain, _ = batches(dataset, 2)
    dataset.close()
    (spool,) = (tmp_path / "a").glob("web-stream-*")
    read = []

    def resume():
        read.append(batches(dataset_of(source_of(folder), tmp_path / "a"), 2)[0])

    with one_process(spool):
        thread = threading.Thread(target=resume, daemon=True)
        thread.start()
        thread.join(30)
        assert read
    assert np.array_equal(read[0], plain)


def test_a_block_that_was_damaged_before_the_run_is_made_again(tmp_path):
    folder = write_files(tmp_path / "text")
    plain, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), 6)
    (tokens,) = (tmp_path / "a").glob("web-stream-*/block-00000001*.tok")
    whole = tokens.read_bytes()
    for content in (whole[:100] + bytes(20) + whole[120:], whole[:100], b""):
        tokens.write_bytes(content)
        again, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), 6)
        assert np.array_equal(again, plain)
        assert tokens.read_bytes() == whole


def test_new_files_may_come_last_and_other_changes_are_refused(tmp_path):
    folder = write_files(tmp_path / "text")
    plain, state = batches(dataset_of(source_of(folder), tmp_path / "a"), 24)
    (folder / "9.jsonl").write_text(json.dumps({"text": "later " * 50}) + "\n")
    after, _ = batches(dataset_of(source_of(folder), tmp_path / "b"), 3, state=state)
    first, _ = batches(dataset_of(source_of(folder), tmp_path / "c"), 27)
    assert np.array_equal(first[:24], plain)
    assert np.array_equal(first[24:], after)
    (folder / "0.jsonl").write_text(json.dumps({"text": "other"}) + "\n")
    with pytest.raises(ValueError, match="a file before it in the order of names was added, removed or changed"):
        batches(dataset_of(source_of(folder), tmp_path / "b"), 1, state=state)


@pytest.mark.parametrize("steps", [1, 8])  # within the first block, and later
def test_a_change_of_the_file_that_is_being_read_is_refused(tmp_path, steps):
    folder = write_files(tmp_path / "text", num_files=1)
    _, state = batches(dataset_of(source_of(folder), tmp_path / "a"), steps)
    file = folder / "0.jsonl"
    file.write_text(json.dumps({"text": "inserted"}) + "\n" + file.read_text())
    with pytest.raises(ValueError, match="is gone or has another size now"):
        batches(dataset_of(source_of(folder), tmp_path / "b"), 1, state=state)


def test_in_a_later_pass_a_change_of_a_file_that_the_pass_before_read_is_refused(tmp_path):
    folder = write_files(tmp_path / "text")
    steps = whole_stream(folder).size // (SEQ * 4) + 3  # into the second pass
    _, state = batches(dataset_of(source_of(folder), tmp_path / "a"), steps)
    cursor = state["streams"]["web"][1]
    assert (cursor["epoch"], cursor["file"], cursor["earlier"][0]) == (1, "0.jsonl", 3)
    (folder / "9.jsonl").write_text(json.dumps({"text": "later " * 50}) + "\n")
    rest, _ = batches(dataset_of(source_of(folder), tmp_path / "b"), 4, state=state)
    kept, later = batches(dataset_of(source_of(folder), tmp_path / "a"), 4, state=state)
    assert np.array_equal(rest, kept)
    assert later["streams"]["web"][1]["earlier"] == cursor["earlier"]  # this pass has not read the new one yet
    (folder / "2.jsonl").unlink()
    with pytest.raises(ValueError, match="has read 3 files in the pass before"):
        batches(dataset_of(source_of(folder), tmp_path / "c"), 1, state=state)
    del cursor["earlier"]  # as earlier releases saved it
    batches(dataset_of(source_of(folder), tmp_path / "d"), 1, state=state)


def test_a_stream_whose_files_or_key_changed_goes_on_if_that_is_allowed(tmp_path, caplog):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(2):
        record = json.dumps({"text": f"{number}" * 100, "short": "x"})
        (folder / f"{number}.jsonl").write_text(f"{record}\n" * 30)
    _, state = batches(dataset_of(source_of(folder), tmp_path / "a"), 12)
    assert state["streams"]["web"][1]["skip"] > 2

    def resumed(cache, **options):
        loader = DataLoader(dataset_of(source_of(folder, **options), tmp_path / cache), global_batch=4, prefetch=0)
        loader.load_state_dict(json.loads(json.dumps(state)), allow_data_change=True)
        assert loader.samples_consumed == 48
        return next(loader)

    resumed("b", text_key="short")
    assert "first file" not in caplog.text
    (folder / "0.jsonl").write_text(json.dumps({"text": "other " * 20}) + "\n")
    resumed("c")
    assert "has another size now" in caplog.text
    assert "reads this stream from its first file" in caplog.text


def test_a_file_that_comes_last_is_read_before_the_next_pass_whatever_the_cache_holds(tmp_path):
    folder = write_files(tmp_path / "text", num_files=1)
    steps = whole_stream(folder).size // (SEQ * 4) + 3  # into the second pass
    _, state = batches(dataset_of(source_of(folder), tmp_path / "a"), 2)
    batches(dataset_of(source_of(folder), tmp_path / "a"), steps)
    (folder / "9.jsonl").write_text(json.dumps({"text": "later " * 50}) + "\n")
    fresh, _ = batches(dataset_of(source_of(folder), tmp_path / "b"), steps + 8, state=state)
    kept, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), steps + 8, state=state)
    assert np.array_equal(kept, fresh)


def test_blocks_behind_a_changed_file_are_made_again_from_where_its_block_ends_now(tmp_path):
    folder = write_files(tmp_path / "text", num_files=2)
    batches(dataset_of(source_of(folder), tmp_path / "a"), 20)
    first = folder / "0.jsonl"
    first.write_text(first.read_text().replace("xxxxxx", "\\u0078", 1))  # the same size, five tokens fewer
    fresh, _ = batches(dataset_of(source_of(folder), tmp_path / "b"), 20)
    kept, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), 20)
    assert np.array_equal(kept, fresh)


def test_changed_text_under_the_same_names_is_tokenized_again(tmp_path):
    folder = write_files(tmp_path / "text")
    first, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), 2)
    for path in folder.glob("*"):
        path.write_text(path.read_text().replace("-", "+"))
    second, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), 2)
    assert not np.array_equal(first, second)
    assert np.array_equal(np.where(np.array(first) == ord("-"), ord("+"), first), second)


def test_disk_and_memory_stay_bounded_and_removed_blocks_are_made_again(tmp_path):
    folder = write_files(tmp_path / "text")
    dataset = dataset_of(source_of(folder), tmp_path / "a")
    plain, _ = batches(dataset, 60)
    dataset.close()
    (spool,) = (tmp_path / "a").glob("web-stream-*")
    assert len(list(spool.glob("*.tok"))) <= 8 + 2
    for path in spool.glob("block-*"):
        path.unlink()
    again, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), 60)
    assert np.array_equal(plain, again)


def count_stamps(monkeypatch):
    """A list of the files that the disk is asked for from now on."""
    asked = []
    monkeypatch.setattr(
        CorpusFile, "stamp", lambda file, plain=CorpusFile.stamp: asked.append(file.name) or plain(file)
    )
    return asked


def count_documents(monkeypatch):
    """A list with an entry for each document that is read from now on."""
    read = []
    monkeypatch.setattr(
        DocumentTokens, "of", lambda stored, ids, of=DocumentTokens.of: read.append(1) or of(stored, ids)
    )
    return read


def test_a_step_of_more_blocks_than_are_usually_kept_reads_each_document_once(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "text", num_files=1, documents=400)
    read = count_documents(monkeypatch)
    dataset = dataset_of(source_of(folder, stream_window=1), tmp_path / "a")
    made, state = batches(dataset, 2, global_batch=70)
    dataset.close()
    assert len(read) <= np.count_nonzero(np.concatenate(made) == 257) + 5
    assert state["streams"]["web"][0] == 140
    assert len(list((tmp_path / "a").glob("web-stream-*/*.tok"))) <= 2 * 71 + 2


def test_runs_that_share_a_folder_do_not_send_each_other_to_its_beginning(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "text", num_files=1, documents=300)
    slow, beside, fast = (
        dataset_of(source_of(folder, stream_window=1), tmp_path / "a", num_threads=1) for _ in range(3)
    )
    slow.require(70)
    beside.require(70)  # another rank of the slow run, which makes nothing
    for number in range(71, 200):  # these blocks push those of the slow run out of the record, and off the disk
        fast.require(number)
    read = count_documents(monkeypatch)
    for behind in (beside, slow):
        behind.require(72)
    assert len(read) < 20


def test_a_stream_beside_prepared_shards(tmp_path):
    folder = write_files(tmp_path / "text")
    (tmp_path / "t.txt").write_text("UPPER " * 100)
    prepared = SourceConfig(name="upper", kind="text", paths=(str(tmp_path / "t.txt"),), weight=0.25)
    dataset = dataset_of(source_of(folder, weight=0.75), tmp_path / "a", prepared)
    plain, _ = batches(dataset, 40)
    share = np.mean([ord("U") in row or ord("R") in row for batch in plain for row in batch.tolist()])
    assert 0.1 < share < 0.4
    _, state = batches(dataset_of(source_of(folder, weight=0.75), tmp_path / "a", prepared), 13)
    rest, _ = batches(dataset_of(source_of(folder, weight=0.75), tmp_path / "b", prepared), 27, dp_size=2, state=state)
    assert np.array_equal(rest, plain[13:])


def test_parquet_streams_as_json_lines_do(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as parquet

    folder = write_files(tmp_path / "text")
    (tmp_path / "parquet").mkdir()
    for path in folder.glob("*"):
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        parquet.write_table(pa.table({"text": texts}), tmp_path / "parquet" / f"{path.stem}.parquet", row_group_size=7)
    plain, _ = batches(dataset_of(source_of(folder), tmp_path / "a"), 30)
    source = source_of(tmp_path / "parquet", kind="parquet")
    _, state = batches(dataset_of(source, tmp_path / "b"), 11)
    rest, _ = batches(dataset_of(source, tmp_path / "c"), 19, state=state)
    assert np.array_equal(rest, plain[11:])


def test_a_bad_line_is_named_when_its_turn_comes_and_on_every_rank(tmp_path):
    folder = write_files(tmp_path / "text")
    lines = (folder / "1.jsonl").read_text().splitlines()
    lines[20] = "{broken"
    (folder / "1.jsonl").write_text("\n".join(lines) + "\n")
    dataset = dataset_of(source_of(folder), tmp_path / "a")
    made, failed = 0, []
    loaders = [DataLoader(dataset, global_batch=4, dp_rank=rank, dp_size=4, prefetch=0) for rank in range(4)]
    while not failed:
        for loader in loaders:
            try:
                next(loader)
            except MalformedInputError as err:
                failed.append(str(err))
        made += 1
    assert len(failed) == 4
    assert all("1.jsonl, line 21" in text for text in failed)
    assert made > 5  # what comes before was given
    skipping = dataset_of(source_of(folder), tmp_path / "b", on_error="quarantine", max_bad_fraction=0.1)
    batches(skipping, 20)
    (kept,) = (tmp_path / "b").glob("*/quarantine.jsonl")
    assert json.loads(kept.read_text().splitlines()[0])["line"] == 21


def test_malformed_documents_are_counted_in_each_pass_for_itself_and_judged_in_whole_ones(tmp_path):
    """A resume near the end of a pass reads few documents, one of them malformed: that is no share of the source."""
    folder = write_files(tmp_path / "text", num_files=1, documents=200)
    lines = (folder / "0.jsonl").read_text().splitlines()
    lines[195] = "{broken"
    (folder / "0.jsonl").write_text("\n".join(lines) + "\n")
    limits = {"on_error": "skip", "max_bad_fraction": 0.01, "max_bad": 2}
    late = int(0.92 * whole_stream_length(folder)) // (SEQ * 4)
    dataset = dataset_of(source_of(folder), tmp_path / "a", **limits)
    expected, _ = batches(dataset, 6 * late)  # several passes, one malformed document in each
    _, state = batches(dataset_of(source_of(folder), tmp_path / "b", **limits), late)
    rest, _ = batches(dataset_of(source_of(folder), tmp_path / "c", **limits), late, state=state)
    assert np.array_equal(rest, expected[late : 2 * late])


def test_limits_of_malformed_documents_hold_for_blocks_made_ahead_and_on_every_rank(tmp_path):
    folder = write_files(tmp_path / "text")
    for path in folder.glob("*"):
        lines = path.read_text().splitlines()
        lines[::8] = ["{broken"] * len(lines[::8])
        path.write_text("\n".join(lines) + "\n")
    limits = {"on_error": "skip", "max_bad_fraction": 1.0, "max_bad": 3}
    ranks = [dataset_of(source_of(folder), tmp_path / "a", **limits) for _ in range(2)]
    failed = []
    for block in range(15):
        for dataset in ranks:
            try:
                dataset.rows([block * WINDOW])
            except MalformedInputError as err:
                failed.append(str(err))
            (stream,) = dataset._streams.values()
            if stream._ahead is not None:
                stream._ahead.join()
        if failed:
            break
    assert len(failed) == 2
    assert all("data.max_bad=3" in text for text in failed)


def whole_stream_length(folder):
    lines = (folder / "0.jsonl").read_text().splitlines()
    return sum(len(json.loads(line)["text"]) + 1 for line in lines if line != "{broken")


def test_passes_are_limited_if_asked_and_nothing_before_the_limit_is_lost(tmp_path):
    folder = write_files(tmp_path / "text")
    blocks = (whole_stream(folder).size - 1) // (SEQ * WINDOW)
    for threads in (1, 3):
        dataset = dataset_of(source_of(folder, max_epochs=1), tmp_path / f"{threads}", num_threads=threads)
        dataset.rows(np.arange(blocks * WINDOW))
        with pytest.raises(ValueError, match="has been read 1 times"):
            dataset.rows([blocks * WINDOW])


def test_a_run_that_ends_within_a_block_beyond_the_limit_is_told_of_the_blocks(tmp_path):
    folder = write_files(tmp_path / "text")
    samples = (whole_stream(folder).size - 1) // SEQ
    window = samples * 2 // 3
    with pytest.raises(ValueError, match=f"blocks of stream_window={window} .* a new run may also set a smaller"):
        dataset_of(source_of(folder, max_epochs=1, stream_window=window), tmp_path / "a").require(window + window // 5)
    dataset_of(source_of(folder, max_epochs=1), tmp_path / "b").require(window + window // 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "tokens"}, "prepared already"),
        ({"stream_window": 0}, "must be at least 1"),
    ],
)
def test_streams_of_what_cannot_stream_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        source_of(tmp_path, **options)


def test_streams_without_documents_or_files_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no files"):
        prepare(DataConfig(sources=(source_of(tmp_path / "empty"),)), ByteTokenizer(), cache_dir=tmp_path / "a")
    (tmp_path / "empty" / "a.jsonl").write_text("")
    dataset = dataset_of(source_of(tmp_path / "empty"), tmp_path / "a")
    with pytest.raises(ValueError, match="none of its 1 files holds a document"):
        dataset.rows([0])
    with pytest.raises(ValueError, match="validation loss needs a fixed text"):
        DataConfig(validation_sources=(source_of(tmp_path),))


def _read(folder, cache, rank, steps, out):
    dataset = dataset_of(source_of(folder), cache)
    loader = DataLoader(dataset, global_batch=8, dp_rank=rank, dp_size=2, prefetch=2, microbatch=4)
    np.save(out / f"{rank}.npy", np.stack([next(loader).tokens.numpy() for _ in range(steps)]))
    loader.close()
    dataset.close()


def test_processes_that_share_a_cache_make_each_block_once_and_agree(tmp_path):
    folder = write_files(tmp_path / "text")
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_read, args=(folder, tmp_path / "a", rank, 30, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    plain, _ = batches(dataset_of(source_of(folder), tmp_path / "b"), 30, global_batch=8)
    made = np.concatenate([np.load(tmp_path / f"{rank}.npy") for rank in range(2)], axis=1)
    assert np.array_equal(made, plain)


def test_a_dataset_of_a_stream_alone_needs_a_weight(tmp_path):
    stream = TokenStream(
        source_of(write_files(tmp_path / "t")), DataConfig(), ByteTokenizer(), tmp_path, seq_len=SEQ, seed=0
    )
    with pytest.raises(ValueError, match="Give each source one weight"):
        PackedDataset({"web": stream}, seq_len=SEQ, seed=0)
