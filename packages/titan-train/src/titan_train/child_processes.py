"""What a child process must not inherit from the terminal and the folder that a command is started in."""

import contextlib
import os
import signal
from collections.abc import Generator


@contextlib.contextmanager
def without_working_directory() -> Generator[None]:
    """Keep Python processes that start in the block from importing what lies in the working directory.

    multiprocessing starts ``python -c``, which looks there first: a ``random.py`` beside a configuration would be run.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextlib.contextmanager
def interrupts_blocked() -> Generator[None]:
    """What starts inside, and its children, never see Ctrl-C, which a terminal sends to all of them: it is for this process."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which would unblock the signal once more
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
