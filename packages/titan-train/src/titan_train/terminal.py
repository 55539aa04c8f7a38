"""What reaches a terminal: text without characters that control it.

Files that other people made hold names, samples, events and errors, and all of them are printed somewhere. An escape sequence in
one could rewrite the screen, set the window's title or fill the clipboard. So the streams of a command and of a
rank are wrapped where they are terminals, and `rich`, which writes sequences of its own, gets the text of its segments cleaned.
"""

import contextlib
import re
import sys
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

# C0 but tab and newline, DEL, C1, marks that turn the direction of text, lone surrogates
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# What progress bars of libraries write: back to the start of the line, up a line, and the line emptied
_MOVES = re.compile(r"(?:\r|\x1b\[A|\x1b\[K)*")


def printable(text: str) -> str:
    """``text`` with U+FFFD in place of every control character but tab and newline."""
    return _CONTROL.sub("\ufffd", text)


def shortened(text: str, most: int = 60) -> str:
    """``text``, or its beginning and an ellipsis where it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def first_line(err: BaseException) -> str:
    """The first line of an error's message that holds text; the error's type if none does."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)


class CleanStream:
    """A text stream that writes `printable` text only; everything else is the stream's own."""

    def __init__(self, stream: TextIO, *, moves: bool = False) -> None:
        """Wrap ``stream``; with ``moves``, a write may begin as a progress bar's does."""
        self.raw = stream
        self._moves = moves

    def write(self, text: str) -> int:
        """Write text; returns the number of its characters."""
        begin = cast("re.Match[str]", _MOVES.match(text)).end() if self._moves else 0
        self.raw.write(text[:begin] + printable(text[begin:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def clean_output() -> Generator[None]:
    """Wrap standard output and error during the block, where they are terminals."""
    before = (sys.stdout, sys.stderr)
    if _is_terminal(sys.stdout):
        sys.stdout = cast("TextIO", CleanStream(sys.stdout))
    if _is_terminal(sys.stderr):
        sys.stderr = cast("TextIO", CleanStream(sys.stderr, moves=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def clean_console(stream: TextIO | None = None, **settings: Any) -> "Console":
    """A console of `rich` whose texts are `printable`.

    Args:
        stream: Where it writes; None is standard output.
        settings: As rich takes them.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Cleaned(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    output = stream if stream is not None else sys.stdout
    return Cleaned(file=output.raw if isinstance(output, CleanStream) else output, **settings)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and not isinstance(stream, CleanStream) and stream.isatty()
