"""Make what the tests of composition share importable from every rank, without putting the folder on sys.path for others."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import composition


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a prepared corpus, for the runs of one module."""
    folder = tmp_path_factory.mktemp("composition")
    composition.prepare(folder)
    return str(folder)
