"""Look at a run while it goes on, from its folder alone: what is appended to its log, its goodput, one panel of both.

Goodput is the share of a run's wall time that made progress: the time of the steps that count, each once (a step that a
restart made again counts its last time). Beside it stand waiting for checkpoints, the time between attempts, and the rest:
starting up, validating, steps that were lost.
"""

import contextlib
import math
import zlib
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from titan_train.files import parse_json
from titan_train.observe import run_info
from titan_train.observe.format import short_count, short_duration, short_gib, short_loss
from titan_train.observe.history import History
from titan_train.observe.log import FILE_NAME, PERIODIC_EVENTS
from titan_train.observe.terminal import sparks

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLORS = ("cyan", "blue", "magenta", "yellow", "green", "red", "white")
_KINDS = ("step", "validation", "event")
_NUMBERS = (
    "step", "time", "loss", "bits_per_byte", "grad_norm", "lr", "tokens_per_s", "mfu", "peak_mem_gib", "step_time_s",
)  # fmt: skip


class Follower:
    """Reads the file from where it last stopped. A line that is not whole yet waits; a file that was cut is read again."""

    def __init__(self, run_dir: Path, newest: int = 0) -> None:
        """Nothing is read yet.

        Args:
            run_dir: The run's folder.
            newest: How many lines `lines` has at most.
        """
        self.path = run_dir / FILE_NAME
        self.lines: deque[dict[str, Any]] = deque(maxlen=newest)
        """The newest that are in the file."""
        self._at = 0
        self._last = b""
        self._sums = array("L")  # of each line

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines since the last call; empty while there are none. Of a file that a resumed run cut, those after the cut."""
        known = array("L")
        try:
            with self.path.open("rb") as file:
                file.seek(self._at - len(self._last))
                data = file.read()
                if not data.startswith(self._last):  # it was cut, and may have grown since
                    file.seek(0)
                    data = file.read()
                    known, self._sums, self._at, self._last = self._sums, array("L"), 0, b""
                    self.lines.clear()
        except OSError:
            return []
        new: list[dict[str, Any]] = []
        for raw in data[len(self._last) : data.rfind(b"\n") + 1].splitlines(keepends=True):
            self._at, self._last = self._at + len(raw), raw
            self._sums.append(zlib.crc32(raw))
            if known[len(self._sums) - 1 : len(self._sums)] != self._sums[-1:]:
                known = array("L")  # from here on it is another file
            line = _record(raw)
            if line is not None:
                self.lines.append(line)
                if not known:
                    new.append(line)
        return new


def _record(raw: bytes) -> dict[str, Any] | None:
    """The record that a line is; None if it is none."""
    try:
        line: object = parse_json(raw)
    except (ValueError, RecursionError):
        return None
    if isinstance(line, dict) and _is_record(cast("dict[str, Any]", line)):
        return cast("dict[str, Any]", line)
    return None


def _is_record(line: Mapping[str, Any]) -> bool:
    """Whether a line is one that this package writes: the file may be anyone's."""
    kind = line.get("kind")
    step = line.get("step", 0 if kind == "event" else None)
    if kind not in _KINDS or not _is_number(step) or not abs(step) < 2**63:
        return False
    if not all(line.get(name) is None or _is_number(line[name]) for name in _NUMBERS):
        return False
    split = line.get("split")
    if split and not (isinstance(split, dict) and all(map(_is_number, cast("dict[str, Any]", split).values()))):
        return False
    return line.get("event") != "step_split" or _is_step_split(line)


