"""An sbatch file that runs a configuration on several machines, under launcher `machines` or `ray`. Text only.

One task a machine runs the command; each task's `titan-train run` starts that machine's ranks. Before the time limit Slurm
sends SIGUSR2 to the batch shell alone. The shell sends SIGTERM to the run, which saves and ends, and puts the job back into
the queue: the same command continues it there. It signals the first machine's command itself: srun would answer SIGTERM by
killing its tasks. A SIGTERM of Slurm's own, as `scancel` sends it, ends the run without being put back.

Every value is quoted for the shell, or refused where a directive of sbatch cannot hold it.
"""

import re
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
    """Seconds before the time limit at which the run saves and ends."""
    port: int = 29500
    """Where the machines meet, on the first of them."""
    shared: bool = False
    """Take a part of each machine instead of all of it."""
    cpus: int = 0
    """CPUs of each machine; 0: all of a machine that is taken whole, else eight for each GPU (one for each CPU rank)."""
    memory: str = ""
    """Of each machine, as Slurm writes it; empty: all of a machine that is taken whole, else Slurm's default."""


def sbatch_text(config: Config, job: SlurmJob, ranks_per_node: int) -> str:
    """The batch file.

    Args:
        config: The whole configuration; its ``launch`` says how many machines, and who starts the ranks.
        job: What Slurm is asked for.
        ranks_per_node: GPUs (or CPU ranks) of each machine.

    Raises:
        ValueError: The launcher is `local` for more than one machine, or Slurm cannot take a value.
    """
    launch = config.launch
    if launch.launcher == "local" and launch.nnodes > 1:
        raise ValueError(
            f"launch.nnodes={launch.nnodes} needs --launcher machines or ray; 'local' starts ranks on one machine."
        )
    _refuse_odd(job)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", config.run.name)  # a directive ends at a space, and `%` is a pattern
    head = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={launch.nnodes}",
        "#SBATCH --ntasks-per-node=1",
        *_resources(job, ranks_per_node, gpus=launch.device != "cpu"),
        f"#SBATCH --time={job.time_limit}",
        f"#SBATCH --signal=B:USR2@{job.warn_s}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={name}-%j.log",
    ]
    head += [f"#SBATCH --{name}={value}" for name in ("partition", "account") if (value := getattr(job, name))]
    body = {"local": _local, "machines": _machines, "ray": _ray}[launch.launcher](config, job, ranks_per_node)
    return "\n".join([*head, "", "set -euo pipefail", _CPUS, *_TRAPS, *body, *_WAIT, ""])


def _resources(job: SlurmJob, ranks_per_node: int, *, gpus: bool) -> list[str]:
    """What one task a machine needs for all ranks there: by Slurm's defaults it has one CPU and a share of the memory."""
    cpus = job.cpus or (0 if not job.shared else ranks_per_node * (_CPUS_PER_GPU if gpus else 1))
    asked = {
        "gpus-per-node": str(ranks_per_node) if gpus else "",
        "cpus-per-task": str(cpus or ""),
        "mem": job.memory or ("" if job.shared else "0"),
    }
    whole = [] if job.shared else ["#SBATCH --exclusive"]
    return [*(f"#SBATCH --{name}={value}" for name, value in asked.items() if value), *whole]


_CPUS_PER_GPU = 8  # a rank, its loader and saver, NCCL's proxies, what tokenizes
# srun does not take over the job's CPUs per task (since Slurm 22.05), and would give each task one.
_CPUS = "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}"
# The command on the first machine, where the batch shell runs too, notes its process number for `stop`.
_NOTE = '[ "$SLURM_NODEID" != 0 ] || echo $$ > "$PID_FILE"; exec '
_NOTED = "bash -c " + shlex.quote(_NOTE + '"$@"') + " -"
_TRAPS = (
    "RUN=",
    "STOP=0",
    "WARNED=0",
    "export PID_FILE=$(mktemp)",
    "trap 'rm -f \"$PID_FILE\"' EXIT",
    "stop() {",
    "  STOP=$((STOP + 1))",
    '  local pid=$(cat "$PID_FILE")',
    "  kill -TERM ${pid:-$RUN} 2>/dev/null || true  # no number yet: nothing has begun that could save",
    "}",
    "trap 'WARNED=1; stop' USR2  # the time limit is near",
    "trap stop TERM",
)
# `wait` returns when a signal comes, with a code that is not the run's. Its code is asked for again then, even if the
# run has ended meanwhile; 127 says that the first answer was the run's own.
_WAIT = (
    "RUN=$!",
    'if [ "$STOP" != 0 ]; then stop; fi',
    "SEEN=$STOP",
    "CODE=0",
    "wait $RUN || CODE=$?",
    'while [ "$SEEN" != "$STOP" ]; do',
    "  SEEN=$STOP",
    "  AGAIN=0",
    "  wait $RUN 2>/dev/null || AGAIN=$?",
    '  if [ "$AGAIN" != 127 ]; then CODE=$AGAIN; fi',
    "done",
    'if [ "$WARNED" = 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
    "exit $CODE",
)
# Seconds that Ray may take to start.
_READY_S = 300
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|UNLIMITED|infinite", re.ASCII)
_MEMORY = re.compile(r"\d+[KMGT]?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,/+-]*")


