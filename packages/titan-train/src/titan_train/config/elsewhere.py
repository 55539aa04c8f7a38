"""What other trainers call a setting: one table, `elsewhere.txt`, which errors and the page for those who come from one read.

A key or option that does not exist here may be another trainer's. `here_it_is` then names the setting that takes its place,
and what differs. Its columns are torchtitan 0.2's TOML, Megatron-LM's arguments, Axolotl's YAML, the `TrainingArguments` of
transformers, and nanoGPT's `config/*.py`.
"""

import functools
from importlib import resources
from typing import NamedTuple


class NamesElsewhere(NamedTuple):
    """A setting that has other names elsewhere."""

    setting: str
    """Its name here, such as ``train.steps``."""
    names: tuple[tuple[str, ...], ...]
    """What each of the other trainers calls it; empty where it has no such setting."""
    differs: str
    """What one has to know besides the name; may be empty."""


@functools.cache
def read_table() -> tuple[tuple[str, ...], tuple[NamesElsewhere, ...]]:
    """The other trainers, and the rows."""
    text = (resources.files("titan_train.config") / "elsewhere.txt").read_text(encoding="utf-8")
    head, *lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    rows = [
        NamesElsewhere(cells[0], tuple(tuple(filter(None, cell.split(", "))) for cell in cells[1:-1]), cells[-1])
        for cells in lines
    ]
    return tuple(head[1:-1]), tuple(rows)


def here_it_is(key: str) -> str:
    """What a key or option of another trainer is called here; empty for what none of them has.

    Args:
        key: As it was given, with or without a section and dashes, such as ``training.local_batch_size`` or
            ``--learning-rate``.
    """
    name = key.lstrip("-").replace("-", "_").lower()
    row = _by_name().get(name) or _by_name().get(name.rpartition(".")[2])
    if row is None:
        return ""
    setting = f"--{row.setting.replace('_', '-')}" if key.startswith("--") else row.setting
    return f"here it is {setting}" + (f" ({row.differs})." if row.differs else ".")


def markdown() -> str:
    """The table as a page shows it."""
    trainers, rows = read_table()
    lines = [f"| here | {' | '.join(trainers)} | |", "| --- |" + " --- |" * (len(trainers) + 1)]
    for row in rows:
        cells = [", ".join(f"`{name}`" for name in names) for names in ((row.setting,), *row.names)]
        lines.append(f"| {' | '.join([*cells, row.differs])} |")
    return "\n".join(lines)


@functools.cache
def _by_name() -> dict[str, NamesElsewhere]:
    """Rows by each name; a section may be left out of names of several words. The first row of a name counts."""
    found: dict[str, NamesElsewhere] = {}
    rows = read_table()[1]
    for row in rows:
        for name in (name for names in row.names for name in names):
            found.setdefault(name, row)
    for row in rows:
        for name in (name.rpartition(".")[2] for names in row.names for name in names):
            if "_" in name:
                found.setdefault(name, row)
    return found