def _is_step_split(line: Mapping[str, Any]) -> bool:
    try:
        shown = [line["wall_ms"], *line["phases_ms"].values(), *(axis["exposed_ms"] for axis in line["axes"].values())]
        return _is_number(line["step"]) and all(_is_number(ms[1]) for ms in shown)
    except (KeyError, IndexError, TypeError, AttributeError):
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))  # a loss may be infinite, or none


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the wall time of a run went, in seconds."""

    wall_s: float
    progress_s: float
    checkpoint_s: float
    """Steps waited for checkpoints."""
    between_s: float
    """Between the end of an attempt and the start of the next."""
    restarts: tuple[str, ...]
    """Why each attempt before the last one ended."""

    @property
    def share(self) -> float:
        """The share of the wall time that made progress, in [0, 1]."""
        return min(1.0, self.progress_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def rest_s(self) -> float:
        """Starting up, validating, and steps that were lost."""
        return max(0.0, self.wall_s - self.progress_s - self.checkpoint_s - self.between_s)


def find_goodput(
    history: History, attempts: Sequence[Mapping[str, Any]], now: datetime | None = None
) -> Goodput | None:
    """The goodput of a run so far; None if it has no attempts.

    Args:
        history: From `read_history`.
        attempts: Of `run.json`.
        now: The end of the last attempt, where `run.json` does not know it; default the present.
    """
    times = [(_time(a.get("started")), _time(a.get("ended"))) for a in attempts]
    started = [start for start, _ in times if start is not None]
    if not started:
        return None
    killed = attempts[-1].get("status") == "killed"  # it could not say when
    end = times[-1][1] or now or (started[-1] if killed else datetime.now(UTC))
    known = [
        (s, n) for s, n in zip(history.curves["step_time_s"].mean, history.counts, strict=True) if math.isfinite(s)
    ]
    logged = sum(n for _, n in known)
    first = attempts[0].get("from_step")  # of a branch: the steps before are its parent's
    made = max(0, history.steps[-1] - (first if isinstance(first, int) else 0)) if logged else 0
    # steps between two logged ones took as long as those
    progress_s = math.fsum(s * n for s, n in known) / logged * made if logged else 0.0
    saves = [event.fields.get("seconds", 0.0) for event in history.events if event.kind == "checkpoint_saved"]
    between = [
        (after[0] - before[1]).total_seconds()
        for before, after in pairwise(times)
        if before[1] is not None and after[0] is not None
    ]
    return Goodput(
        wall_s=max((end - started[0]).total_seconds(), progress_s),
        progress_s=progress_s,
        checkpoint_s=math.fsum(float(s) for s in saves if isinstance(s, (int, float))),
        between_s=math.fsum(max(0.0, s) for s in between),
        restarts=tuple(str(a.get("error") or a.get("status")) for a in attempts[:-1]),
    )


def last_written(run_dir: Path) -> datetime | None:
    """When a run last wrote into its folder: the end of one that was killed; None if nothing of it is there."""
    times: list[float] = []
    for name in (FILE_NAME, run_info.FILE_NAME):
        with contextlib.suppress(OSError):
            times.append((run_dir / name).stat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _time(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


def panel(
    name: str,
    status: str,
    total_steps: int | None,
    lines: Sequence[Mapping[str, Any]],
    goodput: Goodput | None,
    width: int,
) -> "RenderableType":
    """The state of a run.

    Args:
        name: The run's.
        status: Its newest attempt's.
        total_steps: The whole run's, if known.
        lines: The lines of `metrics.jsonl` so far, or the newest few thousand.
        goodput: See `find_goodput`.
        width: Columns.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    steps = [line for line in lines if line.get("kind") == "step"]
    rows: list[RenderableType] = []
    if not steps:
        rows.append(Text("no step yet", style="bright_black"))
    else:
        last = steps[-1]
        share = f" of {total_steps:,} ({last['step'] / total_steps:.0%})" if total_steps else ""
        left = ""
        if total_steps and last.get("step_time_s"):
            left = f"   left {short_duration((total_steps - last['step']) * last['step_time_s'])}"
        rows.append(Text(f"step {last['step']:,}{share}{left}", style="bold"))
        losses = [line["loss"] for line in steps if _finite(line.get("loss"))]
        rows.append(
            Text(f"loss {short_loss(last.get('loss'))}  {sparkline(losses, max(10, width - 30))}", style="cyan")
        )
        rate = f"{short_count(last.get('tokens_per_s') or 0)} tokens/s"
        rows.append(
            Text(
                f"lr {last.get('lr') or 0:.3g}   gradient norm {short_loss(last.get('grad_norm'))}   {rate}   "
                f"memory {short_gib(last.get('peak_mem_gib') or 0)}"
                + (f"   MFU {last['mfu']:.1%}" if last.get("mfu") else "")
            )
        )
        rows += _validation(lines)
        rows += _split(lines, width)
    if goodput is not None:
        rows.append(Text(goodput_line(goodput)))
    rows += [Text(event_line(line), style="yellow") for line in _events(lines)[-4:]]
    return Panel(Group(*rows), title=Text(f"{name} · {status}"), width=width)


