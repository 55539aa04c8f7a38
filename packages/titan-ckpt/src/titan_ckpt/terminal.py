"""What the command line prints: text without characters that command a terminal, and a progress bar in bytes."""

import contextlib
import re
import sys
import time
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


_WIDTH = 30
_EVERY_S = 0.1


class ByteProgress:
    """A bar with speed and remaining time, on standard error, and only on a terminal."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self.title, self.total = title, max(total_bytes, 1)
        self.done = 0
        self._began = self._shown = time.monotonic()
        self._live = sys.stderr.isatty()

    def advance(self, nbytes: int) -> None:
        """Count ``nbytes`` more."""
        self.done += nbytes
        now = time.monotonic()
        if self._live and now - self._shown >= _EVERY_S:
            self._shown = now
            sys.stderr.write("\r" + self.text(now - self._began))
            sys.stderr.flush()

    def print(self, line: str) -> None:
        """Print a result on standard output, above the bar."""
        self._clear()
        print(line, flush=self._live)

    def text(self, elapsed_s: float) -> str:
        """The bar as one line."""
        part = min(self.done / self.total, 1.0)
        filled = int(part * _WIDTH)
        speed = self.done / max(elapsed_s, 1e-9)
        left_s = max(self.total - self.done, 0) / speed if speed else 0.0
        bar = "█" * filled + "·" * (_WIDTH - filled)
        return f"{self.title} {bar} {part:4.0%} {speed / 1e9:.2f} GB/s {left_s:.0f} s left "

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(self, *exc: object) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\033[K")  # the whole line, however long it was
            sys.stderr.flush()
