import errno
import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from titan_train.config import DataConfig, SourceConfig, TokenizerConfig
from titan_train.data import DataLoader, build_datasets, build_tokenizer, open_datasets, prepare, stream_windows
from titan_train.data.shards.manifest import read_manifest
from titan_train.data.sources.document import is_held_out
from titan_train.data.sources.documents import list_files
from titan_train.data.sources.texts import training_texts
from titan_train.tokenizers import ByteTokenizer

# A tokenizer that dies, with no chance to clean up, at its 40th document.
KILLED = """
import os, sys
from titan_train.config import DataConfig, SourceConfig
from titan_train.data import prepare
from titan_train.tokenizers import ByteTokenizer

class Dying(ByteTokenizer):
    def encode(self, text):
        if " 1-40 " in text or "0-40 " in text:
            os._exit(9)
        return super().encode(text)

source = SourceConfig(name="web", kind="jsonl", paths=(sys.argv[1],))
config = DataConfig(sources=(source,), validation_fraction=0.2, shard_tokens=1500, num_threads=1)
prepare(config, Dying(), cache_dir=sys.argv[2])
"""


def _config(path, **options):
    source = SourceConfig(name="web", kind="jsonl", paths=(str(path),))
    return DataConfig(
        sources=(source,), **({"validation_fraction": 0.2, "shard_tokens": 1500, "num_threads": 1} | options)
    )


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tok", ".idx")}


def test_killed_preparation_leaves_no_manifest_and_resumes_to_the_same_bytes(
    tmp_path, write_jsonl, tokenizer, monkeypatch
):
    # batches of one document, so that shards are cut before the kill and not all in one go
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(3):
        write_jsonl(corpus / f"{number}.jsonl", 60, seed=number)
    small_batches = "import titan_train.data.sources.encoding as e; e._BATCH_BYTES = 1\n"
    monkeypatch.setattr("titan_train.data.sources.encoding._BATCH_BYTES", 1)
    killed = subprocess.run(
        [sys.executable, "-c", small_batches + KILLED, str(corpus), str(tmp_path / "killed")], check=False
    )
    assert killed.returncode == 9
    (folder,) = (tmp_path / "killed").iterdir()
    assert not (folder / "manifest.json").exists()
    noted = json.loads((folder / "progress.json").read_text())
    assert noted["next"][1] > 1
    assert len(noted["shards"]["train"]) > 0

    read = []
    monkeypatch.setattr(ByteTokenizer, "encode", _noting(ByteTokenizer.encode, read))
    (resumed,) = prepare(_config(corpus), tokenizer, cache_dir=tmp_path / "killed")
    first_read = len(read)
    (straight,) = prepare(_config(corpus), tokenizer, cache_dir=tmp_path / "straight")
    assert resumed == folder
    assert first_read < 180 == len(read) - first_read, "finished shards must not be tokenized again"
    assert _files(resumed) == _files(straight)
    assert len(_files(resumed)) > 8
    assert read_manifest(resumed) == read_manifest(straight)
    assert not (resumed / "progress.json").exists()


def _noting(encode, read):
    def noting(self, text):
        read.append(text)
        return encode(self, text)

    return noting


