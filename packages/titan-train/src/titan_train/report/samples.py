"""What a run sampled after its validations, for its report: images, or continued text."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_train.files import read_bytes, read_text

# Of a long run: the first ones, where most changes, and the last ones.
_MOST_TEXTS = 24
_MOST_COUNTS = 8


@dataclass(frozen=True, slots=True)
class SampleGrid:
    """One grid of images."""

    step: int
    images: int
    captions: list[str]
    finding: str
    """How many images show what they should; empty where it is unknown."""
    earlier: str
    """The same for earlier steps; empty likewise."""
    uri: str
    """The PNG file itself, as a data URI."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """What the model wrote after one validation: for each prompt, the prompt and what follows it."""

    step: int
    texts: list[tuple[str, str]]


def newest_samples(run_dir: Path, last_step: int) -> SampleGrid | None:
    """The grid of the latest step in ``samples/`` up to ``last_step``; None if there is none, or if it cannot be read."""
    newest: SampleGrid | None = None
    counts: list[str] = []
    for described, found in _described(run_dir, newest_first=True):
        try:
            step, images = int(found["step"]), int(found["images"])
            right = int(found["right"]) if "right" in found else None  # shards have captions of any kind
            if step > last_step:  # a run that went back has files of steps that are yet to come
                continue
            if newest is None:
                encoded = base64.b64encode(read_bytes(described.with_suffix(".png"))).decode()
                what = str(found.get("finding", "show their caption's colour and place"))
                finding = "" if right is None else f"{right} of {images} {what}"
                captions = [str(caption) for caption in found["captions"]]
                newest = SampleGrid(step, images, captions, finding, "", f"data:image/png;base64,{encoded}")
            elif right is not None:
                counts.append(f"{right} of {images} at step {step}")
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None if newest is None else replace(newest, earlier=", ".join(counts[:_MOST_COUNTS]))


def sampled_texts(run_dir: Path, last_step: int) -> list[SampledText]:
    """The texts in ``samples/`` up to ``last_step``, in step order; of more than 24 steps the first and the last 12."""
    found: list[SampledText] = []
    for _, described in _described(run_dir):
        try:
            step = int(described["step"])
            pairs = [(str(text["prompt"]), str(text["text"])) for text in described["texts"]]
        except (ValueError, KeyError, TypeError):
            continue
        if pairs and step <= last_step:  # a run that went back has files of steps that are yet to come
            found.append(SampledText(step, [(p, t.removeprefix(p)) for p, t in pairs]))
    half = _MOST_TEXTS // 2
    return found if len(found) <= _MOST_TEXTS else found[:half] + found[-half:]


def _described(run_dir: Path, *, newest_first: bool = False) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted((run_dir / "samples").glob("step_*.json"), reverse=newest_first):
        try:
            found = json.loads(read_text(path))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            yield path, found
