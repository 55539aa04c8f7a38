"""Share the trained runs of the export tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "export"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    (folder / "text.txt").write_text("".join(f"def f{i % 9}(x):\n    return x + {i}\n" for i in range(900)))
    return folder
