"""Where a block of a stream begins, and whether the files before it are still the ones that were read."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from titan_train.data.sources.document import CorpusFile

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class StreamCursor:
    """A place in a stream."""

    epoch: Count
    """How many times all files were read before."""
    file: str
    """Name of the file, as `CorpusFile.name`."""
    line: Count
    """Line or row of the document, from 1."""
    byte: Count
    """Where that line begins, in the decompressed file; 0 in a table."""
    skip: Count
    """Tokens of that document that were taken before."""
    before: str
    """Hash (hex) of the names and sizes of the files before this one."""

    def file_number(self, files: Sequence[CorpusFile], source: str) -> int:
        """Which of ``files`` it lies in.

        Raises:
            ValueError: If that file, or one before it, is not the one that was read.
        """
        numbers = [number for number, file in enumerate(files) if file.name == self.file]  # folders may share names
        if not numbers:
            raise ValueError(
                f"the stream of source {source!r} was at {self.file!r}, line {self.line}, which is no longer among its "
                f"{len(files)} files. Restore the file, or start a new run."
            )
        for number in numbers:
            if files_before(files, number) == self.before:
                return number
        raise ValueError(
            f"the stream of source {source!r} was at {self.file!r}, line {self.line}, but a file before it in the order of "
            "names was added, removed or changed its size: other samples would come. Restore the files (new ones may "
            "come last), or start a new run."
        )


_ADAPTER = TypeAdapter(StreamCursor)


def cursor_from_json(content: Any) -> StreamCursor:
    """Read a cursor from the JSON object of its fields.

    Raises:
        ValueError: If it is not one.
    """
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as err:
        raise ValueError(f"{content!r} is not a place in a stream.") from err


def files_before(files: Sequence[CorpusFile], number: int) -> str:
    """Hash (hex) of the names and sizes of the first ``number`` files."""
    stamps = [file.stamp()[:2] for file in files[:number]]
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:32]
