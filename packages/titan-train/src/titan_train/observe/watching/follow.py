"""What is appended to a run's `metrics.jsonl`, line by line, as it appears."""

from pathlib import Path
from typing import Any, cast

from titan_train.files import parse_json
from titan_train.observe.jsonl import FILE_NAME


class Follower:
    """Reads the file from where it last stopped. A line that is not whole yet waits; a file that shrank is read anew."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE_NAME
        self._at = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines since the last call; empty while there are none."""
        try:
            if self.path.stat().st_size < self._at:  # a resumed run cut it
                self._at = 0
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        lines: list[dict[str, Any]] = []
        for raw in whole.splitlines():
            try:
                line: object = parse_json(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                lines.append(cast("dict[str, Any]", line))
        return lines
