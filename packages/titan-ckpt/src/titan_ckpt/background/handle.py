"""A save that was begun, as the training loop sees it."""

import threading

from titan_ckpt.errors import CheckpointError
from titan_ckpt.storage.paths import StorePath


class SaveJob:
    """A save that was begun. With synchronous saves it is done when you get it."""

    def __init__(self, step: int, path: StorePath | None = None, *, skipped: bool = False) -> None:
        self.step = step
        self.skipped = skipped
        """True if nothing is saved, since the last save was still in flight and ``on_busy="skip"``."""
        self._path = path
        self._error: str | None = None
        self._done = threading.Event()
        self._staged = threading.Event()
        if path is not None or skipped:
            self._staged.set()
            self._done.set()

    @property
    def path(self) -> StorePath | None:
        """The step's folder once it is committed; None before, or if it failed or was skipped."""
        return self._path

    @property
    def staged(self) -> bool:
        """Whether the state may change: its bytes are copied."""
        return self._staged.is_set()

    @property
    def done(self) -> bool:
        """Whether the save has ended, committed or failed."""
        return self._done.is_set()

    @property
    def error(self) -> str | None:
        """Why it failed; None while it runs or if it is committed."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> StorePath:
        """Wait until the step is committed and return its folder.

        Raises:
            TimeoutError: If it is not within ``timeout_s`` seconds.
            CheckpointError: If it failed, or was skipped.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(
                f"step {self.step} is not committed after {timeout_s} s; it continues in the background."
            )
        if self._path is None:
            why = self._error or "it was skipped, because the previous save was still in flight"
            raise CheckpointError(f"step {self.step} was not saved: {why}")
        return self._path

    def finish(self, path: StorePath | None, error: str | None) -> None:
        """Called by the machinery when the save has ended."""
        self._path, self._error = path, error
        self._staged.set()
        self._done.set()

    def mark_staged(self) -> None:
        """Called by the machinery when the state's bytes are copied."""
        self._staged.set()
