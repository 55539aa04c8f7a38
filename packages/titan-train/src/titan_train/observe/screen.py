"""A thread that owns the terminal, so that the training loop never waits for it.

The loop leaves what is new in memory and goes on; this thread draws the bar a few times a second, or writes lines as
they come. A terminal that is stopped (Ctrl-S), slow or gone then holds up this thread only.
"""

import atexit
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from titan_train.terminal import clean_console

if TYPE_CHECKING:
    from rich.text import Text

_REFRESH_S = 0.2
_CLOSE_TIMEOUT_S = 2.0
# At about 200 bytes a line: what a reader that has stopped reading may cost us in memory, 2 MB.
_MOST_LINES_KEPT = 10_000


class Screen:
    """Draws in the background: one live line at the bottom, or lines only."""

    def __init__(self, stream: TextIO, draw: "Callable[[int], Text] | None") -> None:
        """Start the thread.

        Args:
            stream: Where to write.
            draw: Makes the live line for a width in columns; None writes posted lines only.
        """
        self._stream = stream
        self._draw = draw
        self._lines: deque[Callable[[], str]] = deque(maxlen=_MOST_LINES_KEPT)
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="titan-progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def post(self, line: Callable[[], str]) -> None:
        """Show a line (above the live one); ``line`` makes its text, later, on the screen's thread."""
        self._lines.append(line)
        self._wake.set()

    def close(self) -> None:
        """Show what is still waiting, leave the live line as it is, and stop. Waits 2 s at most."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            if self._draw is None:
                self._write_lines()
            else:
                self._draw_live(self._draw)
        except (OSError, ValueError):  # the reader hung up, or the stream was closed under us: nobody is watching
            return

    def _write_lines(self) -> None:
        while True:
            closing = self._closing  # read before draining: what is posted before close() is always shown
            while self._lines:
                self._stream.write(self._lines.popleft()() + "\n")
            self._stream.flush()
            if closing:
                return
            self._wake.wait()
            self._wake.clear()

    def _draw_live(self, draw: "Callable[[int], Text]") -> None:
        from rich.live import Live

        console = clean_console(self._stream, force_terminal=True, highlight=False)
        before = (sys.stdout, sys.stderr)
        live = Live(console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True)
        with live, _log_follows(before):
            # Live hides the cursor; if the process is killed, nobody would bring it back.
            console.show_cursor(True)
            while True:
                closing = self._closing
                while self._lines:
                    console.print(self._lines.popleft()(), markup=False, soft_wrap=True)
                live.update(draw(console.width), refresh=True)
                if closing:
                    return
                self._wake.wait(_REFRESH_S)
                if self._wake.is_set() and not self._closing:
                    self._wake.clear()
                    time.sleep(_REFRESH_S / 4)  # a burst of messages is drawn together


@contextmanager
def _log_follows(before: tuple[TextIO, TextIO]) -> Generator[None]:
    """Log lines go above the live line, as prints do: handlers made earlier hold the streams that Live has replaced."""
    after = (sys.stdout, sys.stderr)
    moved: list[tuple[logging.StreamHandler[Any], TextIO]] = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            handler = cast("logging.StreamHandler[Any]", handler)
            moved.append((handler, handler.stream))
            handler.setStream(after[before.index(handler.stream)])
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
