"""Make the trained runs importable, and give the tests one folder with a corpus."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "text.txt").write_text("".join(f"def f{i % 9}(x):\n    return x + {i}\n" for i in range(900)))
    return folder
