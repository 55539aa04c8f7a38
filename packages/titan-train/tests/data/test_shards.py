import os
import subprocess
import sys

import numpy as np
import pytest
from titan_train.data.shards.format import BLOCK_BYTES, ShardWriter, TokenShard
from titan_train.data.shards.token_source import ShardedTokens, verify_shard

FINGERPRINT = "ab" * 32


def _write(folder, documents, *, vocab_size=300, name="train-00000"):
    writer = ShardWriter(folder, name, vocab_size=vocab_size, tokenizer_fingerprint=FINGERPRINT)
    for document in documents:
        writer.append([np.asarray(document, dtype=np.int32)])
    return writer.close()


def _flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.fixture
def three_blocks(tmp_path):
    """One shard of a little over two blocks of u16 tokens."""
    info = _write(tmp_path, [np.arange(BLOCK_BYTES // 2) % 300, np.arange(BLOCK_BYTES // 2) % 300, [1, 2, 3]])
    return tmp_path, info


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_tokens_take_two_bytes_up_to_65536_ids_and_four_beyond(tmp_path, vocab_size, width):
    document = [0, vocab_size - 1, 5]
    info = _write(tmp_path, [document], vocab_size=vocab_size)
    shard = TokenShard(tmp_path, info, FINGERPRINT)
    assert shard.tokens.itemsize == width
    assert shard.tokens.tolist() == document
    assert (tmp_path / "train-00000.tok").stat().st_size == 64 + 3 * width


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_flipped_byte_is_found_with_its_shard_and_block(three_blocks, block):
    folder, info = three_blocks
    verify_shard(TokenShard(folder, info, FINGERPRINT), "full")
    _flip(folder / "train-00000.tok", 64 + block * BLOCK_BYTES + 3)
    with pytest.raises(ValueError, match=rf"train-00000.tok: block {block} \(bytes {64 + block * BLOCK_BYTES} to "):
        verify_shard(TokenShard(folder, info, FINGERPRINT), "full")
    # fewer blocks than are sampled: the sample is all of them
    with pytest.raises(ValueError, match=f"block {block} "):
        verify_shard(TokenShard(folder, info, FINGERPRINT), "sample")
    verify_shard(TokenShard(folder, info, FINGERPRINT), "header")


def test_a_flipped_byte_in_the_index_is_found(three_blocks):
    folder, info = three_blocks
    _flip(folder / "train-00000.idx", 70)
    with pytest.raises(ValueError, match=r"train-00000.idx does not match its checksum"):
        verify_shard(TokenShard(folder, info, FINGERPRINT), "full")


@pytest.mark.parametrize("suffix", ["tok", "idx"])
def test_cut_missing_and_altered_files_are_refused_on_opening(three_blocks, suffix):
    folder, info = three_blocks
    path = folder / f"train-00000.{suffix}"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"{suffix} has {len(content) - 1} bytes and should have {len(content)}"):
        TokenShard(folder, info, FINGERPRINT)
    path.write_bytes(content)
    _flip(path, 12)
    with pytest.raises(ValueError, match="does not begin with an intact header"):
        TokenShard(folder, info, FINGERPRINT)
    path.unlink()
    with pytest.raises(ValueError, match=rf"train-00000.{suffix} is missing, though the manifest names it"):
        TokenShard(folder, info, FINGERPRINT)


def test_a_shard_of_another_tokenizer_is_refused(three_blocks):
    folder, info = three_blocks
    with pytest.raises(ValueError, match="was written with tokenizer abab"):
        TokenShard(folder, info, "cd" * 32)


def test_an_id_outside_the_vocabulary_is_not_written(tmp_path):
    writer = ShardWriter(tmp_path, "a", vocab_size=10, tokenizer_fingerprint=FINGERPRINT)
    with pytest.raises(ValueError, match="token id 10 is outside the vocabulary of 10"):
        writer.append([np.array([3, 10], dtype=np.int32)])
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_windows_and_document_starts_across_shards_equal_the_joined_tokens(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 300, size=rng.integers(1, 30)) for _ in range(40)]
    infos = [
        _write(tmp_path, documents[start : start + 7], name=f"train-{start:05d}")
        for start in range(0, len(documents), 7)
    ]
    source = ShardedTokens([tmp_path] * len(infos), infos, tokenizer_fingerprint=FINGERPRINT, fingerprint="x")
    joined = np.concatenate(documents)
    ends = np.cumsum([d.size for d in documents])
    assert source.num_tokens == joined.size
    for start in range(joined.size - 1):
        for n in (1, 2, 50, joined.size - start):
            n = min(n, joined.size - start)
            assert np.array_equal(source.window(start, n), joined[start : start + n])
            expected = ends[(ends > start) & (ends < start + n)] - start
            assert np.array_equal(source.document_starts(start, n), expected)


READ_MANY = """
import resource, sys
from pathlib import Path
import numpy as np
from titan_train.data.shards.format import ShardWriter
from titan_train.data.shards.token_source import ShardedTokens

folder, infos = Path(sys.argv[1]), []
for number in range(100):
    writer = ShardWriter(folder, f"train-{number:05d}", vocab_size=300, tokenizer_fingerprint="ab" * 32, sync=False)
    writer.append([np.full(50, number, dtype=np.int32)])
    infos.append(writer.close())
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
train, held_out = (
    ShardedTokens([folder] * 100, infos, tokenizer_fingerprint="ab" * 32, fingerprint="x", verify="full") for _ in range(2)
)
first = train.window(0, 50)
for number in range(100):
    for source in (train, held_out):
        assert source.window(number * 50, 50).tolist() == [number] * 50
        assert source.document_starts(number * 50 - 10 * (number > 0), 20).tolist() == [10] * (number > 0)
assert train.window(0, 5000).tolist() == np.repeat(np.arange(100), 50).tolist()
assert train.document_ends().tolist() == [*range(50, 5050, 50)]
assert first.tolist() == [0] * 50  # its file was let go
"""


def test_a_corpus_of_more_files_than_a_process_may_open_is_read(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", READ_MANY, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_shard_that_changes_while_it_is_not_mapped_is_refused_unless_it_was_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_train.data.shards.mapped._MOST", 1)
    infos = [_write(tmp_path, [[number, 1, 2]], name=f"train-{number:05d}") for number in range(2)]
    options = {"tokenizer_fingerprint": FINGERPRINT, "fingerprint": "x"}
    source, kept = (ShardedTokens([tmp_path] * 2, infos, **options, keep=keep) for keep in (False, True))
    view = source.window(0, 3)
    source.window(3, 3)
    path = tmp_path / "train-00000.tok"
    content = path.read_bytes()
    path.unlink()
    for other, how in (
        (content + b"12", "it has 72 bytes and had 70"),
        (b"", "it has 0 bytes"),
        (content, "it was written to"),
    ):
        path.write_bytes(other)
        os.utime(path, ns=(1, 1))
        with pytest.raises(ValueError, match=f"train-00000.tok changed while it was in use: {how}"):
            source.window(0, 3)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00000.tok"):
        source.window(0, 3)
    for tokens in (view, kept.window(0, 3)):
        assert tokens.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("shards", "checked"), [(200, 64), (40, 64), (2, 6), (0, 0)])
def test_a_sample_reads_a_bounded_number_of_blocks_spread_over_the_shards(tmp_path, monkeypatch, shards, checked):
    info = _write(tmp_path, [np.zeros(BLOCK_BYTES + 3)])  # three blocks
    seen = []
    monkeypatch.setattr(TokenShard, "check_block", lambda shard, block, _: seen.append((shard, block)))
    options = {"tokenizer_fingerprint": FINGERPRINT, "fingerprint": "x"}
    source = ShardedTokens([tmp_path] * shards, [info] * shards, **options)
    assert source.num_tokens == shards * info.tokens
    assert len(seen) == len(set(seen)) == checked
    first = [(source._shards.index(shard), block) for shard, block in seen]
    assert len({number for number, _ in first}) == min(shards, 64)
    seen.clear()
    again = ShardedTokens([tmp_path] * shards, [info] * shards, **options)
    assert [(again._shards.index(shard), block) for shard, block in seen] == first
    if not shards:
        return
    monkeypatch.undo()
    (tmp_path / "train-00000.idx").unlink()  # of every one, header and size are looked at
    with pytest.raises(ValueError, match="is missing"):
        ShardedTokens([tmp_path] * shards, [info] * shards, **options)
