"""The Python code of every README, guide and concept page runs, in one fresh process, as a reader would paste it."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "AGENTS.md",
    "skills/*/SKILL.md",
    "packages/*/README.md",
    "examples/**/README.md",
    "docs/guides/*.md",
    "docs/concepts/[!_]*.md",
    "docs/reference/*.md",
)
# whose blocks are several files: their own tests write and run them
RUN_BY = {"docs/guides/add_a_schedule.md": "packages/titan-pipeline/tests/test_guides.py"}
READMES = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})


@pytest.mark.parametrize("readme", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(readme, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.M | re.S)
    if not blocks:
        pytest.skip("no python block")
    if (test := RUN_BY.get(str(readme.relative_to(ROOT)))) is not None:
        assert readme.name in (ROOT / test).read_text(), f"{test} does not run {readme.name}"
        pytest.skip(f"run by {test}")
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_file_the_readmes_link_to_exists():
    for readme in READMES:
        prose = re.sub(r"^```.*?^```|`[^`\n]+`(?!\])", "", readme.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*|\s\"[^\"]*\")?\)", prose):
            assert (readme.parent / target).exists(), f"{readme.relative_to(ROOT)} links to {target}"


def test_every_test_that_a_page_names_exists():
    for readme in READMES:
        for target, name in re.findall(r"\]\(([^)#:\s]+\.py) \"(test_\w+)\"\)", readme.read_text()):
            assert f"def {name}(" in (readme.parent / target).read_text(), f"{readme.relative_to(ROOT)}: {name}"


def test_every_setting_is_in_a_guide_an_example_or_a_shipped_configuration():
    from titan_train.config import Config
    from titan_train.config.words import settings_of

    shipped = ROOT.glob("packages/titan-train/src/titan_train/configs/*.toml")
    text = "\n".join(file.read_text() for file in (*READMES, *ROOT.glob("examples/**/*.toml"), *shipped))
    named = {word.replace("-", "_") for word in re.findall(r"[a-z0-9_-]+", text)}
    assert [".".join(keys) for keys, _, _ in settings_of(Config) if keys[-1] not in named] == []


LEAVES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.name not in ("titan-train", "__pycache__"))


@pytest.mark.parametrize("package", LEAVES)
def test_the_reference_has_every_public_name_once_after_an_example(package):
    page = (ROOT / "docs/reference" / f"{package.removeprefix('titan-')}.md").read_text()
    assert page.index("```python") < page.index("```{eval-rst}")
    modules = [package.replace("-", "_"), *(["titan_pipeline.runtime"] if package == "titan-pipeline" else [])]
    for module in map(importlib.import_module, modules):
        named = re.findall(rf"^\.\. (?:auto\w+|py:data):: {module.__name__}\.(\w+)$", page, re.M)
        assert sorted(named) == sorted(module.__all__)


def test_the_notebook_trains_plots_and_samples(tmp_path):
    notebook = json.loads((ROOT / "examples/13_notebook/train_and_plot.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)  # committed with its results, and its plots
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"])
    script = tmp_path / "notebook.py"
    check = "assert (trainer.run_dir / 'curves.png').read_bytes().startswith(b'\\x89PNG')"
    script.write_text("\n".join(["".join(cell["source"]) for cell in cells] + [check]))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:__main__", script], cwd=tmp_path, capture_output=True, text=True, timeout=170,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "MPLCONFIGDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 40: ['\"]def ", done.stdout, re.M)
    assert done.stdout.rstrip().endswith("report.html")
