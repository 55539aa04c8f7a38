"""Which rank a process is, and how many ranks this machine runs. No torch: the launcher must start fast."""

import contextlib
import math
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan_train.config import LaunchConfig
from titan_train.launch.rank.environment import whole_number

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One worker's place among all workers."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device_type: DeviceType
    store: str | None
    """How ranks find each other: a file on their one machine, or "host:port" of a store whose server rank 0 is;
    None reads torchrun's MASTER_ADDR and MASTER_PORT."""


def under_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started as a rank by torchrun (or anything that sets the same variables)."""
    return all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))


def ranks_from_torchrun(launch: LaunchConfig, environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read torchrun's variables.

    Raises:
        ValueError: A variable is not a number in its range, or ``launch.nproc`` was set to another number than torchrun started.
    """
    world = whole_number("WORLD_SIZE", environ, least=1)
    rank = whole_number("RANK", environ, least=0, most=world - 1)
    local = whole_number("LOCAL_WORLD_SIZE", environ, least=1, most=world) if "LOCAL_WORLD_SIZE" in environ else world
    local_rank = whole_number("LOCAL_RANK", environ, least=0, most=local - 1)
    if launch.nproc not in (0, local):
        raise ValueError(
            f"launch.nproc={launch.nproc}, but torchrun started {local} ranks on this machine. "
            "Leave launch.nproc at 0 under torchrun."
        )
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        local_world_size=local,
        device_type=device_type(launch),
        store=None,
    )


def count_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """NVIDIA GPUs this process may use, without importing torch or creating a CUDA context.

    Where a GPU is cut into instances (MIG), CUDA shows a process one of them, and no other GPU.
    """
    present = len([p for p in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)])
    if not present and (root / "dev/dxg").exists():  # WSL 2: Windows' driver, without a device file for each GPU
        present = len(re.findall(r"^GPU \d+:", listed_gpus(root), re.MULTILINE))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if present and (mig_instances(root) or (visible is not None and "MIG-" in visible)):
        return 0 if visible in ("", "-1") else 1
    if visible is None:
        return present
    named = [item for item in visible.split(",") if item.strip() and item.strip() != "-1"]
    return min(present, len(named))


def listed_gpus(root: Path = Path("/")) -> str:
    """What ``nvidia-smi -L`` prints: a line for each GPU, and one for each instance of it; empty where it does not run."""
    for folder in (*os.get_exec_path(), "/usr/lib/wsl/lib"):
        command = root / folder.lstrip("/") / "nvidia-smi"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run([command, "-L"], capture_output=True, text=True, timeout=20, check=False).stdout
    return ""


def mig_instances(root: Path = Path("/")) -> int:
    """Instances that the GPUs of this machine are cut into (MIG); 0 where they are whole."""
    return len(list((root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*/ci*")))


def device_type(launch: LaunchConfig) -> DeviceType:
    """The device that ``launch.device`` means on this machine.

    Raises:
        ValueError: CUDA was asked for and there is no GPU.
    """
    if launch.device == "auto":
        return "cuda" if count_gpus() else "cpu"
    if launch.device == "cuda" and not count_gpus():
        raise ValueError(
            "launch.device='cuda', but this machine shows no NVIDIA GPU. Use 'cpu', or see `titan-train doctor`."
        )
    return launch.device


def ranks_per_node(launch: LaunchConfig, degrees: int = 1) -> int:
    """Ranks that `titan-train run` starts on each machine.

    With ``launch.nproc=0`` a rank for each GPU. On CPUs one process with all cores, unless the degrees need more: ranks
    of one machine share its cores and its memory, so several only exchange what one has at hand, and their shards
    together are what one holds.

    Args:
        launch: Where ranks run.
        degrees: Ranks that the parallel degrees need, over all machines.

    Raises:
        ValueError: More ranks than GPUs were asked for, or the local launcher for more machines than this one.
    """
    if launch.launcher == "local" and launch.nnodes > 1:
        raise ValueError(
            f"launch.nnodes={launch.nnodes}: launcher 'local' starts ranks on this machine only. Use --launcher ray, or "
            "--launcher machines on every machine (`titan-train slurm` writes the batch file)."
        )
    if launch.launcher == "ray":
        return _ranks_per_ray_node(launch, degrees)
    if device_type(launch) == "cpu":
        return launch.nproc or math.ceil(degrees / launch.nnodes)
    gpus = count_gpus()
    if launch.nproc > gpus:
        if mig_instances():
            raise ValueError(
                f"launch.nproc={launch.nproc}, but the GPUs of this machine are cut into instances (MIG): a process sees one, "
                "and NCCL joins none of them. Use launch.nproc=1, or turn MIG off (`sudo nvidia-smi -mig 0`)."
            )
        raise ValueError(
            f"launch.nproc={launch.nproc}, but this machine has {gpus} GPUs: two ranks cannot share a GPU. "
            f"The nearest valid choice is {gpus}; for CPU ranks add --launch.device cpu."
        )
    return launch.nproc or gpus


def _ranks_per_ray_node(launch: LaunchConfig, degrees: int) -> int:
    """The nodes of a cluster are not this machine: their GPUs are Ray's to count, so the number must be given."""
    if launch.nproc:
        return launch.nproc
    if launch.ray.address:
        raise ValueError(
            "launch.nproc=0: with --launcher ray and an address, give the ranks per node, such as --launch.nproc 8."
        )
    return count_gpus() or math.ceil(degrees / launch.nnodes)
