"""Every text that a person can meet: error messages, warnings, log lines, labels, and the help page of each command.

    python tests/texts.py            # write tests/texts/*.txt anew: then read the diff, as a reviewer will

The texts are read from the source, without running it: each string of three words or more that is not a docstring, with
the expressions of an f-string in braces. Help pages are what `--help` prints, 100 columns wide.
"""

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import import_graph

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "texts"
COMMANDS = {
    "titan-train": ["", *["run", "check", "generate", "report", "tokenizer", "prepare", "doctor", "slurm", "list"]],
    "titan-ckpt": [""],
    "titan-pipeline": [""],
}


def all_texts() -> dict[str, str]:
    """File name in `tests/texts` to what it should hold now."""
    found = {f"{package.name}.txt": messages(package) for package in import_graph.packages()}
    return found | {f"help-{command}.txt": help_pages(command) for command in COMMANDS}


def messages(package: Path) -> str:
    """The strings of a package's modules, under the name of each module."""
    pages: list[str] = []
    for name, file in import_graph.modules(package).items():
        lines = [line for text in _strings(ast.parse(file.read_text(encoding="utf-8"))) for line in _wrapped(text)]
        if lines:
            pages.append("\n".join([name, *lines]))
    return "\n\n".join(pages) + "\n"


def help_pages(command: str) -> str:
    """What `--help` prints for a command and each of its subcommands."""
    pages: list[str] = []
    for sub in COMMANDS[command]:
        words = [command, *sub.split(), "--help"]
        environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
        path = Path(sys.executable).parent / command
        done = subprocess.run([path, *words[1:]], capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        pages.append("$ " + " ".join(words) + "\n" + "\n".join(line.rstrip() for line in done.stdout.splitlines()))
    return "\n\n".join(pages) + "\n"


def _strings(tree: ast.Module) -> Iterator[str]:
    """In the order of the source."""
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in ast.walk(node) if part is not node)
    texts: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"{[^}]*}", "", text))) >= 3 and " " in text.strip():
            texts.append((node.lineno, text))
    yield from (text for _, text in sorted(texts, key=lambda found: found[0]))


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return "{" + ast.unparse(part.value) + ("!r" if part.conversion == ord("r") else "") + "}"
    assert isinstance(part, ast.Constant)
    return str(part.value)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)


def main() -> None:
    """Write the texts of now."""
    KEPT.mkdir(exist_ok=True)
    for name, text in all_texts().items():
        (KEPT / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(list(KEPT.iterdir()))} files in {KEPT.relative_to(ROOT)}; read the diff before you commit it")


if __name__ == "__main__":
    main()