@pytest.mark.parametrize("noted", [b"", b'{"shards": {}', b"[]", b'{"next": ["a", 1]}', b"\xff\xfe"])
def test_a_damaged_note_of_the_progress_begins_anew(noted, tmp_path, write_jsonl, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", 60)
    config = _config(tmp_path / "a.jsonl")
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    whole = {file.name: file.read_bytes() for file in folder.glob("*.tok")}
    (folder / "manifest.json").unlink()
    (folder / "progress.json").write_bytes(noted)
    prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    assert {file.name: file.read_bytes() for file in folder.glob("*.tok")} == whole


def test_prepared_tokens_are_those_of_the_documents_and_are_made_once(tmp_path, write_jsonl, tokenizer):
    texts = write_jsonl(tmp_path / "a.jsonl", 100)
    config = _config(tmp_path / "a.jsonl")
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    manifest = read_manifest(folder)
    train = [text for text in texts if not is_held_out(text.encode(), 0.2)]
    assert manifest.num_documents("train") == len(train)
    assert manifest.num_documents("validation") == len(texts) - len(train) > 5
    assert manifest.text_bytes["train"] == sum(len(text.encode()) for text in train)
    tokens = np.concatenate([np.fromfile(folder / f"{s.name}.tok", "<u2", offset=64) for s in manifest.splits["train"]])
    expected = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eos_id) for text in train])
    assert np.array_equal(tokens, expected)
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare(config, tokenizer, cache_dir=tmp_path / "cache") == [folder]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times


@pytest.mark.parametrize("num_threads", [2, 3])
def test_number_of_threads_does_not_change_a_byte(tmp_path, write_jsonl, tokenizer, num_threads, monkeypatch):
    monkeypatch.setattr("titan_train.data.sources.encoding._BATCH_BYTES", 500)
    write_jsonl(tmp_path / "a.jsonl", 100)
    (one,) = prepare(_config(tmp_path / "a.jsonl"), tokenizer, cache_dir=tmp_path / "one")
    config = _config(tmp_path / "a.jsonl", num_threads=num_threads)
    (many,) = prepare(config, tokenizer, cache_dir=tmp_path / "many")
    assert _files(one) == _files(many)


def test_begin_token_is_added_when_asked(tmp_path, write_jsonl, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", 40)
    (folder,) = prepare(_config(tmp_path / "a.jsonl", add_bos=True), tokenizer, cache_dir=tmp_path / "cache")
    tokens = np.fromfile(folder / "train-00000.tok", "<u2", offset=64)
    assert tokens[0] == tokenizer.bos_id
    assert np.all(tokens[1:][tokens[:-1] == tokenizer.eos_id] == tokenizer.bos_id)


def test_copies_of_a_document_land_on_one_side_and_the_share_is_right():
    texts = [f"text {i}".encode() for i in range(20_000)]
    held_out = [is_held_out(text, 0.05) for text in texts]
    assert held_out == [is_held_out(text, 0.05) for text in texts]
    # standard deviation 0.0015
    assert abs(np.mean(held_out) - 0.05) < 0.008
    assert not any(is_held_out(text, 0.0) for text in texts)
    assert all(is_held_out(text, 0.2) for text, out in zip(texts, held_out, strict=True) if out)


def test_changed_text_and_changed_options_are_prepared_anew(tmp_path, write_jsonl, tokenizer):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, 30)
    folders = {*prepare(_config(path), tokenizer, cache_dir=tmp_path / "cache")}
    folders |= {*prepare(_config(path, add_bos=True), tokenizer, cache_dir=tmp_path / "cache")}
    write_jsonl(path, 31, seed=1)
    folders |= {*prepare(_config(path), tokenizer, cache_dir=tmp_path / "cache")}
    assert len(folders) == 3
    assert len({read_manifest(folder).fingerprint for folder in folders}) == 3


def test_fingerprint_is_of_the_content_not_of_the_place_or_time(tmp_path, write_jsonl, tokenizer):
    prints = []
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        path = tmp_path / place / "a.jsonl"
        write_jsonl(path, 30)
        os.utime(path, (1, 1 + len(prints)))
        (folder,) = prepare(_config(path), tokenizer, cache_dir=tmp_path / place / "cache")
        prints.append(read_manifest(folder).fingerprint)
    assert prints[0] == prints[1]


