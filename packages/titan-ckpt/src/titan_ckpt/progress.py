"""A progress bar in bytes: on standard error, and only on a terminal. Standard library only."""

import sys
import time

_WIDTH = 30
_EVERY_S = 0.1


class ByteProgress:
    """A bar with speed and remaining time."""

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
