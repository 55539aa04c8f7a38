"""The progress of a long preparation, and a bar that shows it."""

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from titan_train.terminal import clean_console

if TYPE_CHECKING:
    from rich.console import Console

# Without a terminal, one line this often.
_LINE_EVERY_S = 5.0
_REPORT_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareProgress:
    """The progress of one stage."""

    stage: str
    """Name of the stage, such as "tokenize code"."""
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    """Bytes on disk read so far (compressed where files are)."""
    bytes_total: int = 0
    tokens: int = 0
    """Tokens made so far."""
    elapsed_s: float = 0.0
    finished: bool = False

    def __str__(self) -> str:
        rate = self.bytes_done / 1e6 / self.elapsed_s if self.elapsed_s > 0 else 0.0
        tokens = f" {self.tokens / 1e6:.2f} M tokens" if self.tokens else ""
        return f"{self.files_done}/{self.files_total} files {rate:.1f} MB/s{tokens}"


ProgressCallback = Callable[[PrepareProgress], None]


class ProgressReporter:
    """Reports one stage over files of known sizes, at most every 0.1 s.

    Args:
        stage: Name of the stage.
        sizes: Bytes of each file, in the order they are read.
        callback: Called with the progress; None reports nothing.
    """

    def __init__(self, stage: str, sizes: Sequence[int], callback: ProgressCallback | None) -> None:
        self._stage, self._callback = stage, callback
        self._ends = list(accumulate(sizes, initial=0))
        self._started = time.monotonic()
        self._reported = 0.0

    def is_due(self, finished: bool = False) -> bool:
        """Whether a report would be delivered now."""
        return self._callback is not None and (finished or time.monotonic() - self._reported >= _REPORT_EVERY_S)

    def __call__(
        self, files_done: int, *, bytes_done: int | None = None, tokens: int = 0, finished: bool = False
    ) -> None:
        """Report ``files_done`` files; ``bytes_done`` defaults to the bytes of these files."""
        if self._callback is None or not self.is_due(finished):
            return
        self._reported = time.monotonic()
        self._callback(
            PrepareProgress(
                stage=self._stage,
                files_done=files_done,
                files_total=len(self._ends) - 1,
                bytes_done=self._ends[files_done] if bytes_done is None else bytes_done,
                bytes_total=self._ends[-1],
                tokens=tokens,
                elapsed_s=self._reported - self._started,
                finished=finished,
            )
        )


@contextmanager
def show_progress(console: "Console | None" = None) -> Generator[ProgressCallback]:
    """A callback that draws a bar on a terminal, and prints one line every 5 s elsewhere.

    Args:
        console: Where to; None takes standard error, so that results on standard output stay clean.
    """
    console = console or clean_console(sys.stderr)
    if not console.is_terminal:
        yield _line_printer(console)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks = {}

        def update(progress: PrepareProgress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(progress.stage, total=None, detail="")
            total = max(progress.bytes_total, progress.bytes_done, 1)
            done = total if progress.finished else progress.bytes_done
            bar.update(tasks[progress.stage], total=total, completed=done, detail=str(progress))

        yield update


def _line_printer(console: "Console") -> ProgressCallback:
    last = time.monotonic()

    def update(progress: PrepareProgress) -> None:
        nonlocal last
        if progress.finished or time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            console.print(f"{progress.stage}: {progress}", highlight=False, soft_wrap=True)

    return update
