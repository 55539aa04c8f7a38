"""What a person or a batch system asks of a run by signals."""

import contextlib
import signal
from collections.abc import Callable, Generator, Mapping
from typing import Any


class Requests:
    """SIGTERM, Ctrl-C and a closed terminal: save and stop. A second Ctrl-C: end at once. SIGUSR1: save and go on."""

    def __init__(self) -> None:
        self.stops = 0
        """Requests to stop so far."""
        self._interrupts = 0
        self._save = False

    @property
    def end_now(self) -> bool:
        """Whether Ctrl-C was pressed twice."""
        return self._interrupts > 1

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked, self._save = self._save, False
        return asked

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Listen to the signals inside the block."""

        def stop(number: int, _frame: object) -> None:
            self.stops += 1
            self._interrupts += number == signal.SIGINT

        def save(_number: int, _frame: object) -> None:
            self._save = True

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGUSR1: save}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            handlers[signal.SIGHUP] = stop
        with signal_handlers(handlers):
            yield


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Callable[[int, Any], object]]) -> Generator[None]:
    """Handle signals so inside the block."""
    saved = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
