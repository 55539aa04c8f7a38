"""A progress bar for work measured in bytes: on a terminal only, on standard error, standard library only."""

import sys
import time
from types import TracebackType

_WIDTH = 30
_EVERY_S = 0.1


class Progress:
    """Bytes done of bytes in all, with speed and time left.

    Args:
        title: What is being done.
        total_bytes: When it is done.
    """

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

    def text(self, elapsed_s: float) -> str:
        """The bar as one line."""
        part = min(self.done / self.total, 1.0)
        filled = int(part * _WIDTH)
        speed = self.done / max(elapsed_s, 1e-9)
        left_s = (self.total - self.done) / speed if speed else 0.0
        bar = "█" * filled + "·" * (_WIDTH - filled)
        return f"{self.title} {bar} {part:4.0%} {speed / 1e9:.2f} GB/s {left_s:.0f} s left "

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            sys.stderr.write("\r" + " " * len(self.text(1.0)) + "\r")
            sys.stderr.flush()
