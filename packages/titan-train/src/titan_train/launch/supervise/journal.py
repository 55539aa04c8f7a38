"""What the supervisor prints for the user and writes to ``attempts.jsonl``; neither can end the run.

A full disk, a file system that turned read-only or a terminal that is gone is reported and survived: lines that cannot be
written are kept in memory and written with the next ones.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO


class Journal:
    """The supervisor's voice and its record."""

    def __init__(self, file: Path, out: TextIO) -> None:
        self._file = file
        self._out = out
        self._unwritten: list[str] = []
        self._torn = False

    def say(self, text: str) -> None:
        """Print a line for the user; a terminal that is gone does not end the run."""
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._out, flush=True)

    def record(self, entry: Mapping[str, object]) -> None:
        """Append one line to the file, after those that could not be written before."""
        first_failure = not self._unwritten
        self._unwritten.append(json.dumps(entry) + "\n")
        try:
            with self._file.open("ab", buffering=0) as file:
                while self._unwritten:
                    line = ("\n" if self._torn else "") + self._unwritten[0]  # close a line that was cut short
                    self._torn = file.write(line.encode()) != len(line.encode())
                    if self._torn:
                        raise OSError(f"only a part of a line could be written to {self._file}")
                    del self._unwritten[0]
        except OSError as err:
            if first_failure:
                self.say(f"note     {self._file.name} cannot be written ({err.strerror or err}); the run goes on")
