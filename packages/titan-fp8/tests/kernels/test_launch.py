"""The short way to launch a Triton kernel hands the compiled kernel what Triton's own path does, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "launch_time.py"


@pytest.fixture(scope="module")
def record():
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_launch_that_was_seen_before_gets_the_same_arguments(record):
    assert len(record["equal"]) == 7
    assert all(record["equal"].values()), record["equal"]


def test_hooks_still_see_a_launch_that_was_seen_before(record):
    assert record["hooks_see_launches"]
