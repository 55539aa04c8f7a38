import codecs
import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from titan_train.config import DataConfig, SourceConfig, TokenizerConfig
from titan_train.data import MalformedInputError, build_datasets, build_tokenizer, prepare
from titan_train.data.shards.manifest import read_manifest
from titan_train.data.shards.token_source import ShardedTokens
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.files import FileReader
from titan_train.tasks.image_files import read_json_lines

GOOD = ["the first", "zwei ü", "third \n line", "fourth"]
LINES = [
    json.dumps({"text": GOOD[0]}).encode(),
    b'{"text": "bad \xff byte"}',  # line 2
    json.dumps({"text": GOOD[1]}).encode(),
    b'{"text": "no end',  # line 4
    b'{"title": "no text"}',  # line 5
    b'{"text": 7}',  # line 6
    json.dumps({"text": GOOD[2]}).encode(),
    b"",  # line 8
    b'{"text": ""}',  # line 9
    b'{"text": "\\ud800"}',  # line 10: half a character
    b"[" * 100_000,  # line 11: nested too deeply to parse, or simply unfinished
    json.dumps({"text": "x" * 300_000}).encode(),  # line 12: over max_document_bytes
    json.dumps({"text": GOOD[3]}).encode(),
]
COUNTS = {"invalid_utf8": 2, "invalid_json": 2, "missing_text": 2, "empty": 2, "oversize": 1}


def _config(path, **options):
    source = SourceConfig(name="web", kind="jsonl", paths=(str(path),), max_document_bytes=200_000)
    return DataConfig(sources=(source,), validation_fraction=0.0, **options)


def _documents(folder, tokenizer):
    manifest = read_manifest(folder)
    source = ShardedTokens(
        [folder] * len(manifest.splits["train"]),
        manifest.splits["train"],
        tokenizer_fingerprint=tokenizer.fingerprint,
        fingerprint=manifest.fingerprint,
    )
    tokens = source.window(0, source.num_tokens)
    ends = [*source.document_starts(0, source.num_tokens).tolist(), source.num_tokens]
    starts = [0, *ends[:-1]]
    # each document without its end token
    return [tokenizer.decode(tokens[a : b - 1]) for a, b in zip(starts, ends, strict=True)], manifest


@pytest.fixture(params=["plain", "gz", "zst"])
def bad_file(request, tmp_path):
    content = b"\n".join(LINES) + b"\n"
    if request.param == "plain":
        path = tmp_path / "bad.jsonl"
        path.write_bytes(content)
    elif request.param == "gz":
        path = tmp_path / "bad.jsonl.gz"
        path.write_bytes(gzip.compress(content))
    else:
        path = tmp_path / "bad.jsonl.zst"
        path.write_bytes(zstandard.ZstdCompressor().compress(content))
    return path


def test_skip_yields_exactly_the_good_documents_and_counts_each_class(bad_file, tmp_path, tokenizer):
    config = _config(bad_file, on_error="skip", max_bad_fraction=0.9)
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    texts, manifest = _documents(folder, tokenizer)
    assert texts == GOOD
    assert manifest.bad == COUNTS


def test_raise_names_file_line_byte_and_reason(bad_file, tmp_path, tokenizer):
    first_bad_byte = len(LINES[0]) + 1 + LINES[1].index(b"\xff")
    with pytest.raises(
        MalformedInputError, match=rf"{bad_file.name}, line 2, byte {first_bad_byte}: invalid UTF-8 .*on_error"
    ) as caught:
        prepare(_config(bad_file), tokenizer, cache_dir=tmp_path / "cache")
    assert caught.value.documents[0].line == 2
    assert not list((tmp_path / "cache").rglob("manifest.json"))


def test_quarantine_keeps_every_bad_line_byte_for_byte(bad_file, tmp_path, tokenizer):
    config = _config(bad_file, on_error="quarantine", max_bad_fraction=0.9)
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    texts, _ = _documents(folder, tokenizer)
    assert texts == GOOD
    kept = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert [record["line"] for record in kept] == [2, 4, 5, 6, 8, 9, 10, 11, 12]
    for record in kept:
        if record["kind"] != "oversize":
            assert record["raw_latin1"].encode("latin-1") == LINES[record["line"] - 1]


