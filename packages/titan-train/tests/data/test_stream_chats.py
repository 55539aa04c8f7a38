"""Streams of chats: the samples that a prepared source has, with their labels, on every layout and after every resume."""

import json

import numpy as np
import pytest
from titan_train.config import DataConfig, SourceConfig, TokenizerConfig
from titan_train.data import DataLoader, build_chat_template, build_datasets
from titan_train.tokenizers import ByteTokenizer

SEQ, WINDOW = 96, 8


def write_chats(folder, num_files=3, talks=30):
    """Short and long conversations of one and more turns; some do not fit into a sample."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for number in range(num_files):
        lines = []
        for i in range(talks):
            turns = []
            for turn in range(int(rng.integers(1, 4))):
                turns.append({"role": "user", "content": f"{number}-{i}-{turn} " + "q" * int(rng.integers(0, 20))})
                long = 300 if rng.random() < 0.08 else 25
                turns.append({"role": "assistant", "content": "a" * int(rng.integers(1, long))})
            lines.append(json.dumps({"messages": turns}) + "\n")
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


def dataset_of(folder, cache, *, stream=True, threads=0, **options):
    source = SourceConfig(
        name="chats", kind="jsonl", paths=(str(folder),), messages_key="messages", stream=stream, stream_window=WINDOW,
        **options,
    )  # fmt: skip
    config = DataConfig(sources=(source,), validation_fraction=0.0, num_threads=threads)
    tokenizer = ByteTokenizer()
    template = build_chat_template(TokenizerConfig(kind="bytes", chat_template="plain"), tokenizer)
    return build_datasets(config, tokenizer, seq_len=SEQ, seed=3, cache_dir=cache, template=template)[0]


def row_of(row):
    learned = None if row.learned is None else row.learned.tolist()
    return row.tokens.tolist(), row.document_starts.tolist(), learned


@pytest.mark.parametrize("packing", ["auto", "cut"])
def test_each_block_has_the_samples_of_prepared_chats_in_an_order_of_its_own(tmp_path, packing):
    folder = write_chats(tmp_path / "chats")
    stream = dataset_of(folder, tmp_path / "a", packing=packing)
    prepared = dataset_of(folder, tmp_path / "b", stream=False, packing=packing)
    blocks = (prepared.num_windows - 1) // WINDOW  # the last row of all is filled from the next pass
    assert blocks > 5
    for block in range(blocks):
        numbers = np.arange(block * WINDOW, (block + 1) * WINDOW)
        found = [row_of(row) for row in stream.rows(numbers)]
        # the rows of the source before its permutation
        wanted = [row_of(prepared._rows[0].read(int(number))) for number in numbers]
        assert sorted(found) == sorted(wanted)
        assert any(not all(learned) and any(learned) for _, _, learned in found)
    stream.close()


def batches(dataset, steps, *, dp_size=1, state=None, prefetch=0):
    """Tokens and labels of each global batch, joined over data-parallel ranks, and the state after the last."""
    loaders = [
        DataLoader(dataset, global_batch=4, dp_rank=rank, dp_size=dp_size, prefetch=prefetch) for rank in range(dp_size)
    ]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    made = []
    for _ in range(steps):
        found = [next(loader) for loader in loaders for _ in range(loader.microbatches_per_step)]
        made.append(np.concatenate([np.stack([batch.tokens.numpy(), batch.labels.numpy()], 1) for batch in found]))
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    for loader in loaders:
        loader.close()
    dataset.close()
    return made, states[0]


@pytest.mark.parametrize(("dp_size", "step"), [(1, 6), (2, 17), (4, 1)])
def test_chats_stream_alike_on_every_layout_and_resume_at_any_step(tmp_path, dp_size, step):
    folder = write_chats(tmp_path / "chats")
    plain, _ = batches(dataset_of(folder, tmp_path / "a"), 30)
    other, _ = batches(dataset_of(folder, tmp_path / "a", threads=3), 30, dp_size=dp_size, prefetch=2)
    assert np.array_equal(plain, other)
    _, state = batches(dataset_of(folder, tmp_path / "a"), step, dp_size=dp_size)
    rest, _ = batches(dataset_of(folder, tmp_path / "new"), 30 - step, dp_size=dp_size, state=state)
    assert np.array_equal(rest, plain[step:])


def test_a_resume_of_chats_knows_where_its_conversation_begins_in_the_file(tmp_path):
    folder = write_chats(tmp_path / "chats")
    _, state = batches(dataset_of(folder, tmp_path / "a"), 4)
    place = state["streams"]["chats"][1]
    content = (folder / place["file"]).read_bytes()
    assert place["line"] > 1
    assert content[: place["byte"]].count(b"\n") == place["line"] - 1


def test_another_template_makes_other_samples(tmp_path):
    folder = write_chats(tmp_path / "chats")
    first = dataset_of(folder, tmp_path / "a")
    source = SourceConfig(
        name="chats", kind="jsonl", paths=(str(folder),), messages_key="messages", stream=True, stream_window=WINDOW
    )
    tokenizer = ByteTokenizer()
    template = build_chat_template(TokenizerConfig(kind="bytes", chat_template="chatml"), tokenizer)
    config = DataConfig(sources=(source,), validation_fraction=0.0)
    second, _ = build_datasets(config, tokenizer, seq_len=SEQ, seed=3, cache_dir=tmp_path / "a", template=template)
    assert first.fingerprint != second.fingerprint
    assert [r.tolist() for r in (first.rows(np.arange(1))[0].tokens,)] != [second.rows(np.arange(1))[0].tokens.tolist()]
    with pytest.raises(ValueError, match="has no chat template"):
        build_datasets(config, tokenizer, seq_len=SEQ, seed=3, cache_dir=tmp_path / "a")


def test_whole_documents_of_text_stream_too(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    texts = ["x" * (1 + 7 * i % 130) for i in range(150)]
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def made(stream):
        source = SourceConfig(
            name="t", kind="jsonl", paths=(str(folder),), packing="whole", stream=stream, stream_window=WINDOW
        )
        config = DataConfig(sources=(source,), validation_fraction=0.0)
        return build_datasets(config, ByteTokenizer(), seq_len=SEQ, seed=3, cache_dir=tmp_path / str(stream))[0]

    stream, prepared = made(True), made(False)
    for block in range((prepared.num_windows - 1) // WINDOW):
        numbers = np.arange(block * WINDOW, (block + 1) * WINDOW)
        wanted = [row_of(prepared._rows[0].read(int(number))) for number in numbers]
        assert sorted(map(str, map(row_of, stream.rows(numbers)))) == sorted(map(str, wanted))