def goodput_line(goodput: Goodput) -> str:
    """``goodput 91% of 12:30: checkpoints 20s, between attempts 31s, rest 12s; 1 restart (killed)``."""
    parts = [("checkpoints", goodput.checkpoint_s), ("between attempts", goodput.between_s), ("rest", goodput.rest_s)]
    lost = ", ".join(f"{name} {short_duration(seconds)}" for name, seconds in parts if seconds >= 0.05)
    count = len(goodput.restarts)
    why = f"; {count} restart{'s' if count > 1 else ''} ({', '.join(dict.fromkeys(goodput.restarts))})" if count else ""
    return f"goodput {goodput.share:.0%} of {short_duration(goodput.wall_s)}" + (f": {lost}" if lost else "") + why


def event_line(line: Mapping[str, Any]) -> str:
    """An event as one line of text."""
    if line.get("event") == "step_split":
        median = {name: ms[1] for name, ms in line["phases_ms"].items()}
        median |= {f"{name} exposed": axis["exposed_ms"][1] for name, axis in line["axes"].items()}
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in median.items() if ms >= 0.05)
        return f"step {line['step']}: {line['wall_ms'][1]:.1f} ms = {parts}"
    if line.get("text"):
        return f"step {line.get('step')}: {line['text']}"
    rest = " ".join(f"{k}={v}" for k, v in line.items() if k not in ("kind", "event", "step", "time"))
    return f"step {line.get('step')}: {line.get('event')} {rest}".rstrip()


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars of eight heights, averaged to at most ``width`` of them."""
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    return sparks([sum(group) / len(group) for group in groups])


def _validation(lines: Sequence[Mapping[str, Any]]) -> "list[RenderableType]":
    from rich.text import Text

    found = [line for line in lines if line.get("kind") == "validation"]
    if not found:
        return []
    bits = found[-1].get("bits_per_byte")
    more = f", {short_loss(bits)} bits per byte" if _finite(bits) else ""
    return [Text(f"validation {short_loss(found[-1].get('loss'))}{more} at step {found[-1]['step']}", style="magenta")]


def _split(lines: Sequence[Mapping[str, Any]], width: int) -> "list[RenderableType]":
    """The parts of a step as one bar and its legend."""
    from rich.text import Text

    split = next((line["split"] for line in reversed(lines) if line.get("split")), None)
    if not isinstance(split, dict):
        return []
    parts = [(str(k), float(v)) for k, v in split.items() if v > 0 and not str(k).endswith(" hidden")]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    total = sum(seconds for _, seconds in parts) or 1.0
    bar, legend = Text(), Text()
    for number, (name, seconds) in enumerate(parts):
        color = _COLORS[number % len(_COLORS)]
        bar.append("█" * round((width - 6) * seconds / total), style=color)
        if seconds >= 0.01 * total:
            legend.append(f"{name} {seconds / total:.0%}  ", style=color)
    return [bar, legend]


def _events(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in lines if line.get("kind") == "event" and line.get("event") not in PERIODIC_EVENTS]


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
