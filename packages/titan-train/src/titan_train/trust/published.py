"""What files that other people made may not ask of the programs that read them: transformers and a browser.

Some fields of a published folder's JSON files make transformers run code that is in no installed package: ``auto_map`` names
Python files in the folder, and an attention or experts implementation with a slash names a repository of kernels, which the
library `kernels` fetches from a hub and imports.

A page that we write or serve runs our script, and nothing that a file's text brings along: a content security policy names the
page's own scripts by their hashes, so that a text that got past the escaping would still not run. No torch, no transformers.
"""

import base64
import hashlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, cast

from titan_train.files import parse_json, read_text

_FILES = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "adapter_config.json",
)


def refuse_foreign_code(content: Any, where: str, *, of_folder: bool = True) -> None:
    """Refuse fields that lead to code, however deep they stand.

    Args:
        content: Of a JSON file.
        where: Names the file or setting, for the message.
        of_folder: Refuse Python files of the folder too (``auto_map``); else they are left to the caller.

    Raises:
        ValueError: Names the field.
    """
    for path, value in _fields(content):
        name = path.rpartition(".")[2]
        if name == "auto_map" and value and of_folder:
            raise ValueError(
                f"{where}: {path} names Python code in the folder, and code of a folder is never executed. Use a folder whose "
                "architecture is part of transformers."
            )
        if "implementation" in name and any("/" in text or ":" in text for text in _texts(value)):
            raise ValueError(
                f"{where}: {path}={value!r} names kernels on a hub, and code from a hub is never executed. Remove the field."
            )


def refuse_code_in(folder: Path, *, known: Container[str] = ()) -> None:
    """`refuse_foreign_code` of every file of a folder that transformers reads settings from.

    Args:
        folder: The folder.
        known: Values of ``model_type`` for which transformers takes its own classes, as it is told to trust no other code: files
            of such a folder may name some.

    Raises:
        ValueError: One asks for code, or is not JSON.
    """
    own = True
    for file in (folder / name for name in _FILES):
        if file.is_file():
            try:
                content: Any = parse_json(read_text(file))
            except ValueError as err:
                raise ValueError(f"{file} is not valid JSON ({err}). Fetch the folder again.") from err
            if file.name == "config.json" and isinstance(content, dict):
                own = str(cast("dict[str, Any]", content).get("model_type")) not in known
            refuse_foreign_code(content, str(file), of_folder=own)


def content_policy(*scripts: str, connect: bool = False) -> str:
    """The content of a page's ``Content-Security-Policy``.

    Args:
        scripts: The text of each of the page's own scripts, all between its tags.
        connect: The page may ask the server that it comes from.
    """
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{found}'" for found in hashes) or "'none'"
    own = "'self'" if connect else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src {own}; "
        "base-uri 'none'; form-action 'none'"
    )


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of an object, with its dotted path; a loop, because the nesting may be deep."""
    left: list[tuple[str, Any]] = [(path, value)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            for key, inner in cast("dict[Any, Any]", value).items():
                name = f"{path}.{key}" if path else str(key)
                yield name, inner
                left.append((name, inner))
        elif isinstance(value, list):
            left.extend((path, inner) for inner in cast("list[Any]", value))


def _texts(value: Any) -> list[str]:
    """The texts in a value: itself, or those of its parts' settings."""
    if isinstance(value, dict):
        return [text for inner in cast("dict[Any, Any]", value).values() for text in _texts(inner)]
    return [value] if isinstance(value, str) else []
