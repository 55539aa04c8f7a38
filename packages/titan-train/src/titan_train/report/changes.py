"""Settings that a resume changed: which steps were made with which values, and the run that a branch began with."""

import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_train.config import Config
from titan_train.config.load import flat_values
from titan_train.observe import EventRecord
from titan_train.observe.run_info import parent_of, settings_spans
from titan_train.report.folder import RunFolder, read_folder

CHANGED = "settings_changed"
"""The event of an attempt that changed settings."""


@dataclass(frozen=True, slots=True)
class ChangedSettings:
    """The settings of a run that had more than one value."""

    steps: list[str]
    """Which steps each column is of, such as ``1–18``."""
    rows: list[tuple[str, list[str]]]
    """A setting's name, and its value in each column."""


def changed_settings(folder: RunFolder) -> ChangedSettings:
    """The table of a run's changed settings; without rows if none changed."""
    spans = settings_spans(folder.info)
    ends = [*(str(after) for after, _ in spans[1:]), "end"]
    rows: list[tuple[str, list[str]]] = []
    for key in sorted({key for _, values in spans for key in values}):
        cells = [_shown(key, values.get(key)) for _, values in spans]
        if len(set(cells)) > 1:
            rows.append((key, cells))
    return ChangedSettings([f"{after + 1}–{end}" for (after, _), end in zip(spans, ends, strict=False)], rows)


def values_over_run(folder: RunFolder) -> dict[str, str]:
    """Each changed setting as one text, such as ``0.003 to step 18, then 0.0001``."""
    until = [after for after, _ in settings_spans(folder.info)[1:]]
    found: dict[str, str] = {}
    for key, cells in changed_settings(folder).rows:
        earlier = [
            f"{cell} to step {step}"
            for cell, later, step in zip(cells, cells[1:], until, strict=False)
            if cell != later
        ]
        found[key] = f"{', '.join(earlier)}, then {cells[-1]}"
    return found


def change_lines(events: Sequence[EventRecord]) -> list[str]:
    """Each change as a line for the terminal."""
    lines: list[str] = []
    for event in events:
        changed = event.fields.get("changed")
        if event.kind == CHANGED and isinstance(changed, dict):
            pairs = [
                f"{key} {_shown(key, before)} -> {_shown(key, now)}"
                for key, (before, now) in ((key, pair) for key, pair in changed.items() if _is_pair(pair))
            ]
            lines.append(f"settings changed after step {event.step}: {', '.join(pairs)}")
    return lines


def branched_from(folder: RunFolder) -> str:
    """The run and step that a branch began with, such as ``runs/a@100``; empty for a run that began by itself."""
    parent = parent_of(folder.info)
    return "" if parent is None else f"{parent[0]}@{parent[1]}"


def parent_folder(folder: RunFolder) -> RunFolder | None:
    """The run that a branch began with; None for a run that began by itself, or where the other is no longer here."""
    parent = parent_of(folder.info)
    if parent is None:
        return None
    # as recorded, from the folder in which the command was typed; or beside this run, where both were moved
    recorded = Path(parent[0])
    for place in (recorded, folder.path.resolve().parent / recorded.name):
        if place.is_dir() and place.resolve() != folder.path.resolve():
            with contextlib.suppress(ValueError, OSError):
                return read_folder(place)
    return None


def value_text(value: object) -> str:
    """A JSON or TOML value as it is written in TOML."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return repr(value) if len(repr(value)) <= 8 else f"{value:g}"
    if value is None:  # how metrics.jsonl writes what is not a number
        return "nan"
    return json.dumps(value, default=str)


def _shown(key: str, value: object) -> str:
    """A value of the record, which leaves out defaults."""
    if value is None:
        value = _defaults().get(key, "")
    return value_text(value)


@functools.cache
def _defaults() -> dict[str, object]:
    return flat_values(Config())


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2
