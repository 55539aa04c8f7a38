"""What a run's folder says of the steps that are in it: with which settings each was made, and where the run began.

A resume may change settings, and a branch begins with another run's steps. ``run.json`` keeps both:

    "settings": [{"after_step": 0, "values": {"optimizer.lr": 0.003}}, {"after_step": 18, "values": {"optimizer.lr": 0.0001}}]
    "parent": {"run": "runs/a", "step": 100}

``values`` are the settings that are not at their default. An entry holds until the next one. Steps that a resume or a return
after spikes makes again are of the attempt that made them last, so its entry replaces those after its first step.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_train.config import Config
from titan_train.config.load import values_set
from titan_train.files import write_atomic
from titan_train.observe.run_info import Span, add_run_info, differing, parent_of, read_run_info, settings_spans
from titan_train.run_folder.contents import read_config
from titan_train.run_folder.staging import commit

_HEAD = "# Settings changed during this run."


def take_effect(
    run_dir: Path, config: Config, step: int, *, parent: tuple[str, int] | None = None
) -> dict[str, list[Any]]:
    """Let an attempt take effect, as `commit`, and record which settings it has. In rank 0, once all ranks have restored.

    Args:
        run_dir: The run's folder.
        config: The attempt's configuration.
        step: The step that it continues from.
        parent: The run that it branches from now, and at which step.

    Returns:
        The settings that this attempt changed: ``[before, now]`` by dotted name.
    """
    info = read_run_info(run_dir)
    before = settings_spans(info) or _of_older_version(run_dir, step)
    parent = parent or (parent_of(info) if step else None)
    commit(run_dir, config)

    extra: dict[str, Any] = {} if parent is None else {"parent": {"run": parent[0], "step": parent[1]}}
    attempts: Any = read_run_info(run_dir).get("attempts")
    if isinstance(attempts, list) and attempts and isinstance(attempts[-1], dict):
        attempts[-1]["from_step"] = step  # the newest checkpoint may be damaged, or of another run
        extra["attempts"] = attempts
    return _hold_from(run_dir, before, step, values_set(config), extra)


def record_return(run_dir: Path, step: int) -> dict[str, list[Any]]:
    """Record that the steps after ``step`` are made again with the settings at hand. In rank 0.

    Returns:
        As of `take_effect`, if the record named a later step.
    """
    spans = settings_spans(read_run_info(run_dir))
    return _hold_from(run_dir, spans, step, spans[-1][1], {}) if spans and spans[-1][0] > step else {}


def _hold_from(
    run_dir: Path, before: list[Span], step: int, values: dict[str, Any], extra: dict[str, Any]
) -> dict[str, list[Any]]:
    """Record that ``values`` hold after ``step``, with what else ``run.json`` is to say; what they changed."""
    kept = [span for span in before if span[0] < step]
    changed = differing(kept[-1][1], values) if kept else {}
    if changed or not kept:
        kept.append((step, values))
    add_run_info(run_dir, settings=[{"after_step": after, "values": values} for after, values in kept], **extra)
    file = run_dir / "config.toml"
    text = file.read_text(encoding="utf-8")
    body = text.partition("\n\n")[2] if text.startswith(_HEAD) else text
    if len(kept) > 1 or body != text:
        write_atomic(file, (_notes(kept) if len(kept) > 1 else "") + body)
    return changed


def _of_older_version(run_dir: Path, step: int) -> list[Span]:
    """The settings of a run whose ``run.json`` says nothing of them: those that it was last started with."""
    if not step:
        return []
    try:
        return [(0, values_set(read_config(run_dir)))]
    except (OSError, ValueError):
        return []


def _notes(spans: list[Span]) -> str:
    """The head of ``config.toml`` of a run whose settings changed: comments."""
    lines = [f"{_HEAD} Those below hold after step {spans[-1][0]}."]
    for (after, values), (until, later) in pairwise(spans):
        old = ", ".join(
            f"{ascii(key)[1:-1]} = {'the default' if pair[0] is None else ascii(pair[0])}"
            for key, pair in differing(values, later).items()
        )
        lines.append(f"# Steps {after + 1} to {until}: {old}")
    return "\n".join(lines) + "\n\n"
