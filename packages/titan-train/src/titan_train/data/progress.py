"""How far a long preparation is, and a bar that shows it."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from titan_train.terminal import clean_console

# Without a terminal, one line this often.
_LINE_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareProgress:
    """How far one stage is."""

    stage: str
    """What is being done, such as "tokenize code"."""
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


@contextmanager
def show_progress(console: Console | None = None) -> Generator[ProgressCallback]:
    """A callback that draws a bar on a terminal, and prints one line every 5 s elsewhere.

    Args:
        console: Where to; None takes standard error, so that results on standard output stay clean.
    """
    console = console or clean_console(sys.stderr)
    if not console.is_terminal:
        yield _line_printer(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
    )
    with ProgressBar(*columns, console=console) as bar:
        tasks = {}

        def update(progress: PrepareProgress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(progress.stage, total=None, detail="")
            total = max(progress.bytes_total, progress.bytes_done, 1)
            done = total if progress.finished else progress.bytes_done
            bar.update(tasks[progress.stage], total=total, completed=done, detail=str(progress))

        yield update


def _line_printer(console: Console) -> ProgressCallback:
    last = time.monotonic()

    def update(progress: PrepareProgress) -> None:
        nonlocal last
        if progress.finished or time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            console.print(f"{progress.stage}: {progress}", highlight=False, soft_wrap=True)

    return update
