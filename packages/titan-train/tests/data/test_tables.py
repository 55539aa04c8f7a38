"""Parquet, Arrow and saved data sets give the documents of the same JSON lines; what is damaged is named by its row."""

import errno
import hashlib
import json

import numpy as np
import pytest
from titan_train.config import DataConfig, SourceConfig
from titan_train.data import MalformedInputError, build_datasets, prepare
from titan_train.data.shards.manifest import read_manifest
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.files import FileReader

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")

TEXTS = [f"row {i} é\n" * (1 + i % 7) for i in range(3000)]


def written(folder, form):
    """A folder of two files with the texts."""
    import pyarrow.feather as feather
    import pyarrow.parquet as parquet

    folder.mkdir()
    for number, texts in enumerate((TEXTS[:2500], TEXTS[2500:])):
        table = pa.table({"id": list(range(len(texts))), "text": texts})
        name = folder / f"part-{number}"
        if form == "parquet":
            parquet.write_table(table, f"{name}.parquet", row_group_size=700, compression="zstd")
        elif form == "feather":
            feather.write_feather(table, f"{name}.arrow")
        else:
            with pa.OSFile(f"{name}.arrow", "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=900)
    return SourceConfig(name="t", kind="parquet" if form == "parquet" else "arrow", paths=(str(folder),))


def documents(source, first=1):
    return [d for file in list_files(source) for d in read_documents(file, source, FileReader(file.path), first)]


@pytest.mark.parametrize("form", ["parquet", "feather", "stream"])
def test_rows_come_in_order_and_from_any_row_on(tmp_path, form):
    source = written(tmp_path / "t", form)
    assert [d.text for d in documents(source)] == TEXTS
    for first in (2, 701, 1025, 2500):
        file = list_files(source)[0]
        rest = list(read_documents(file, source, FileReader(file.path), first))
        assert [d.text for d in rest] == TEXTS[first - 1 : 2500]
        assert [d.line for d in rest] == list(range(first, 2501))


@pytest.mark.parametrize("form", ["parquet", "stream"])
def test_tokens_equal_those_of_json_lines(tmp_path, tokenizer, form):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    lines = SourceConfig(name="t", kind="jsonl", paths=(str(tmp_path / "a.jsonl"),))
    both = [
        build_datasets(
            DataConfig(sources=(source,), validation_fraction=0.1),
            tokenizer,
            seq_len=64,
            seed=3,
            cache_dir=tmp_path / "cache",
        )[0]
        for source in (lines, written(tmp_path / "t", form))
    ]
    assert both[0].fingerprint == both[1].fingerprint
    assert np.array_equal(both[0].tokens(np.arange(50)), both[1].tokens(np.arange(50)))


def test_a_table_is_read_a_second_time_for_its_hash_alone_where_it_is_prepared(tmp_path, tokenizer):
    source = written(tmp_path / "t", "parquet")
    (file, _) = list_files(source)
    reader = FileReader(file.path)
    assert len(list(read_documents(file, source, reader))) == 2500
    assert reader.bytes_read == 0
    (folder,) = prepare(DataConfig(sources=(source,)), tokenizer, cache_dir=tmp_path / "cache")
    noted, content = read_manifest(folder).files[0], file.path.read_bytes()
    assert (noted["size"], noted["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_saved_data_set_is_read_in_the_order_of_its_state(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    made = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    made.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    source = SourceConfig(name="t", kind="arrow", paths=(str(tmp_path / "saved"),))
    assert [d.text for d in documents(source)] == TEXTS
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match=r"holds the splits test, train.*both/test"):
        list_files(SourceConfig(name="t", kind="arrow", paths=(str(tmp_path / "both"),)))


def test_a_state_that_names_files_elsewhere_is_refused(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x.arrow"}]}))
    with pytest.raises(ValueError, match="which is not in"):
        list_files(SourceConfig(name="t", kind="arrow", paths=(str(tmp_path),)))


def test_chats_in_a_table_leave_out_the_fields_a_row_does_not_have(tmp_path):
    import pyarrow.parquet as parquet
    from titan_train.data.sources.chat import Conversations
    from titan_train.tokenizers import ChatTemplate

    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "B"}]},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = SourceConfig(name="t", kind="parquet", paths=(str(tmp_path / "a.parquet"),), messages_key="messages")
    template = ChatTemplate("{% for m in messages %}{{ m.name is defined }}{{ m.content }} {% endfor %}", {})
    (file,) = list_files(source)
    found = list(read_documents(file, source, FileReader(file.path), 1, Conversations(template)))
    assert [d.text for d in found] == ["Falsea Trueb ", "Falsec Falsed "]


def test_calls_in_a_table_have_the_arguments_of_their_own_row_alone(tmp_path):
    import pyarrow.parquet as parquet
    from titan_train.data.sources.chat import Conversations
    from titan_train.tokenizers import ChatTemplate

    def row(**arguments):
        call = [{"name": "f", "arguments": arguments}]
        return {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": call}]
        }

    parquet.write_table(pa.Table.from_pylist([row(x=1), row(y=2)]), tmp_path / "a.parquet")
    source = SourceConfig(name="t", kind="parquet", paths=(str(tmp_path / "a.parquet"),), messages_key="messages")
    text = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    (file,) = list_files(source)
    found = list(read_documents(file, source, FileReader(file.path), 1, Conversations(ChatTemplate(text, {}))))
    calls = ['a[{"name": "f", "arguments": {"x": 1}}]', 'a[{"name": "f", "arguments": {"y": 2}}]']
    assert [document.text for document in found] == calls


def test_bad_rows_are_named(tmp_path, tokenizer):
    import pyarrow.parquet as parquet

    good = [b"fine"] * 5
    raw = pa.array([*good, b"\xff\xfe", None, b""], type=pa.binary())
    bad = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers(), raw.null_count)
    parquet.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    source = SourceConfig(name="t", kind="parquet", paths=(str(tmp_path / "a.parquet"),))
    kinds = [getattr(d, "kind", "good") for d in documents(source)]
    assert kinds == ["good"] * 5 + ["invalid_utf8", "missing_text", "empty"]
    with pytest.raises(MalformedInputError, match=r"a\.parquet, row 6: invalid UTF-8"):
        build_datasets(DataConfig(sources=(source,)), tokenizer, seq_len=4, seed=0, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("form", ["parquet", "feather", "stream"])
@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_damaged_table_is_named_and_never_ends_quietly(tmp_path, form, damage):
    source = written(tmp_path / "t", form)
    path = list_files(source)[0].path
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"not a table\n" * 99}[damage])
    found = documents(source)
    (bad,) = [d for d in found if getattr(d, "kind", "") == "truncated"]
    assert str(path) in str(bad)
    assert bad.line == 1 + len(found) - 1 - 500


def test_a_table_that_the_disk_cannot_give_is_no_malformed_document(tmp_path, monkeypatch):
    import pyarrow.parquet as parquet

    source = written(tmp_path / "t", "parquet")

    def failing(*_args, **_options):
        raise OSError(errno.EIO, "Input/output error")
        yield

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", failing)
    with pytest.raises(OSError, match="Input/output error"):
        documents(source)


def test_a_missing_column_is_refused_with_those_there_are(tmp_path):
    source = written(tmp_path / "t", "parquet")
    other = SourceConfig(name="t", kind="parquet", paths=source.paths, text_key="body.text")
    with pytest.raises(ValueError, match=r"no column 'body'; it has id, text"):
        documents(other)
