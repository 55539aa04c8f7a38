"""An sbatch file that runs a configuration on several machines, under launcher `torchrun` or `ray`. Text only.

One task a machine runs the command; each task's `titan-train run` starts that machine's ranks. Slurm's warning before
the time limit reaches every task as SIGTERM: the run saves and ends, and `--requeue` with the same command continues it.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from titan_train.config import Config


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What Slurm is asked for."""

    config: str
    """The configuration's file or name, as typed."""
    overrides: Sequence[str]
    """Settings given on the command line."""
    time_limit: str = "24:00:00"
    partition: str = ""
    account: str = ""
    warn_s: int = 120
    """Seconds before the time limit at which the run is told to save and end."""
    port: int = 29500
    """Where the machines meet, on the first of them."""


def sbatch_text(config: Config, job: SlurmJob, ranks_per_node: int) -> str:
    """The batch file.

    Args:
        config: The whole configuration; its ``launch`` says how many machines, and who starts the ranks.
        job: What Slurm is asked for.
        ranks_per_node: GPUs (or CPU ranks) of each machine.

    Raises:
        ValueError: The launcher is `local` for more than one machine.
    """
    launch = config.launch
    if launch.launcher == "local" and launch.nnodes > 1:
        raise ValueError(
            f"launch.nnodes={launch.nnodes} needs --launcher torchrun or ray; 'local' starts ranks on one machine."
        )
    head = [
        "#!/bin/bash",
        f"#SBATCH --job-name={config.run.name}",
        f"#SBATCH --nodes={launch.nnodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={ranks_per_node}"
        if launch.device != "cpu"
        else f"#SBATCH --cpus-per-task={ranks_per_node}",
        f"#SBATCH --time={job.time_limit}",
        f"#SBATCH --signal={'B:' if launch.launcher == 'ray' else ''}TERM@{job.warn_s}",
        "#SBATCH --requeue",
        f"#SBATCH --output={config.run.name}-%j.log",
    ]
    head += [f"#SBATCH --{name}={value}" for name in ("partition", "account") if (value := getattr(job, name))]
    body = {"local": _local, "torchrun": _torchrun, "ray": _ray}[launch.launcher](config, job, ranks_per_node)
    return "\n".join([*head, "", "set -euo pipefail", *body, ""])


def _command(config: Config, job: SlurmJob, ranks_per_node: int) -> str:
    words = ["titan-train", "run", job.config, *job.overrides]
    settings = {"--launch.nproc": str(ranks_per_node), "--launch.nnodes": str(config.launch.nnodes)}
    words += [word for name, value in settings.items() if name not in job.overrides for word in (name, value)]
    return shlex.join(words)


def _local(config: Config, job: SlurmJob, ranks_per_node: int) -> list[str]:
    return [f"srun {_command(config, job, ranks_per_node)}"]


def _torchrun(config: Config, job: SlurmJob, ranks_per_node: int) -> list[str]:
    command = _command(config, job, ranks_per_node)
    return [
        'export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# each task's own shell fills in the number of its machine",
        "srun bash -c "
        + shlex.quote(f'exec {command} --launch.endpoint "$HEAD:{job.port}" --launch.node-rank "$SLURM_NODEID"'),
    ]


def _ray(config: Config, job: SlurmJob, ranks_per_node: int) -> list[str]:
    resources = f"--num-gpus {ranks_per_node}" if config.launch.device != "cpu" else f"--num-cpus {ranks_per_node}"
    on_head = 'srun --nodes=1 --ntasks=1 --overlap -w "$HEAD"'
    on_others = 'srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --overlap -x "$HEAD"'
    start_head = (
        f"ray start --head --port={job.port} {resources} --disable-usage-stats --include-dashboard=false --block"
    )
    address = f'--launch.ray.address "$HEAD:{job.port}" --launch.ray.wait-s 300'
    return [
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export RAY_USAGE_STATS_ENABLED=0",
        "# one Ray node a machine; the first is the head, and the run's driver beside it",
        f"{on_head} {start_head} &",
        "sleep 20",
        'if [ "$SLURM_NNODES" -gt 1 ]; then',
        f'  {on_others} ray start --address="$HEAD:{job.port}" {resources} --block &',
        "fi",
        f"{on_head} {_command(config, job, ranks_per_node)} {address} &",
        "# the warning comes to this shell alone: Ray's nodes would leave at once",
        "RUN=$!",
        "trap 'kill -TERM $RUN' TERM",
        "wait $RUN || wait $RUN",
    ]