def _refuse_odd(job: SlurmJob) -> None:
    if not _TIME.fullmatch(job.time_limit):
        raise ValueError(
            f"--time {job.time_limit[:60]!r} is not a time limit of Slurm. Write hours:minutes:seconds or days-hours, such as "
            "24:00:00 or 2-12."
        )
    if job.memory and not _MEMORY.fullmatch(job.memory):
        raise ValueError(
            f"--mem {job.memory[:60]!r} is not an amount of memory of Slurm. Write a number and K, M, G or T, such as 512G; 0 "
            "takes all of the machine's."
        )
    for name in ("partition", "account"):
        value = getattr(job, name)
        if value and not _NAME.fullmatch(value):
            raise ValueError(
                f"--{name} {value[:60]!r} is not a name of Slurm. Use letters, digits and _ . , / + - only."
            )


def _command(config: Config, job: SlurmJob, ranks_per_node: int) -> str:
    words = ["titan-train", "run", job.config, *job.overrides]
    settings = {"--launch.nproc": str(ranks_per_node), "--launch.nnodes": str(config.launch.nnodes)}
    words += [word for name, value in settings.items() if name not in job.overrides for word in (name, value)]
    return shlex.join(words)


def _local(config: Config, job: SlurmJob, ranks_per_node: int) -> list[str]:
    return [f"srun {_NOTED} {_command(config, job, ranks_per_node)} &"]


def _machines(config: Config, job: SlurmJob, ranks_per_node: int) -> list[str]:
    command = _command(config, job, ranks_per_node)
    return [
        'export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# each task's own shell fills in the number of its machine",
        "srun bash -c "
        + shlex.quote(f'{_NOTE}{command} --launch.endpoint "$HEAD:{job.port}" --launch.node-rank "$SLURM_NODEID"')
        + " &",
    ]


def _ray(config: Config, job: SlurmJob, ranks_per_node: int) -> list[str]:
    resources = f"--num-gpus {ranks_per_node}" if config.launch.device != "cpu" else f"--num-cpus {ranks_per_node}"
    on_head = 'srun --nodes=1 --ntasks=1 --overlap -w "$HEAD"'
    on_others = 'srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --overlap -x "$HEAD"'
    start_head = (
        f"ray start --head --port={job.port} {resources} --disable-usage-stats --include-dashboard=false --block"
    )
    address = f'--launch.ray.address "$HEAD:{job.port}" --launch.ray.wait-s {_READY_S}'
    return [
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export RAY_USAGE_STATS_ENABLED=0",
        "# one Ray node a machine; the first is the head, and the run's driver beside it",
        f"{on_head} {start_head} &",
        "NODE=$!",
        f'until timeout 20 ray status --address "$HEAD:{job.port}" > /dev/null 2>&1; do',
        '  kill -0 $NODE 2>/dev/null || { echo "error: the head of Ray ended" >&2; exit 1; }',
        f'  [ "$SECONDS" -lt {_READY_S} ] || {{ echo "error: no answer of the head of Ray in {_READY_S} s" >&2; exit 1; }}',
        "  sleep 1",
        "done",
        'if [ "$SLURM_NNODES" -gt 1 ]; then',
        f'  {on_others} ray start --address="$HEAD:{job.port}" {resources} --block &',
        "fi",
        "# the driver waits for the other nodes; a signal comes to this shell alone: Ray's nodes would leave at once",
        f"{on_head} {_NOTED} {_command(config, job, ranks_per_node)} {address} &",
    ]
