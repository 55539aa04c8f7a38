"""What to do with malformed documents: raise, skip, or keep a copy; and how many are too many.

Bytes are decoded strictly. A reader that replaces what it cannot decode hides a damaged file for the length of a run.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan_train.config.data import OnError
from titan_train.data.sources.document import printable

BadKind = Literal[
    "invalid_utf8", "invalid_json", "missing_text", "empty", "truncated", "oversize", "bad_chat", "bad_image"
]

_logger = logging.getLogger(__name__)
_EXCERPT_BYTES = 80
# Bytes kept of a quarantined line.
_QUARANTINE_BYTES = 2**20
# The share is judged early only once this many documents were seen; at the end of the source it is judged always.
_EARLY_DOCUMENTS = 10_000


@dataclass(frozen=True, slots=True)
class BadDocument:
    """One malformed document, and where it is."""

    file: str
    line: int
    """Line in the decompressed file, or row of a table, from 1; the whole file is line 1 of a text file."""
    byte: int
    """Offset of the line, or of the first bad byte, in the decompressed file; -1 in a table."""
    kind: BadKind
    reason: str
    raw: bytes

    def __str__(self) -> str:
        excerpt = self.raw[:_EXCERPT_BYTES].decode(errors="backslashreplace")
        tail = f": {excerpt!r}" if excerpt else ""
        place = f"row {self.line}" if self.byte < 0 else f"line {self.line}, byte {self.byte}"
        return f"{printable(self.file)}, {place}: {self.reason}{tail}"


class MalformedInputError(ValueError):
    """A malformed document, or too many of them.

    Attributes:
        documents: The first of them, up to five.
    """

    def __init__(self, message: str, documents: tuple[BadDocument, ...]) -> None:
        super().__init__(message)
        self.documents = documents


class BadDocuments:
    """Count the malformed documents of one source, and stop when the policy says so.

    Args:
        source: Name of the source, for messages.
        on_error: raise, skip or quarantine.
        max_fraction: Largest share of documents that may be malformed.
        max_count: Largest number, 0 for no such limit.
        quarantine: File that quarantined documents are appended to, one JSON object a line.
        streamed: Whether a run reads them while it trains.
    """

    def __init__(
        self,
        source: str,
        *,
        on_error: OnError,
        max_fraction: float,
        max_count: int,
        quarantine: Path | None = None,
        streamed: bool = False,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.seen = 0
        self._source = source
        self._on_error = on_error
        self._max_fraction = max_fraction
        self._max_count = max_count
        self._quarantine = quarantine
        self._streamed = streamed
        self.first: list[BadDocument] = []
        """Up to five of them."""
        self._logged: set[tuple[str, BadKind]] = set()

    def add_good(self, count: int = 1) -> None:
        """Count documents that were read without fault."""
        self.seen += count

    def add(self, bad: BadDocument) -> None:
        """Count one malformed document.

        Raises:
            MalformedInputError: If the policy is to raise, or a limit is passed.
        """
        if self._on_error == "raise":
            begun = "; a run that has begun also needs checkpoint.allow_data_change=true" if self._streamed else ""
            raise MalformedInputError(
                f'{bad}. Repair the file, or set data.on_error to "skip" or "quarantine"{begun}.', (bad,)
            )
        self.seen += 1
        self.counts[bad.kind] += 1
        if len(self.first) < 5:
            self.first.append(bad)
        if (bad.file, bad.kind) not in self._logged:
            self._logged.add((bad.file, bad.kind))
            _logger.warning("left out (%s, logged once for each file and kind): %s", bad.kind, bad)
        if self._on_error == "quarantine" and self._quarantine is not None:
            self._keep_copy(self._quarantine, bad)
        self.check_count()
        if self.seen >= _EARLY_DOCUMENTS:
            self.check_share()

    def check_count(self) -> None:
        """Check the number of malformed documents.

        Raises:
            MalformedInputError: If it is above the limit.
        """
        if self._max_count and self.counts.total() > self._max_count:
            self._too_many(f"data.max_bad={self._max_count}")

    def check_share(self) -> None:
        """Check the share of malformed documents; call it again at the end of the source.

        Raises:
            MalformedInputError: If it is above the limit.
        """
        if self.counts.total() > self._max_fraction * self.seen:
            self._too_many(f"data.max_bad_fraction={self._max_fraction}")

    def begin_pass(self, seen: int = 0, counts: Mapping[str, int] | None = None) -> None:
        """Count from 0, or from these counts, as a source is read once more; what is kept of malformed documents stays."""
        self.seen, self.counts = seen, Counter(counts)

    def quarantine_size(self) -> int:
        """Bytes in the quarantine file, 0 if there is none."""
        return self._quarantine.stat().st_size if self._quarantine is not None and self._quarantine.exists() else 0

    def resume(self, seen: int, counts: dict[str, int], quarantine_bytes: int) -> None:
        """Go back to an earlier count, and cut the quarantine file to what it held then."""
        self.seen = seen
        self.counts = Counter(counts)
        if self._quarantine is not None and self._quarantine.exists():
            os.truncate(self._quarantine, quarantine_bytes)

    def _too_many(self, limit: str) -> None:
        total = self.counts.total()
        listing = "".join(f"\n  {bad}" for bad in self.first)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        raise MalformedInputError(
            f"source {self._source!r}: {total} of {self.seen} documents are malformed ({kinds}), more than {limit} "
            f"allows. Repair the files, or raise the limit. The first of them since the start:{listing}",
            tuple(self.first),
        )

    @staticmethod
    def _keep_copy(path: Path, bad: BadDocument) -> None:
        # latin-1 keeps every byte: `raw.encode("latin-1")` gives the line back.
        record = {
            "file": bad.file,
            "line": bad.line,
            "byte": bad.byte,
            "kind": bad.kind,
            "reason": bad.reason,
            "raw_latin1": bad.raw[:_QUARANTINE_BYTES].decode("latin-1"),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
