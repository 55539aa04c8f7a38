"""Tables: Parquet and Arrow files, and folders that the `datasets` library saved, read by pyarrow (extra ``data``).

A file is read in batches of rows and only the columns that are asked for, so memory does not grow with the file. The batches are
small, because a few kilobytes of Parquet can stand for any number of copies of a long text. The `datasets` library is not
needed: its folder is Arrow files, named in order by ``state.json``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from titan_train.config import SourceConfig
from titan_train.config.data import AUTO_MESSAGES
from titan_train.data.sources.chat import Conversations
from titan_train.data.sources.document import CorpusFile, Document, printable
from titan_train.data.sources.malformed import BadDocument
from titan_train.data.sources.records import as_document
from titan_train.files import read_text
from titan_train.lazy import require
from titan_train.terminal import first_line

_BATCH_ROWS = 32
_EXCERPT_CHARS = 200


def read_rows(
    file: CorpusFile, source: SourceConfig, first_row: int, chats: Conversations
) -> Iterator[Document | BadDocument]:
    """Documents of one table, malformed ones among them, from row ``first_row`` on (counted from 1).

    Raises:
        ValueError: If pyarrow is missing, or the table has no such column.
        OSError: If the file cannot be read.
    """
    number = first_row - 1
    try:
        for batch in _batches(file.path, source, first_row - 1):
            for row in _rows(batch):
                number += 1
                if isinstance(row, UnicodeDecodeError):
                    yield BadDocument(str(file.path), number, -1, "invalid_utf8", f"invalid UTF-8 ({row.reason})", b"")
                    continue
                raw = repr(row)[:_EXCERPT_CHARS].encode(errors="backslashreplace")
                yield as_document(row, source, chats, file=file, number=number, offset=-1, raw=raw)
    except OSError as err:  # pyarrow's errors of pages have no number; ArrowInvalid is a ValueError and comes below
        if err.errno:  # the system's: the disk fails, or the file may not be read
            raise
        yield BadDocument(str(file.path), number + 1, -1, "truncated", f"damaged ({first_line(err)})", b"")
    except _DamagedTableError as err:
        yield BadDocument(str(file.path), number + 1, -1, "truncated", str(err), b"")


def saved_dataset_files(folder: Path) -> list[CorpusFile] | None:
    """Files of a folder that `datasets` saved, in the order of its rows; None if it is not such a folder.

    Raises:
        ValueError: If the folder holds several splits, or its list of files cannot be followed.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise ValueError(
            f"{folder} holds the splits {', '.join(splits) or '(none)'}. Name the folder of one, for example "
            f"{str(folder / (splits[0] if splits else 'train'))!r}."
        )
    state = folder / "state.json"
    if not state.is_file():
        return None
    try:
        names = [entry["filename"] for entry in json.loads(read_text(state))["_data_files"]]
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(f"{state} lists no data files ({err!r}). Save the data set again.") from err
    files: list[CorpusFile] = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{state} names the file {name!r}, which is not in {folder}. Copy the whole folder.")
        files.append(CorpusFile(folder / name, printable(name)))
    return files


class _DamagedTableError(Exception):
    """A table that pyarrow cannot read on."""


def _batches(path: Path, source: SourceConfig, skip: int) -> Iterator[Any]:
    """Record batches of the needed columns from row ``skip`` on (counted from 0)."""
    pa = require("pyarrow", extra="data", purpose=f'data.sources[{source.name!r}].kind="{source.kind}"')
    try:
        yield from _parquet(path, source, skip) if source.kind == "parquet" else _arrow(path, source, skip)
    except pa.ArrowException as err:
        raise _DamagedTableError(f"damaged or not a {source.kind} file ({first_line(err)})") from err


def _parquet(path: Path, source: SourceConfig, skip: int) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        columns = _columns(path, source, file.schema_arrow.names)
        groups = list(range(file.metadata.num_row_groups))
        while groups and skip >= file.metadata.row_group(groups[0]).num_rows:
            skip -= file.metadata.row_group(groups.pop(0)).num_rows
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns) if groups else ():
            dropped = min(skip, batch.num_rows)
            skip -= dropped
            yield batch.slice(dropped)


def _arrow(path: Path, source: SourceConfig, skip: int) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        whole = mapped.read(6) == b"ARROW1"  # the file form; `datasets` writes the stream form
        mapped.seek(0)
        opened: Any = pa.ipc.open_file(mapped) if whole else pa.ipc.open_stream(mapped)
        columns = _columns(path, source, opened.schema.names)
        batches = (opened.get_batch(i) for i in range(opened.num_record_batches)) if whole else opened
        for batch in batches:
            dropped = min(skip, batch.num_rows)
            skip -= dropped
            for start in range(dropped, batch.num_rows, _BATCH_ROWS):
                yield batch.select(columns).slice(start, _BATCH_ROWS)


def _columns(path: Path, source: SourceConfig, present: list[str]) -> list[str]:
    if source.messages_key == AUTO_MESSAGES:
        return present
    key = source.messages_key or source.text_key
    column = key if key in present else key.split(".")[0]
    if column not in present:
        name = "messages_key" if source.messages_key else "text_key"
        raise ValueError(
            f"{path} has no column {column!r}; it has {', '.join(present)}. Set data.sources[{source.name!r}].{name}."
        )
    return [column, *(["tools"] if source.messages_key and "tools" in present else [])]


def _rows(batch: Any) -> Iterator[Any]:
    """One row at a time: all of a batch may be a thousand copies of one long text."""
    for number in range(batch.num_rows):
        try:
            columns = zip(batch.schema.names, batch.columns, strict=True)
            yield {name: _present(column[number].as_py()) for name, column in columns}
        except UnicodeDecodeError as err:
            yield err


def _present(value: Any) -> Any:
    """A value without the fields that its row leaves out: a column's objects have those of all its rows, None where missing."""
    if isinstance(value, dict):
        return {key: _present(part) for key, part in cast("dict[Any, Any]", value).items() if part is not None}
    return [_present(part) for part in cast("list[Any]", value)] if isinstance(value, list) else value
