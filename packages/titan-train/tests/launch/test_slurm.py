import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time

import pytest
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.launch.place.slurm import SlurmJob, sbatch_text

pytestmark = pytest.mark.timeout(900)  # shells that may share their cores with twenty others


def written(*words):
    config = load_config("debug", ["--launch.endpoint", "HEAD:29500", *words])
    return sbatch_text(config, SlurmJob("debug", words), 4)


@pytest.mark.parametrize("launcher", ["local", "machines", "ray"])
def test_the_batch_file_is_valid_shell_and_asks_for_the_machines(launcher, tmp_path):
    nodes = "1" if launcher == "local" else "3"
    text = written("--launch.launcher", launcher, "--launch.nnodes", nodes, "--launch.nproc", "4")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    wanted = ("--ntasks-per-node=1", "--gpus-per-node=4", "--mem=0", "--exclusive")
    assert "".join(f"#SBATCH {option}\n" for option in (f"--nodes={nodes}", *wanted)) in text
    assert text.index("export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}") < text.index(
        "srun "
    )
    assert "#SBATCH --requeue" in text
    assert f"titan-train run debug --launch.launcher {launcher} --launch.nnodes {nodes} --launch.nproc 4" in text


def test_each_machine_is_told_its_number_by_its_own_shell():
    text = written("--launch.launcher", "machines", "--launch.nnodes", "3", "--launch.nproc", "4")
    line = next(line for line in text.splitlines() if line.startswith("srun"))
    echoed = line.replace("srun bash -c", "bash -c").replace("exec titan-train", "exec echo")
    environ = {"HEAD": "n0", "SLURM_NODEID": "2", "PATH": "/usr/bin:/bin"}
    shown = subprocess.run(["bash", "-c", echoed], env=environ, capture_output=True, text=True, check=True).stdout
    assert "--launch.endpoint n0:29500 --launch.node-rank 2" in shown


@pytest.fixture
def machine(tmp_path):
    """Slurm, Ray and the command as scripts that note how they were called."""
    stubs = {
        # as srun, which answers SIGTERM by killing its tasks (src/srun/srun_job.c, `_srun_signal_mgr`)
        "srun": 'while [ "${1#-}" != "$1" ]; do if [ "$1" = -w ] || [ "$1" = -x ]; then shift; fi; shift; done\n'
        '"$@" & CHILD=$!; trap "kill -KILL $CHILD" TERM; CODE=0; wait $CHILD || CODE=$?; exit $CODE',
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
        "TMPDIR": str(folder),
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


@pytest.mark.parametrize("launcher", ["local", "machines", "ray"])
def test_the_warning_saves_and_puts_the_job_back_into_the_queue(launcher, machine):
    nodes = "1" if launcher == "local" else "3"
    text = written("--launch.launcher", launcher, "--launch.nnodes", nodes, "--launch.nproc", "4")
    assert "#SBATCH --signal=B:USR2@120" in text
    code, log = submitted(text, machine, signal.SIGUSR2)
    assert code == 0
    assert log.index("saved") < log.index("scontrol requeue 77")
    assert "finished" not in log
    assert not list(machine.glob("tmp.*"))
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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Slurm's own controller for two machines of 8 GPUs and 96 CPUs that nobody starts; ``sbatch`` asks it."""
    if shutil.which("sbatch") is None or shutil.which("slurmctld") is None:
        pytest.skip("Slurm is not installed (Debian: slurm-wlm)")
    folder = tmp_path_factory.mktemp("slurm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = folder / "slurm.conf"
    conf.write_text(
        f"ClusterName=test\nSlurmctldHost={socket.gethostname().partition('.')[0]}(127.0.0.1)\nSlurmctldPort={port}\n"
        f"AuthType=auth/none\nCredType=cred/none\nSlurmUser={getpass.getuser()}\nStateSaveLocation={folder}\n"
        f"SlurmctldPidFile={folder}/pid\nProctrackType=proctrack/linuxproc\nSelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_Core_Memory\nGresTypes=gpu\nMpiDefault=none\nSuspendProgram=/bin/true\n"
        "ResumeProgram=/bin/true\nSuspendTime=-1\nAccountingStorageType=accounting_storage/none\n"
        "NodeName=n[0-1] CPUs=96 Sockets=2 CoresPerSocket=48 RealMemory=1000000 Gres=gpu:8 State=CLOUD\n"
        "PartitionName=short Nodes=ALL Default=YES State=UP\n"
    )
    environ = os.environ | {"SLURM_CONF": str(conf)}
    command = ["slurmctld", "-D", "-c", "-f", str(conf)]
    controller = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while subprocess.run(["scontrol", "ping"], env=environ, capture_output=True, check=False).returncode:
            assert controller.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield environ
    finally:
        controller.kill()
        controller.wait()


@pytest.mark.parametrize(
    ("launcher", "options", "processors"),
    [
        ("local", {}, 96), ("machines", {}, 192), ("ray", {"cpus": 48}, 192), ("machines", {"shared": True}, 128),
        ("machines", {"shared": True, "cpus": 24, "memory": "100G", "partition": "short"}, 48),
    ],
)  # fmt: skip
def test_slurm_itself_accepts_the_batch_file_and_gives_the_cores(slurm, tmp_path, launcher, options, processors):
    nodes = "1" if launcher == "local" else "2"
    words = ("--launch.launcher", launcher, "--launch.nnodes", nodes, "--launch.nproc", "8")
    config = load_config("debug", ["--launch.endpoint", "HEAD:29500", *words])
    (tmp_path / "job.sbatch").write_text(sbatch_text(config, SlurmJob("debug", words, **options), 8))
    asked = subprocess.run(
        ["sbatch", "--test-only", str(tmp_path / "job.sbatch")], env=slurm, capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    assert f"using {processors} processors" in asked.stderr


EVIL = "x\ntouch marker\n#"


@pytest.mark.parametrize(
    "words",
    [
        ["--partition", EVIL], ["--account", EVIL], ["--time", EVIL], ["--partition", "a b"], ["--time", "soon"],
        ["--partition", "-w n1"], ["--account", "$(touch marker)"], ["--time", "1;touch marker"], ["--run.name", EVIL],
        ["--launch.nproc", EVIL], ["--port", EVIL], ["--warn-s", EVIL], ["--mem", EVIL], ["--cpus-per-task", EVIL],
    ],
)  # fmt: skip
def test_what_sbatch_cannot_hold_is_refused(words, tmp_path, capsys):
    out = tmp_path / "job.sbatch"
    assert main(["slurm", "debug", "--launch.nproc", "4", "--out", str(out), *words]) == 2
    assert not out.exists()
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("launcher", ["local", "machines", "ray"])
def test_a_setting_stays_one_word_whatever_it_holds(launcher, machine):
    value = f"{EVIL}\n$(touch marker)`touch marker`';touch marker;'\"; touch marker; "
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
    words = ["slurm", "debug", "--launcher", "machines", "--launch.nnodes", "2", "--launch.device", "cpu"]
    assert main([*words, "--launch.nproc", "2", "--out", str(out), "--partition", "short"]) == 0
    assert "#SBATCH --partition=short" in out.read_text()
    assert "gpus" not in out.read_text()
    assert main([*words, "--launch.nproc", "2", "--out", str(out), "--shared", "--mem", "64G"]) == 0
    assert "#SBATCH --cpus-per-task=2\n#SBATCH --mem=64G\n" in out.read_text()
    assert "--exclusive" not in out.read_text()
    assert main(words) == 2
    assert "Give the ranks per machine, such as --launch.nproc 8" in capsys.readouterr().err
