"""A saved tokenizer: one folder with `titan_tokenizer.json` and, unless it is bytes, the model file beside it.

The JSON names the kind, the options and the fingerprint; it is written last, so that a folder without it is
unfinished.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_train.files import read_text, write_atomic

SAVED_NAME = "titan_tokenizer.json"
MODEL_NAME = "tokenizer.model"


def save_tokenizer(folder: str | Path, description: Mapping[str, Any], files: Mapping[str, bytes]) -> Path:
    """Write ``files``, then ``description`` as JSON, each under a temporary name first."""
    folder = Path(folder)
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    for name, content in [*files.items(), (SAVED_NAME, text.encode())]:
        write_atomic(folder / name, content, sync=True)
    return folder


def read_description(folder: Path) -> dict[str, Any]:
    """The description `save_tokenizer` wrote.

    Raises:
        ValueError: If it is not a JSON object that names a kind.
    """
    path = folder / SAVED_NAME
    try:
        description = json.loads(read_text(path))
    except ValueError as err:
        raise ValueError(f"{path} is not valid JSON ({err}). Save the tokenizer again.") from err
    if not isinstance(description, dict) or not isinstance(description.get("kind"), str):
        raise ValueError(f"{path} names no tokenizer kind. Save the tokenizer again.")
    return description
