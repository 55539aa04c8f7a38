"""A run in a terminal: one panel that is drawn again, or lines."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titan_train.observe.format import short_count, short_duration, short_gib, short_loss
from titan_train.observe.jsonl import PERIODIC_EVENTS
from titan_train.observe.watching.goodput import Goodput

if TYPE_CHECKING:
    from rich.console import RenderableType

_SPARKS = "▁▂▃▄▅▆▇█"
_COLORS = ("cyan", "blue", "magenta", "yellow", "green", "red", "white")


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
        name: Of the run.
        status: Of its newest attempt.
        total_steps: Of the whole run, if known.
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
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join(_SPARKS[round(7 * (m - low) / (high - low)) if high > low else 0] for m in means)


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
