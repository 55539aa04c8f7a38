"""The images that a run sampled last, for its report."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SampleGrid:
    """One grid of images."""

    step: int
    right: int
    """Images that show the colour and the place of their captions."""
    images: int
    captions: list[str]
    uri: str
    """The PNG file itself, as a data URI."""


def newest_samples(run_dir: Path) -> SampleGrid | None:
    """The grid of the latest step in ``samples/``; None if there is none, or if it cannot be read."""
    for described in sorted((run_dir / "samples").glob("step_*.json"), reverse=True):
        try:
            found = json.loads(described.read_text(encoding="utf-8"))
            encoded = base64.b64encode(described.with_suffix(".png").read_bytes()).decode()
            step, right, images = (int(found[name]) for name in ("step", "right", "images"))
            captions = [str(caption) for caption in found["captions"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return SampleGrid(step, right, images, captions, f"data:image/png;base64,{encoded}")
    return None
