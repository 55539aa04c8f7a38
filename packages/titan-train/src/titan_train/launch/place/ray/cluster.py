"""Connecting to a Ray cluster or starting one here: what its nodes share, and how a run names its actors there."""

import contextlib
import hashlib
import os
import platform
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from titan_train.config import LaunchConfig
from titan_train.observe.run_info import versions

NAMESPACE = "titan-train"
_FORWARDED = (
    "TITAN_TRAIN_CODE", "OMP_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TRITON_", "FI_", "UCX_",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
)  # fmt: skip
_CONNECT_S = 5.0


def connect(launch: LaunchConfig, world_size: int) -> Any:
    """Connect to ``launch.ray.address``, or start a cluster on this machine's loopback; return the module ``ray``.

    Raises:
        ValueError: Ray is not installed, nothing answers at the address, or its version differs.
    """
    address = launch.ray.address
    if not address:
        # Ray listens on the node's address; with this set it takes loopback, since there is no cluster to join.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray prints pages of its own state when a node dies; the supervisor reports it in a line
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "Raylet is terminated|has been marked dead|A worker died")
    try:
        import ray
    except ImportError:
        raise ValueError("--launcher ray needs Ray, which is not installed: pip install 'titan-train[ray]'.") from None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if not address:
        with _away():
            _start_here(ray, max(1, round(launch.ray.cpus_per_rank * world_size + 0.5)), options)
        return ray
    _check_reachable(address)
    before = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    try:
        with _away():
            ray.init(address=address, **options)
    except ConnectionError as err:
        raise ValueError(f"no Ray cluster at launch.ray.address={address!r}: {first_line(err)}") from err
    except RuntimeError as err:
        raise ValueError(f"the Ray cluster at {address!r} cannot be used: {first_line(err)}") from err
    if before is not None:  # Ray takes SIGTERM for itself
        signal.signal(signal.SIGTERM, before)
    return ray


def _away() -> contextlib.AbstractContextManager[None]:
    """Leave the working directory, which Ray puts before all else on the import path of every actor.

    Python's own library is entered in its place: it is on that path already.
    """
    return contextlib.chdir(Path(os.__file__).parent)


def _start_here(ray: Any, cpus: int, options: dict[str, Any]) -> None:
    """Start a cluster of one node. Ray gives it 30 s, too short for a cold disk; the second time its files are read."""
    for last in (False, True):
        try:
            ray.init(
                address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=100 * 2**20, **options
            )
            return
        except Exception as err:  # Ray's own type for a node that does not start
            if last or "timed out during startup" not in str(err):
                raise ValueError(
                    f"Ray could not start a cluster on this machine: {first_line(err)} Where it only needs longer, start one "
                    "with `ray start --head` and give its address: --ray.address auto."
                ) from err


def node_versions() -> dict[str, str]:
    """Versions that must be the same on every node."""
    return {"python": platform.python_version(), **versions()}


def agent_prefix(run_dir: Path) -> str:
    """What the names of a run's detached actors begin with, on every node."""
    return f"{run_dir.name}-{hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]}/"


def forwarded(launch: LaunchConfig) -> dict[str, str]:
    """The environment variables of this process that ranks on other nodes shall have."""
    return {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED) or name in launch.ray.env}


def _check_reachable(address: str) -> None:
    """Ray itself would try for half a minute, and not say so."""
    if address == "auto" or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"launch.ray.address={address!r} is not host:port, such as 'head:6379', nor 'auto'.")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as err:
        raise ValueError(
            f"nothing answers at launch.ray.address={address!r} ({err}). Start a head with `ray start --head`, or leave "
            "the address empty to start a cluster on this machine."
        ) from err


def first_line(err: BaseException) -> str:
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
