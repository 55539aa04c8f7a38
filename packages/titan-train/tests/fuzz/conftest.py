"""Make the fuzzer's modules, and those of the composition tests, importable from every rank."""

import sys
from pathlib import Path

import pytest
from titan_testing import preload

preload("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parent.parent / name) for name in ("parallel", "train")),
]


@pytest.fixture(scope="session")
def fuzz_folder(tmp_path_factory):
    """A folder with a prepared corpus, which has documents of one character too."""
    from fuzz_corpus import prepare

    folder = tmp_path_factory.mktemp("fuzz")
    prepare(folder)
    return str(folder)
