"""The steps of docs/guides/change_the_checkpoint_format.md, applied to a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import titan_ckpt

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "change_the_checkpoint_format.md"


def apply(diff: str, file: Path) -> None:
    """Replace the one place where the lines without ``+`` stand by the lines without ``-``."""
    lines = diff.splitlines()
    old = "\n".join(line[1:] for line in lines if line[0] != "+")
    new = "\n".join(line[1:] for line in lines if line[0] != "-")
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} does not have exactly once:\n{old}"
    file.write_text(text.replace(old, new))


def test_the_guides_change_is_written_read_and_checked_and_old_steps_load(tmp_path):
    blocks = re.findall(r"```\{code-block\} (\w+)\n:caption: (\S+)\n\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert [kind for kind, _, _ in blocks] == ["diff"] * 6 + ["python"]
    package = tmp_path / "src" / "titan_ckpt"
    shutil.copytree(Path(titan_ckpt.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for kind, name, text in blocks:
        if kind == "diff":
            apply(text, package / name)
        else:
            (tmp_path / name).write_text(text)
    with tarfile.open(Path(__file__).with_name("old_steps.tar.xz")) as packed:
        packed.extractall(tmp_path / "old", filter="data")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "check.py"), str(tmp_path / "new"), str(tmp_path / "old" / "1")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    assert "'host' is not of the type that FORMAT.md says" in ran.stdout
