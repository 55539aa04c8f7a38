"""What a run's folder says of the steps that are in it: with which settings each was made, and where the run began.

A resume may change settings, and a branch begins with another run's steps. ``run.json`` keeps both:

    "settings": [{"after_step": 0, "values": {"optimizer.lr": 0.003}}, {"after_step": 18, "values": {"optimizer.lr": 0.0001}}]
    "parent": {"run": "runs/a", "step": 100}

``values`` are the settings that are not at their default. An entry holds until the next one. Steps that a resume makes again are
of the attempt that made them last, so its entry replaces those after its first step.
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

    kept = [span for span in before if span[0] < step]
    values = values_set(config)
    changed = differing(kept[-1][1], values) if kept else {}
    if changed or not kept:
        kept.append((step, values))
    extra: dict[str, Any] = {} if parent is None else {"parent": {"run": parent[0], "step": parent[1]}}
    attempts: Any = read_run_info(run_dir).get("attempts")
    if isinstance(attempts, list) and attempts and isinstance(attempts[-1], dict):
        attempts[-1]["from_step"] = step  # the newest checkpoint may be damaged, or of another run
        extra["attempts"] = attempts
    add_run_info(run_dir, settings=[{"after_step": after, "values": values} for after, values in kept], **extra)
    if len(kept) > 1:
        file = run_dir / "config.toml"
        write_atomic(file, _notes(kept) + file.read_text(encoding="utf-8"))
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
    lines = [f"# Settings changed during this run. Those below hold after step {spans[-1][0]}."]
    for (after, values), (until, later) in pairwise(spans):
        old = ", ".join(
            f"{ascii(key)[1:-1]} = {'the default' if pair[0] is None else ascii(pair[0])}"
            for key, pair in differing(values, later).items()
        )
        lines.append(f"# Steps {after + 1} to {until}: {old}")
    return "\n".join(lines) + "\n\n"
