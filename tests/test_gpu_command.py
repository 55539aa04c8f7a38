"""The one command for a GPU machine runs here on the CPU, offline, with tiny shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = [sys.executable, ROOT / "benchmarks/gpu/run.py"]


def run(out: Path, *arguments: str) -> dict:
    command = [*RUN, "--out", out, "--device", "cpu", "--tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (out / "gpu.log").read_text()
    return json.loads((out / "gpu.json").read_text())["sections"]


def test_a_section_leaves_its_figures_and_the_same_command_does_not_repeat_it(tmp_path):
    first = run(tmp_path, "--only", "attention")
    assert first["attention"]["outcome"] == "ok"
    assert first["attention"]["result"]["rows"]["causal, 64"]["ms"] > 0
    assert "| attention |" in (tmp_path / "gpu.md").read_text()
    assert run(tmp_path, "--only", "attention", "fsdp")["attention"] == first["attention"]


def test_what_the_budget_does_not_allow_is_skipped_and_said(tmp_path):
    sections = run(tmp_path, "--only", "attention", "--budget", "1")
    assert sections["attention"]["outcome"] == "skipped: no time left"


def test_a_device_that_is_not_there_is_a_failure_of_the_section(tmp_path):
    done = subprocess.run([*RUN, "--out", tmp_path, "--only", "attention"], capture_output=True, text=True, check=False)
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert (done.returncode, sections["attention"]["outcome"]) == (1, "failed: exit code 1")


def test_a_folder_of_wheels_that_is_not_there_is_refused(tmp_path):
    command = [*RUN, "--out", tmp_path, "--wheels", tmp_path / "none", "--only", "attention"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no such folder" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_runs(tmp_path):
    assert {row["outcome"] for row in run(tmp_path).values()} == {"ok"}