def test_prepared_folders_serve_as_sources_of_tokens(tmp_path, write_jsonl, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", 100)
    config = _config(tmp_path / "a.jsonl")
    train, validation = build_datasets(config, tokenizer, seq_len=32, seed=1, cache_dir=tmp_path / "cache")
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    tokens = DataConfig(sources=(SourceConfig(name="web", kind="tokens", paths=(str(folder),)),))
    train_2, validation_2 = open_datasets(tokens, tokenizer, seq_len=32, seed=1, cache_dir=tmp_path / "none")
    assert train_2.fingerprint == train.fingerprint
    assert np.array_equal(train.tokens(np.arange(50)), train_2.tokens(np.arange(50)))
    assert validation is not None
    assert validation_2 is not None
    assert validation.fingerprint == validation_2.fingerprint


def test_runs_of_any_seed_are_validated_on_the_same_windows(tmp_path, write_jsonl, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", 100)
    config = _config(tmp_path / "a.jsonl")
    (train, held_out), (other, same) = (
        build_datasets(config, tokenizer, seq_len=32, seed=seed, cache_dir=tmp_path / "cache") for seed in (1, 2)
    )
    windows = np.arange(8)
    assert not np.array_equal(train.tokens(windows), other.tokens(windows))
    assert np.array_equal(held_out.tokens(windows), same.tokens(windows))


def test_unprepared_and_unfinished_sources_are_refused_on_opening(tmp_path, write_jsonl, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", 100)
    config = _config(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"has no manifest.json.*titan-train data prepare"):
        open_datasets(config, tokenizer, seq_len=32, seed=1, cache_dir=tmp_path / "cache")
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"][0]["tokens_sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="was edited"):
        open_datasets(config, tokenizer, seq_len=32, seed=1, cache_dir=tmp_path / "cache")


def test_tokens_of_another_tokenizer_are_refused(tmp_path, write_jsonl, tokenizer):
    class Other(ByteTokenizer):
        fingerprint = "ff" * 32

    write_jsonl(tmp_path / "a.jsonl", 50)
    (folder,) = prepare(_config(tmp_path / "a.jsonl"), tokenizer, cache_dir=tmp_path / "cache")
    tokens = DataConfig(sources=(SourceConfig(name="web", kind="tokens", paths=(str(folder),)),))
    with pytest.raises(ValueError, match=r"was prepared with tokenizer .* but the run uses ffffffffffffffff"):
        open_datasets(tokens, Other(), seq_len=8, seed=0)


def test_validation_sources_are_read_whole_and_too_little_held_out_text_is_said(
    tmp_path, write_jsonl, tokenizer, caplog
):
    write_jsonl(tmp_path / "a.jsonl", 100)
    write_jsonl(tmp_path / "v.jsonl", 20, seed=9)
    extra = SourceConfig(name="news", kind="jsonl", paths=(str(tmp_path / "v.jsonl"),))
    config = _config(tmp_path / "a.jsonl", validation_sources=(extra,), validation_fraction=0.03)
    _, validation = build_datasets(config, tokenizer, seq_len=1000, seed=1, cache_dir=tmp_path / "cache")
    assert validation is not None
    assert validation.source_names == ("news",)
    assert "held-out part of source 'web'" in caplog.text
    assert validation.num_tokens == 20 + sum(
        len(json.loads(line)["text"].encode()) for line in (tmp_path / "v.jsonl").read_text().splitlines()
    )
    nothing = _config(tmp_path / "a.jsonl", validation_fraction=0.0)
    assert build_datasets(nothing, tokenizer, seq_len=1000, seed=1, cache_dir=tmp_path / "cache")[1] is None


def test_a_validation_source_that_is_too_short_is_said(tmp_path, write_jsonl, tokenizer, caplog):
    write_jsonl(tmp_path / "a.jsonl", 100)
    (tmp_path / "v.txt").write_text("short")
    extra = SourceConfig(name="news", kind="text", paths=(str(tmp_path / "v.txt"),))
    config = _config(tmp_path / "a.jsonl", validation_sources=(extra,), validation_fraction=0.0)
    assert build_datasets(config, tokenizer, seq_len=64, seed=1, cache_dir=tmp_path / "cache")[1] is None
    assert "source 'news': 6 tokens (< 65 per sample); skipping it. Name more text." in caplog.text


def test_missing_paths_are_refused_with_the_nearest_that_exist(tmp_path, write_jsonl, tokenizer):
    write_jsonl(tmp_path / "corpus.jsonl", 5)
    with pytest.raises(ValueError, match=r"'web'.*corpsu.jsonl' does not exist. Did you mean '.*corpus.jsonl'"):
        prepare(_config(tmp_path / "corpsu.jsonl"), tokenizer, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"The folder .* does not exist either"):
        prepare(_config(tmp_path / "no" / "a.jsonl"), tokenizer, cache_dir=tmp_path / "cache")


def test_folders_globs_and_exclusions_choose_files(tmp_path, tokenizer):
    for name in ("b.txt", "a.md", "sub/c.txt", "sub/d.bin"):
        (tmp_path / "t" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "t" / name).write_text(name)

    def texts(**options):
        source = SourceConfig(name="t", **options)
        config = DataConfig(sources=(source,), validation_fraction=0.0)
        (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
        return [file["path"].rpartition("t/")[2] for file in read_manifest(folder).files]

    root = str(tmp_path / "t")
    assert texts(paths=(root,)) == ["a.md", "b.txt", "sub/c.txt"]
    assert texts(paths=(root,), exclude=("*.md",)) == ["b.txt", "sub/c.txt"]
    assert texts(paths=(root + "/**/*.txt",)) == ["b.txt", "sub/c.txt"]
    with pytest.raises(ValueError, match="leaves none of 3 files"):
        texts(paths=(root,), exclude=("*",))


def test_files_of_a_folder_that_are_no_text_by_their_names_are_told_once(tmp_path, caplog):
    for name in ("a.md", "b.tex", "sub/c.tex.gz", "d.bib", "Makefile", ".git/e.tex", "download.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    source = SourceConfig(name="papers", kind="text", paths=[str(tmp_path)], exclude=["*.bib"])  # as a program may
    for _ in range(2):
        assert [file.name for file in list_files(source)] == ["a.md"]
    (said,) = caplog.messages
    assert "3 files of" in said
    assert ": .tex 2, no suffix 1. To read" in said
    caplog.clear()
    (found,) = list_files(SourceConfig(name="papers", kind="text", paths=(f"{tmp_path}/*.tex",)))
    assert found.path.name == "b.tex"
    assert not caplog.messages


def test_linked_folders_and_suffixes_in_capitals_are_read_and_folders_that_cannot_be_read_are_named(
    tmp_path, tokenizer, monkeypatch
):
    for name in ("t/b.txt", "t/.hidden/c.txt", "elsewhere/sub/d.TXT", "elsewhere/e.Md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "t/f.txt.GZ").write_bytes(gzip.compress(b"f"))
    (tmp_path / "t/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "t/twice").symlink_to(tmp_path / "elsewhere/sub")
    (tmp_path / "t/.again").symlink_to(tmp_path / "t/.hidden")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path)

    def names(**options):
        return [file.name for file in list_files(SourceConfig(name="t", paths=(str(tmp_path / "t"),), **options))]

    assert names() == [".hidden/c.txt", "b.txt", "f.txt.GZ", "linked/e.Md", "twice/d.TXT"]
    (folder,) = prepare(
        DataConfig(sources=(SourceConfig(name="t", paths=(str(tmp_path / "t"),)),)), tokenizer, cache_dir=tmp_path
    )
    assert sum(read_manifest(folder).text_bytes.values()) == 1 + sum(
        len(name) for name in ("t/b.txt", "t/.hidden/c.txt", "elsewhere/sub/d.TXT", "elsewhere/e.Md")
    )

    def scandir(path, plain=os.scandir):
        if str(path).endswith("twice"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=r"twice' cannot be read \(Permission denied\)"):
        names()
    assert names(exclude=("twice/*",)) == [".hidden/c.txt", "b.txt", "f.txt.GZ", "linked/e.Md"]


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are any bytes on Linux only")
def test_a_file_whose_name_is_not_utf8_is_read(tmp_path, tokenizer):
    (tmp_path / "t").mkdir()
    for name in (b"ok-\xc3\xa9.txt", b"latin-\xe9.txt"):
        (tmp_path / "t" / os.fsdecode(name)).write_text("some text")
    source = SourceConfig(name="t", paths=(str(tmp_path / "t"),))
    config = DataConfig(sources=(source,), validation_fraction=0.0)
    (folder,) = prepare(config, tokenizer, cache_dir=tmp_path / "cache")
    assert [file["path"] for file in read_manifest(folder).files] == ["latin-\\xe9.txt", "ok-é.txt"]
    stream = DataConfig(sources=(replace(source, stream=True, stream_window=1),), validation_fraction=0.0)
    train, _ = build_datasets(stream, tokenizer, seq_len=4, seed=0, cache_dir=tmp_path / "cache")
    train.require(3)
    assert train.stream_states(3)["t"][1]["file"].isprintable()
    train.close()


def test_streamed_windows_are_the_prepared_tokens_in_file_order(tmp_path, write_jsonl, tokenizer):
    texts = write_jsonl(tmp_path / "a.jsonl", 50)
    source = SourceConfig(name="web", kind="jsonl", paths=(str(tmp_path / "a.jsonl"),))
    windows = list(stream_windows(source, DataConfig(), tokenizer, seq_len=32))
    run = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eos_id) for text in texts])
    assert len(windows) == (run.size - 1) // 32
    for number, window in enumerate(windows):
        assert np.array_equal(window, run[number * 32 : number * 32 + 33])


def test_no_more_text_is_given_than_asked_for(tmp_path):
    texts = [f"{number} é " * 100 for number in range(40)]
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode())
    )
    sources = (SourceConfig(name="a", kind="jsonl", paths=(str(tmp_path / "a.jsonl.gz"),)),)
    config = DataConfig(sources=sources, validation_fraction=0.0)
    total = sum(len(text.encode()) for text in texts)
    for most in (None, total + 1, total):
        assert [*training_texts(sources, config, max_bytes=most)] == texts
    given = [*training_texts(sources, config, max_bytes=1003)]  # more than by its size the file has
    assert given == [*texts[:2], texts[2][:2]]  # half of a letter is left out


