import subprocess

import pytest
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.launch.launchers.slurm import SlurmJob, sbatch_text


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


def test_the_warning_before_the_time_limit_goes_to_the_driver_alone_under_ray():
    assert "#SBATCH --signal=B:TERM@120" in written("--launch.launcher", "ray", "--launch.nproc", "4")
    assert "#SBATCH --signal=TERM@120" in written("--launch.launcher", "torchrun", "--launch.nproc", "4")


def test_the_command_writes_a_file_and_needs_the_ranks_of_a_machine(tmp_path, capsys):
    out = tmp_path / "job.sbatch"
    words = ["slurm", "debug", "--launcher", "torchrun", "--launch.nnodes", "2", "--launch.device", "cpu"]
    assert main([*words, "--launch.nproc", "2", "--out", str(out), "--partition", "short"]) == 0
    assert "#SBATCH --partition=short" in out.read_text()
    assert "#SBATCH --cpus-per-task=2" in out.read_text()
    assert main(words) == 2
    assert "Give the ranks per machine, such as --launch.nproc 8" in capsys.readouterr().err
