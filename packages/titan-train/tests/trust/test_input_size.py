"""Small files that stand for large content, and patterns that could take for ever, end with a word."""

import gzip
import re
import subprocess
import sys
import time

import pytest
import zstandard
from titan_train.cli import main
from titan_train.config import ConfigError, load_config
from titan_train.config.patterns import check_patterns
from titan_train.observe.timing.traces import read_traces, trace_file

READ = """
import resource, sys
from pathlib import Path
from titan_train.config import SourceConfig
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.files import FileReader
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = SourceConfig(name="t", kind=sys.argv[1], paths=(sys.argv[2],))
(file,) = list_files(source)
count = 0
for document in read_documents(file, source, FileReader(file.path), 1):
    count += 1
    if count == 40:
        break
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def mib_to_read(kind, path):
    """How many documents there were, of at most 40, and the memory that reading took."""
    done = subprocess.run(
        [sys.executable, "-c", READ, kind, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    count, mib = map(int, done.stdout.split())
    return count, mib


@pytest.mark.parametrize("suffix", ["zst", "gz"])
@pytest.mark.parametrize("content", ["newlines", "one line"])
def test_a_small_compressed_file_is_read_in_little_memory(suffix, content, tmp_path):
    path = tmp_path / f"a.jsonl.{suffix}"
    part = (b"\n" if content == "newlines" else b"x") * 2**24
    parts = [part] * 32  # 512 MiB
    if suffix == "zst":
        compressor = zstandard.ZstdCompressor(level=1).compressobj()
        path.write_bytes(b"".join([compressor.compress(p) for p in parts] + [compressor.flush()]))
    else:
        with gzip.open(path, "wb", compresslevel=9) as file:
            for p in parts[:4]:
                file.write(p)
    assert path.stat().st_size < 100_000
    count, mib = mib_to_read("jsonl", path)
    assert count == (40 if content == "newlines" else 1)
    assert mib < 120  # max_document_bytes is 64 MiB


def test_a_small_file_with_a_window_of_two_gib_is_refused(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compressor.compress(b'{"text": "a"}\n') + compressor.flush())
    assert mib_to_read("jsonl", path)[1] < 120
    (tmp_path / "c.toml").write_text(
        f'[tokenizer]\nkind = "bytes"\n[[data.sources]]\nname = "a"\nkind = "jsonl"\npaths = ["{path}"]\n'
    )
    assert main(["data", "prepare", str(tmp_path / "c.toml"), "--data.cache-dir", str(tmp_path / "cache")]) == 2


def test_a_row_that_a_table_stores_once_for_many_is_not_held_many_times(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    once = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), pa.array(["x" * 8_000_000]))
    parquet.write_table(pa.table({"text": once}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    count, mib = mib_to_read("parquet", tmp_path / "a.parquet")
    assert count == 40
    assert mib < 1500  # 32 rows, and copies of one; 8 GB before


def test_a_trace_that_decompresses_to_more_than_a_trace_can_is_refused(tmp_path):
    trace_file(tmp_path, 0).parent.mkdir(parents=True)
    with gzip.open(trace_file(tmp_path, 0), "wb") as file:
        for _ in range(8):
            file.write(b" " * 2**24)
    with pytest.raises(ValueError, match="decompresses to more than"):
        read_traces(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# " + "x" * 40_000_000, "larger than the 1,000,000 bytes"),
        (".".join(["a"] * 10_000) + " = 1\n", "a key of more than 100 parts"),
        ("[" + " . ".join(['"a"'] * 10_000) + "]\n", "a key of more than 100 parts"),
        ("".join(f"k{i} = 1\n" for i in range(50_000)), "and 980 more"),
        ('[model]\nname = "' + "x" * 900_000 + '"\n', "1 problem"),
    ],
)
def test_a_toml_file_out_of_all_proportion_is_refused_in_a_few_words(text, words, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(text)
    before = time.monotonic()
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(str(file))
    assert len(str(caught.value)) < 30_000
    assert time.monotonic() - before < 20  # it took minutes


@pytest.mark.parametrize(
    "setting", ["optimizer.lr_scales", "optimizer.weight_decays", "optimizer.frozen_steps", "train.freeze"]
)
@pytest.mark.parametrize("pattern", [r"(\\w+)+!", "(.|..)*!", "a?" * 40, ".*.*.*.*", "x" * 300])
def test_a_pattern_that_may_not_end_is_refused(setting, pattern, tmp_path):
    section, key = setting.split(".")
    value = f'["{pattern}"]' if key == "freeze" else f'{{"{pattern}" = 1}}'
    (tmp_path / "c.toml").write_text(f"[{section}]\n{key} = {value}\n")
    with pytest.raises(ConfigError, match=f"{setting} has (the|a) pattern"):
        load_config(str(tmp_path / "c.toml"))


@pytest.mark.parametrize(
    "pattern",
    ["tok_embeddings", "^(?!vision.projector)", r"layers\.(0|1|2|13)\..*norm.*weight", r"layers\.[0-9]{1,3}\.", "(wq|wk|wv)?$",
     r"^(?:[^.]+\.){2}w"],
)  # fmt: skip
def test_patterns_that_name_parameters_are_taken(pattern):
    check_patterns("train.freeze", [pattern])
    assert re.compile(pattern)