def test_standard_library_trains_a_tokenizer_and_gives_batches(tmp_path):
    """The quickstart's data: real text that every machine has."""
    source = SourceConfig(name="stdlib", kind="stdlib", exclude=("[c-z]*",))
    data = DataConfig(sources=(source,), validation_fraction=0.1, cache_dir=str(tmp_path))
    config = TokenizerConfig(vocab_size=512, train_max_bytes=200_000)
    tokenizer = build_tokenizer(config, data)
    assert build_tokenizer(config, data).fingerprint == tokenizer.fingerprint
    train, validation = build_datasets(data, tokenizer, seq_len=64, seed=0)
    assert train.num_tokens > 100_000
    assert validation is not None
    with DataLoader(train, global_batch=4, microbatch=2) as loader:
        batch = next(loader)
    assert 0 <= int(batch.tokens.min()) < int(batch.tokens.max()) < tokenizer.vocab_size


def test_two_preparations_at_once_do_the_work_once(tmp_path, write_jsonl, tokenizer, monkeypatch):
    texts = write_jsonl(tmp_path / "a.jsonl", 100)
    read = []
    monkeypatch.setattr(ByteTokenizer, "encode", _noting(ByteTokenizer.encode, read))
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(prepare, _config(tmp_path / "a.jsonl"), tokenizer, cache_dir=tmp_path / "cache")
            for _ in range(3)
        ]
        folders = {folder for run in runs for folder in run.result()}
    assert len(folders) == 1
    assert sorted(read) == sorted(texts)
