"""The help page of each command, kept beside the tests: what a person reads first is read in review too.

    python tests/texts.py            # write tests/texts/*.txt and the table of other trainers again, and read the diff

A page is what `--help` prints, 100 columns wide, without the values of one configuration's settings.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from titan_train.cli import COMMANDS
from titan_train.config.elsewhere import markdown

ROOT = Path(__file__).parents[1]
COMING_FROM = ROOT / "docs/guides/coming_from.md"
KEPT = Path(__file__).parent / "texts"
SUBCOMMANDS = {"titan-train": ["", *COMMANDS], "titan-ckpt": [""], "titan-pipeline": [""]}
_PAGES = """\
import contextlib, importlib.metadata, json, sys
command, asked = sys.argv[1:]
(script,) = importlib.metadata.entry_points(group="console_scripts", name=command)
main = script.load()
for words in json.loads(asked):
    print("$ " + " ".join([command, *words]), flush=True)
    sys.argv[1:] = words
    with contextlib.suppress(SystemExit):
        main()
    print(flush=True)
"""


def help_pages(command: str) -> str:
    """What `--help` prints for a command and each of its subcommands."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    asked = [[*sub.split(), "--help"] for sub in SUBCOMMANDS[command]]
    done = subprocess.run(
        [sys.executable, "-c", _PAGES, command, json.dumps(asked)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).rstrip() + "\n"


def with_table(page: str) -> str:
    """The page for those who come from another trainer, with the table of now between its two marks."""
    before, mark, rest = page.partition("<!-- table -->\n")
    assert mark, f"{COMING_FROM} has lost its marks"
    return f"{before}{mark}\n{markdown()}\n\n<!-- /table -->{rest.partition('<!-- /table -->')[2]}"


def main() -> None:
    """Write the pages of now."""
    COMING_FROM.write_text(with_table(COMING_FROM.read_text(encoding="utf-8")), encoding="utf-8")
    for command in SUBCOMMANDS:
        (KEPT / f"help-{command}.txt").write_text(help_pages(command), encoding="utf-8")
    print(f"wrote {len(SUBCOMMANDS)} files in {KEPT.relative_to(ROOT)}; read the diff before you commit it")


if __name__ == "__main__":
    main()
