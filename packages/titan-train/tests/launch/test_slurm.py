import contextlib
import os
import signal
import subprocess
import time

import pytest
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.launch.launchers.slurm import SlurmJob, sbatch_text

pytestmark = pytest.mark.timeout(900)  # shells that may share their cores with twenty others


def written(*words):
    config = load_config("debug", ["--launch.endpoint", "HEAD:29500", *words])
    return sbatch_text(config, SlurmJob("debug", words), 4)


@pytest.mark.parametrize("launcher", ["local", "torchrun", "ray"])
def test_the_batch_file_is_valid_shell_and_asks_for_the_machines(launcher, tmp_path):
    nodes = "1" if launcher == "local" else "3"
    text = written("--launch.launcher", launcher, "--launch.nnodes", nodes, "--launch.nproc", "4")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n" in text
    assert "#SBATCH --requeue" in text
    assert f"titan-train run debug --launch.launcher {launcher} --launch.nnodes {nodes} --launch.nproc 4" in text


def test_each_machine_is_told_its_number_by_its_own_shell():
    text = written("--launch.launcher", "torchrun", "--launch.nnodes", "3", "--launch.nproc", "4")
    line = next(line for line in text.splitlines() if line.startswith("srun"))
    echoed = line.replace("srun bash -c", "bash -c").replace("exec titan-train", "exec echo")
    environ = {"HEAD": "n0", "SLURM_NODEID": "2", "PATH": "/usr/bin:/bin"}
    shown = subprocess.run(["bash", "-c", echoed], env=environ, capture_output=True, text=True, check=True).stdout
    assert "--launch.endpoint n0:29500 --launch.node-rank 2" in shown


@pytest.fixture
def machine(tmp_path):
    """Slurm, Ray and the command as scripts that note how they were called."""
    stubs = {
        "srun": 'while [ "${1#-}" != "$1" ]; do if [ "$1" = -w ] || [ "$1" = -x ]; then shift; fi; shift; done; exec "$@"',
        "scontrol": 'echo "scontrol $*" >> "$LOG"; if [ "$1" = show ]; then echo n0; fi',
        "ray": '[ "$1" != status ] || { echo . >> "$LOG.asked"; [ "$(wc -l < "$LOG.asked")" -gt 2 ]; exit $?; }\n'
        "exec sleep 60",
        "titan-train": 'trap "echo saved >> $LOG; exit ${CODE_OF_RUN:-0}" TERM; echo "started $*" >> "$LOG"; '
        'for i in $(seq 200); do sleep 0.05; done; echo finished >> "$LOG"',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n".replace("\\n", "\n"))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def submitted(text, folder, *signals, **environ):
    """Run a batch file as slurmd does, send it signals once the run has started, and return its code and what was noted."""
    log = folder / "log"
    environ |= {
        "PATH": f"{folder}:/usr/bin:/bin",
        "LOG": str(log),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[0-2]",
    }
    environ |= {"SLURM_NNODES": "3", "SLURM_NODEID": "0"}
    (folder / "job.sbatch").write_text(text)
    process = subprocess.Popen(
        ["bash", str(folder / "job.sbatch")], env=environ, cwd=folder, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 150
        while not (log.exists() and "started" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for number in signals:
            process.send_signal(number)
        code = process.wait(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return code, log.read_text()


@pytest.mark.parametrize("launcher", ["local", "torchrun", "ray"])
def test_the_warning_saves_and_puts_the_job_back_into_the_queue(launcher, machine):
    nodes = "1" if launcher == "local" else "3"
    text = written("--launch.launcher", launcher, "--launch.nnodes", nodes, "--launch.nproc", "4")
    assert "#SBATCH --signal=B:USR2@120" in text
    code, log = submitted(text, machine, signal.SIGUSR2)
    assert code == 0
    assert log.index("saved") < log.index("scontrol requeue 77")
    assert "finished" not in log
    if launcher == "ray":  # asked until it answered, at the third time
        assert (machine / "log.asked").read_text().count(".") == 3


def test_a_cancelled_job_saves_and_is_not_put_back(machine):
    code, log = submitted(written("--launch.nproc", "4"), machine, signal.SIGTERM)
    assert (code, "saved" in log, "requeue" in log) == (0, True, False)


def test_the_code_of_the_run_is_the_code_of_the_job(machine):
    code, log = submitted(written("--launch.nproc", "4"), machine, signal.SIGTERM, CODE_OF_RUN="3")
    assert (code, "requeue" in log) == (3, False)


def test_a_run_that_ends_before_the_shell_asks_again_keeps_its_code(machine):
    text = written("--launch.nproc", "4").replace("\nwhile [", "\nsleep 1\nwhile [")  # a busy machine
    assert "sleep 1" in text
    code, log = submitted(text, machine, signal.SIGTERM, CODE_OF_RUN="3")
    assert (code, "saved" in log) == (3, True)


EVIL = "x\ntouch marker\n#"


@pytest.mark.parametrize(
    "words",
    [
        ["--partition", EVIL], ["--account", EVIL], ["--time", EVIL], ["--partition", "a b"], ["--time", "soon"],
        ["--partition", "-w n1"], ["--account", "$(touch marker)"], ["--time", "1;touch marker"], ["--run.name", EVIL],
        ["--launch.nproc", EVIL], ["--port", EVIL], ["--warn-s", EVIL],
    ],
)  # fmt: skip
def test_what_sbatch_cannot_hold_is_refused(words, tmp_path, capsys):
    out = tmp_path / "job.sbatch"
    assert main(["slurm", "debug", "--launch.nproc", "4", "--out", str(out), *words]) == 2
    assert not out.exists()
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("launcher", ["local", "torchrun", "ray"])
@pytest.mark.parametrize("value", [EVIL, "$(touch marker)", "`touch marker`", "';touch marker;'", '"; touch marker; "'])
def test_whatever_a_setting_holds_stays_one_word(launcher, value, machine):
    nodes = "1" if launcher == "local" else "3"
    text = written(
        "--launch.launcher",
        launcher,
        "--launch.nnodes",
        nodes,
        "--launch.nproc",
        "4",
        "--run.dir",
        value,
        "--run.name",
        "a b%j",
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "#SBATCH --job-name=a-b-j\n" in text
    code, log = submitted(text, machine, signal.SIGTERM)
    assert code == 0
    assert f"--run.dir {value} " in log
    assert not (machine / "marker").exists()


def test_the_command_writes_a_file_and_needs_the_ranks_of_a_machine(tmp_path, capsys):
    out = tmp_path / "job.sbatch"
    words = ["slurm", "debug", "--launcher", "torchrun", "--launch.nnodes", "2", "--launch.device", "cpu"]
    assert main([*words, "--launch.nproc", "2", "--out", str(out), "--partition", "short"]) == 0
    assert "#SBATCH --partition=short" in out.read_text()
    assert "#SBATCH --cpus-per-task=2" in out.read_text()
    assert main(words) == 2
    assert "Give the ranks per machine, such as --launch.nproc 8" in capsys.readouterr().err
