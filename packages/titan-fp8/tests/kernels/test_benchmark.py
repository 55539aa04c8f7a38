"""The GPU benchmark runs end to end on the CPU with tiny shapes, so that it works when a GPU is at hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "on_gpu.py"


def _check(*arguments):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_casts_section_runs_and_reports_its_goals(tmp_path):
    record = _check("--sections", "casts", "--out", str(tmp_path))
    assert record["check"] is True
    assert record["goals"]["casts equal to the reference"]["reached"]
    assert set(record["goals"]["dual cast over two casts"]) == {"value", "wanted", "reached"}
    assert not list(tmp_path.iterdir())  # figures of a check are not results


@pytest.mark.slow
def test_all_sections_run():
    record = _check()
    assert {"ceilings", "casts", "linears", "grouped", "stack", "goals"} <= set(record)
    assert (
        record["linears"]["tiny"]["blockwise"]["saved_bytes"] <= 0.55 * record["linears"]["tiny"]["bf16"]["saved_bytes"]
    )
