"""The text of sources, without tokens: what a tokenizer is trained on, and judged on."""

from collections.abc import Iterator, Sequence

from titan_train.config import DataConfig, SourceConfig
from titan_train.config.data import TEXT_KINDS
from titan_train.data.progress import ProgressCallback, ProgressReporter
from titan_train.data.sources.document import CorpusFile, held_out_fraction, is_held_out
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.files import FileReader
from titan_train.data.sources.malformed import BadDocument, MalformedInputError

# What text shrinks to under gzip and zstandard, about; only used to spread a sample over the files.
_COMPRESSION = 5


def training_texts(
    sources: Sequence[SourceConfig],
    config: DataConfig,
    *,
    max_bytes: int | None = None,
    progress: ProgressCallback | None = None,
) -> Iterator[str]:
    """Documents that are not held out. Malformed ones are passed over if there are others: `prepare` reports them.

    Args:
        sources: Sources to read; those of tokens have no text and are passed over.
        config: Says which documents are held out.
        max_bytes: Most text to give, in bytes of UTF-8, spread over the files by their size; the document that passes it is
            cut. None gives all.
        progress: Called with the progress.

    Raises:
        ValueError: Every document is malformed; it names the first.
    """
    return _texts(sources, config, held_out=False, max_bytes=max_bytes, progress=progress)


def held_out_texts(
    sources: Sequence[SourceConfig], config: DataConfig, *, max_bytes: int | None = None
) -> Iterator[str]:
    """Documents that are held out; arguments as for `training_texts`."""
    return _texts(sources, config, held_out=True, max_bytes=max_bytes, progress=None)


def _texts(
    sources: Sequence[SourceConfig],
    config: DataConfig,
    *,
    held_out: bool,
    max_bytes: int | None,
    progress: ProgressCallback | None,
) -> Iterator[str]:
    files = [(source, file) for source in sources if source.kind in TEXT_KINDS for file in list_files(source)]
    total = sum(_text_bytes(file) for _, file in files)
    share = 1.0 if max_bytes is None or not total else min(1.0, max_bytes / total)
    report = ProgressReporter("read text for the tokenizer", [file.path.stat().st_size for _, file in files], progress)
    credit = 0.0
    left = max_bytes
    bad: BadDocument | None = None
    readable = False
    for number, (source, file) in enumerate(files, start=1):
        # Each file adds its share to the credit and documents draw on it: large files give their beginning, and of
        # many small ones every n-th is taken whole.
        credit += share * _text_bytes(file)
        fraction = held_out_fraction(source, config)
        if share == 1.0 or credit > 0:
            for document in read_documents(file, source, FileReader(file.path)):
                if isinstance(document, BadDocument):
                    bad = bad or document
                    continue
                readable = True
                if is_held_out(document.utf8, fraction) == held_out:
                    credit -= len(document.utf8)
                    if left is not None and len(document.utf8) >= left:
                        yield document.utf8[:left].decode("utf-8", "ignore")
                        report(len(files), finished=True)
                        return
                    left = None if left is None else left - len(document.utf8)
                    yield document.text
                if share < 1.0 and credit <= 0:
                    break
        report(number, finished=number == len(files))
    if bad is not None and not readable:
        raise MalformedInputError(
            f"{bad}. No document of data.sources can be read: repair the files, or correct the sources.", (bad,)
        )


def _text_bytes(file: CorpusFile) -> int:
    size = file.path.stat().st_size
    return size * _COMPRESSION if file.path.suffix.lower() in (".gz", ".zst") else size
