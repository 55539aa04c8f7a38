"""A folder that is prepared once: by one process at a time, continued after a kill, read by every rank afterwards.

    .lock              held by the process that prepares; others wait for it and find the work done
    STATE.json         how far the preparation is, replaced after every part of it
    quarantine.jsonl   what was left out and why, one object per line (`BadDocuments`)

What decides the content is hashed into a key (`content_key`), which names the folder or stands in its state: other input
never continues a folder, and never reads it.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from titan_train.config import DataConfig
from titan_train.data.sources.malformed import BadDocuments
from titan_train.files import read_bytes, write_atomic

State = TypeVar("State")
_PATIENCE_S = 2.0
"""Ranks wait as long for each other at every block of a stream; a longer wait is worth a line."""

_logger = logging.getLogger(__name__)


class PreparedFolder(Generic[State]):
    """A folder and the state of its preparation.

    Args:
        path: The folder; `one_process` creates it.
        state_name: File name of the state.
        kind: Type of the state: a dataclass, or a list of them.
    """

    def __init__(self, path: Path, state_name: str, kind: type[State]) -> None:
        self.path = path
        self.state_path = path / state_name
        self._adapter = TypeAdapter(kind)

    def one_process(self) -> Any:
        """Inside, no other process prepares this folder. Waits for one that does."""
        return one_process(self.path)

    def read(self) -> State | None:
        """The state; None if there is none.

        Raises:
            ValueError: It is damaged, for example by a machine that lost power.
        """
        if not self.state_path.is_file():
            return None
        try:
            return self._adapter.validate_json(read_bytes(self.state_path))
        except ValidationError as err:
            raise ValueError(f"{self.state_path} is damaged. Remove the folder and prepare it again.") from err

    def read_or_restart(self) -> State | None:
        """The state; None, with a warning, if it is damaged: the preparation then begins again."""
        try:
            return self.read()
        except ValueError:
            _logger.warning("%s is damaged: preparing from the beginning", self.state_path)
            return None

    def write(self, state: State, *, sync: bool = True) -> None:
        """Replace the state; with ``sync`` it survives a power failure."""
        write_atomic(self.state_path, self._adapter.dump_json(state, indent=1) + b"\n", sync=sync)

    def bad_documents(self, source: str, config: DataConfig, *, streamed: bool = False) -> BadDocuments:
        """Counts what is left out, under the limits of ``config``, and writes it to the quarantine file."""
        return BadDocuments(
            source,
            on_error=config.on_error,
            max_fraction=config.max_bad_fraction,
            max_count=config.max_bad,
            quarantine=self.path / "quarantine.jsonl",
            streamed=streamed,
        )


def content_key(content: Any) -> str:
    """sha256 (hex) of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def one_process(folder: Path) -> Generator[None]:
    """Inside, no other process is inside for the same folder, which is created if it is missing. A long wait is logged."""
    import fcntl  # not on Windows

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits = threading.Timer(
                _PATIENCE_S, _logger.warning, ("waiting for another process that prepares %s", folder)
            )
            waits.start()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            finally:
                waits.cancel()
        except OSError as err:  # some network file systems have no locks
            _logger.warning("%s cannot be locked (%s): prepare it from one process only", folder, err)
        yield  # closing the file releases the lock
