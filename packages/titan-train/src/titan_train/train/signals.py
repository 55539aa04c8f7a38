"""SIGTERM and SIGUSR1 as requests that all ranks act on at the same step.

A signal reaches ranks at different moments, and a rank that stopped alone would leave its peers in a collective. So
a handler only sets a flag; the trainer sums the flags of all ranks in the collective it makes every step anyway.
"""

import contextlib
import signal
import threading
from collections.abc import Generator


class SaveRequests:
    """What this rank has been asked to do since it last looked."""

    def __init__(self) -> None:
        self.stop = False
        """SIGTERM: save, then end the run with success."""
        self._save = False

    def take_save(self) -> bool:
        """Whether SIGUSR1 came since the last call: save, then go on. A signal that comes later is kept for the next."""
        asked, self._save = self._save, False
        return asked

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Handle the two signals inside the block. Off the main thread, where Python cannot, it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        saved = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._on_stop),
            signal.SIGUSR1: signal.signal(signal.SIGUSR1, self._on_save),
        }
        try:
            yield
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)

    def _on_stop(self, _number: int, _frame: object) -> None:
        self.stop = True

    def _on_save(self, _number: int, _frame: object) -> None:
        self._save = True
