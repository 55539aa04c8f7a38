"""What the command line prints: names and values of a step's files, without characters that command a terminal."""

import contextlib
import re
import sys
from collections.abc import Generator
from typing import Any, TextIO, cast

# C0 but tab and newline, DEL, C1, marks that turn the direction of text, lone surrogates
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """``text`` with U+FFFD in the place of every control character but tab and newline."""
    return _CONTROL.sub("\ufffd", text)


class PrintableStream:
    """A text stream that writes `printable` text only; all else is as the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        """Wrap ``stream``."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; returns the number of its characters."""
        self._stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def clean_output() -> Generator[None]:
    """Wrap standard output for as long as the block lasts, if it is a terminal."""
    if not sys.stdout.isatty():
        yield
        return
    with contextlib.redirect_stdout(cast("TextIO", PrintableStream(sys.stdout))):
        yield
