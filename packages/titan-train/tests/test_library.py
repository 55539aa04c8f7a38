import subprocess
import sys
from pathlib import Path

import pytest
import titan_train

EXAMPLE = Path(__file__).parents[3] / "examples" / "10_from_python"


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("name", titan_train.__all__)
def test_every_public_name_is_there(name):
    assert getattr(titan_train, name) is not None


def test_dir_is_the_api_and_nothing_else():
    code = "import titan_train, titan_train.config.load; assert dir(titan_train) == sorted(titan_train.__all__), dir(titan_train)"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = titan_train.Trainr


def test_importing_the_package_imports_neither_torch_nor_numpy():
    code = "import sys, titan_train; sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert python(code).returncode == 0


def test_listing_what_is_shipped_does_not_import_torch():
    code = "import sys; from titan_train.cli import main; assert main(['list']) == 0; sys.exit('torch' in sys.modules)"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
    assert "llama3_405b" in done.stdout


def test_the_function_is_public_whatever_was_imported_first():
    code = (
        "import titan_train.generation.decode, titan_train; from titan_train import generate; assert callable(generate)"
    )
    assert python(code).returncode == 0


def test_the_example_is_fifteen_lines_that_the_readme_quotes():
    lines = (EXAMPLE / "train.py").read_text().splitlines()
    assert len(lines) <= 15
    assert "\n".join(lines[2:]) in (EXAMPLE / "README.md").read_text()


def test_the_example_with_parts_of_its_own_trains(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE / "own_parts.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 8: loss" in done.stdout
    assert "saved step 8" in done.stdout