def test_one_percent_bad_lines_pass_the_limit_of_a_thousandth(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b'{"text": "x"}\n' if i % 100 else b"bad\n" for i in range(500)))
    with pytest.raises(
        MalformedInputError,
        match=r"5 of 500 documents are malformed \(5 invalid_json\), more than data.max_bad_fraction",
    ) as caught:
        prepare(_config(path, on_error="skip"), tokenizer, cache_dir=tmp_path / "cache")
    assert [bad.line for bad in caught.value.documents] == [1, 101, 201, 301, 401]
    prepare(_config(path, on_error="skip", max_bad_fraction=0.01), tokenizer, cache_dir=tmp_path / "cache")
    # what was prepared under a looser limit is judged again under a tighter one
    with pytest.raises(MalformedInputError, match=r"max_bad_fraction=0.001"):
        prepare(_config(path, on_error="skip"), tokenizer, cache_dir=tmp_path / "cache")


def test_a_share_far_above_the_limit_stops_before_the_end(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' * 9_990 + b"bad\n" * 50_000)
    with pytest.raises(MalformedInputError, match=r"11 of 1000\d documents"):
        prepare(_config(path, on_error="skip"), tokenizer, cache_dir=tmp_path / "cache")


def test_max_bad_limits_the_number(bad_file, tmp_path, tokenizer):
    config = _config(bad_file, on_error="skip", max_bad=3, max_bad_fraction=1.0)
    with pytest.raises(MalformedInputError, match=r"4 of 6 documents .*data.max_bad=3"):
        prepare(config, tokenizer, cache_dir=tmp_path / "cache")


def test_max_bad_is_asked_of_what_is_prepared_already(bad_file, tmp_path, tokenizer):
    options = {"on_error": "skip", "max_bad_fraction": 1.0}
    prepare(_config(bad_file, **options), tokenizer, cache_dir=tmp_path / "cache")
    with pytest.raises(MalformedInputError, match=r"data\.max_bad=3"):
        prepare(_config(bad_file, max_bad=3, **options), tokenizer, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("suffix", ["zst", "gz"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_truncated_and_damaged_archives_are_seen_and_keep_what_came_before(tmp_path, tokenizer, suffix, damage):
    rng = np.random.default_rng(0)
    rng_text = [f"{i} " + rng.bytes(100).hex() * 2 for i in range(4000)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in rng_text).encode()
    if suffix == "zst":
        raw = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(content))
    else:
        raw = bytearray(gzip.compress(content))
    if damage == "cut":
        raw = raw[: len(raw) * 3 // 4]
    else:
        raw[-5] ^= 0xFF  # in the checksum
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(raw)
    with pytest.raises(MalformedInputError, match=rf"a.jsonl.{suffix}, line \d+, byte \d+: .*(truncated|damaged)"):
        prepare(_config(path), tokenizer, cache_dir=tmp_path / "cache")
    config = _config(path, on_error="skip", max_bad_fraction=0.01)
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    texts, manifest = _documents(folder, tokenizer)
    assert manifest.bad == {"truncated": 1}
    assert texts == rng_text[: len(texts)]
    assert 1000 < len(texts) < (3500 if damage == "cut" else 4001)


@pytest.mark.parametrize("suffix", ["zst", "gz"])
def test_a_compressed_file_of_no_bytes_is_truncated(tmp_path, tokenizer, suffix):
    (tmp_path / f"a.jsonl.{suffix}").touch()
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    source = SourceConfig(name="web", kind="jsonl", paths=(str(tmp_path),))
    with pytest.raises(MalformedInputError, match=rf"a.jsonl.{suffix}, line 1, byte 0: the file is empty.* truncated"):
        prepare(DataConfig(sources=(source,)), tokenizer, cache_dir=tmp_path / "cache")


def test_several_zstd_frames_in_one_file_are_all_read(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl.zst"
    compressor = zstandard.ZstdCompressor()
    path.write_bytes(b"".join(compressor.compress(json.dumps({"text": f"t{i}"}).encode() + b"\n") for i in range(50)))
    (folder,) = prepare(_config(path), tokenizer, cache_dir=tmp_path / "cache")
    assert _documents(folder, tokenizer)[0] == [f"t{i}" for i in range(50)]


def test_lines_longer_than_a_read_keep_their_numbers_and_offsets(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    long_line = json.dumps({"text": "x" * 1_000_000}).encode()
    path.write_bytes(b'{"text": "a"}\n' + long_line + b'\n{"text": "b"}\n' + long_line + b"\nbad")
    source = SourceConfig(name="web", kind="jsonl", paths=(str(path),))
    (folder,) = prepare(
        DataConfig(sources=(source,), validation_fraction=0.0, on_error="quarantine", max_bad_fraction=1.0),
        tokenizer,
        cache_dir=tmp_path / "cache",
    )
    texts, _ = _documents(folder, tokenizer)
    assert [len(text) for text in texts] == [1, 1_000_000, 1, 1_000_000]
    (bad,) = (json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines())
    assert (bad["line"], bad["byte"]) == (5, path.stat().st_size - 3)


def test_oversize_lines_do_not_take_memory_and_the_rest_is_read(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"y" * 1_000_000 + b'\n{"text": "b"}\n')
    config = _config(path, on_error="skip", max_bad_fraction=1.0)
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    texts, manifest = _documents(folder, tokenizer)
    assert texts == ["a", "b"]
    assert manifest.bad == {"oversize": 1}


def test_a_text_file_with_a_bad_byte_names_the_line_in_it(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthr\xffee\n")
    config = DataConfig(sources=(SourceConfig(name="t", paths=(str(path),)),))
    with pytest.raises(MalformedInputError, match=r"a.txt, line 3, byte 11: invalid UTF-8"):
        prepare(config, tokenizer, cache_dir=tmp_path / "cache")


def test_nested_text_keys_are_followed(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"record": {"body": "deep"}}\n')
    source = SourceConfig(name="t", kind="jsonl", paths=(str(path),), text_key="record.body")
    config = DataConfig(sources=(source,), validation_fraction=0.0)
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    assert _documents(folder, tokenizer)[0] == ["deep"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_document(tmp_path, tokenizer, suffix):
    content = codecs.BOM_UTF8 + b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    (folder,) = prepare(_config(tmp_path / f"a.{suffix}"), tokenizer, cache_dir=tmp_path / "cache")
    assert _documents(folder, tokenizer)[0] == ["a", "b"]
    (file,) = list_files(source := _config(tmp_path / f"a.{suffix}").sources[0])
    first, second = read_documents(file, source, FileReader(file.path))
    for document in (first, second):
        rest = read_documents(file, source, FileReader(file.path), document.line, first_byte=document.byte)
        assert next(rest) == document


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"text")
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8 + b"te\xff")
    source = SourceConfig(name="t", paths=(str(tmp_path),))
    config = DataConfig(sources=(source,), validation_fraction=0.0, on_error="quarantine", max_bad_fraction=1.0)
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    assert _documents(folder, tokenizer)[0] == ["text"]
    assert json.loads((folder / "quarantine.jsonl").read_text())["byte"] == 5


def test_a_byte_order_mark_is_no_part_of_the_first_line_that_names_an_image(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"image": "a.png"}\n{}\n')
    assert list(read_json_lines(tmp_path / "a.jsonl")) == [(1, 0, {"image": "a.png"}), (2, 22, {})]


def test_text_that_cannot_be_read_is_named_before_a_tokenizer_is_trained_on_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "some text"}\n')
    config = _config(tmp_path / "a.jsonl", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(
        MalformedInputError, match=r"a.jsonl, line 1, byte 0: no key 'text'.*No document of data.sources"
    ):
        build_tokenizer(TokenizerConfig(), config)


def test_a_malformed_document_of_a_stream_says_what_a_run_that_has_begun_needs(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("bad\n")
    config = _config(tmp_path / "a.jsonl")
    config = replace(config, sources=(replace(config.sources[0], stream=True, stream_window=1),))
    train, _ = build_datasets(config, tokenizer, seq_len=4, seed=0, cache_dir=tmp_path / "cache")
    with pytest.raises(MalformedInputError, match=r'"quarantine"; a run that has begun also needs .*allow_data_change'):
        train.require(1)
