"""The one command for a GPU machine runs here on the CPU, offline, with tiny shapes."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks/gpu"))
from sections import SECTIONS, Section  # noqa: E402

_SPEC = importlib.util.spec_from_file_location("gpu_command", ROOT / "benchmarks/gpu/run.py")
command = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(command)
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
    assert re.fullmatch(r"skipped: \d+ s left of 15", sections["attention"]["outcome"])


def test_all_sections_of_one_gpu_fit_the_default_budget():
    assert sum(section.expected_s for section in SECTIONS if section.gpus == 1) <= 800
    assert next(section.name for section in SECTIONS) == "run"


def test_the_command_runs_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run(tmp_path, "--only", "attention")
    assert json.loads((tmp_path / "gpu.json").read_text())["machine"]["commit"] == "unknown"


def test_a_section_that_is_ended_keeps_what_it_measured(tmp_path, monkeypatch):
    """It prints its result after each piece; here it hangs in the second one."""
    (tmp_path / "slow.py").write_text(
        "import time\nprint('one 1 ms')\n"
        """print('{"rows": {"one": 1}}')\nprint('{"rows', flush=True)\ntime.sleep(60)\n"""
    )
    section = Section("slow", "?", "", str(tmp_path / "slow.py"), expected_s=1, limit_s=3)
    arguments = argparse.Namespace(device="cpu", out=tmp_path)
    row = command._run(section, arguments, dict(os.environ), time.monotonic() + 60, 0)
    assert row["outcome"] == "failed: over 3 s"
    assert row["result"] == {"rows": {"one": 1}}
    assert row["last"] == ["one 1 ms"]


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
