"""What decides whether and how fast the GPUs of a machine train together: driver, NVLink, sockets, InfiniBand, limits.

Read from files of the kernel and from ``nvidia-smi``, without CUDA. Each line says what to do.
"""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan_train.launch.rank.info import mig_instances

Ask = Callable[[Sequence[str]], str]
"""The output of a command; empty where it does not run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    level: Literal["ok", "note", "missing"]
    name: str
    text: str


def diagnose_cluster(
    torch_cuda: str | None, memlock: int | None, *, root: Path = Path("/"), ask: Ask | None = None
) -> Iterator[Finding]:
    """Look at what GPUs and machines are connected by.

    Args:
        torch_cuda: The CUDA version that torch was built for, such as ``12.8``; None without CUDA.
        memlock: Bytes that a process may lock; None without limit.
        root: Where the file system begins.
        ask: Runs a command.
    """
    ask = ask or _ask
    banner = ask(["nvidia-smi"])
    gpus = _gpus(root)
    if "Driver Version" in banner:
        yield _driver(banner, torch_cuda)
    if len(gpus) > 1:
        yield _links(ask(["nvidia-smi", "topo", "-m"]))
        yield from _peers(ask(["nvidia-smi", "topo", "-p2p", "r"]))
    if gpus:
        yield from _sockets(gpus, root)
    if instances := mig_instances(root):
        text = f"{instances} instances: a process uses one, and NCCL joins none. To train on whole GPUs: sudo nvidia-smi -mig 0"
        yield Finding("note", "mig", text)
    adapters = _adapters(root)
    yield from _infiniband(adapters, root, gpus=bool(gpus))
    yield _locked(memlock, rdma=bool(adapters))
    yield from _shared_memory(root)


def _driver(banner: str, torch_cuda: str | None) -> Finding:
    driver, cuda = (re.search(rf"{name} Version:\s*([\d.]+)", banner) for name in ("Driver", "CUDA"))
    known = f"{driver[1] if driver else 'unknown'}, for CUDA up to {cuda[1] if cuda else 'unknown'}"
    if torch_cuda is None:
        return Finding("note", "driver", f"{known}, but torch was built without CUDA: install a CUDA build of torch")
    if cuda is not None and int(cuda[1].split(".")[0]) < int(torch_cuda.split(".")[0]):
        return Finding(
            "missing", "driver",
            f"{known}, and torch was built for CUDA {torch_cuda}: install a newer driver, or torch for CUDA "
            f"{cuda[1].split('.')[0]}",
        )  # fmt: skip
    return Finding("ok", "driver", f"{known}; torch uses {torch_cuda}")


def _matrix(text: str) -> dict[tuple[int, int], str]:
    """The cells of one of ``nvidia-smi topo``'s tables, between GPUs."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    rows = re.findall(r"^\s*GPU(\d+)\s+(\S.*)$", text, re.MULTILINE)
    rows = [(int(row), cells.split()) for row, cells in rows if not cells.startswith("GPU")]
    return {
        (row, column): cell for row, cells in rows for column, cell in enumerate(cells[: len(rows)]) if row != column
    }


def _links(topology: str) -> Finding:
    cells = _matrix(topology)
    if not cells:
        return Finding("note", "nvlink", "unknown: `nvidia-smi topo -m` prints no table. Check the links by hand")
    kinds = sorted(set(cells.values()))
    if all(kind.startswith("NV") for kind in kinds):
        return Finding("ok", "nvlink", f"between all GPUs ({', '.join(kinds)})")
    without = sum(not kind.startswith("NV") for kind in cells.values()) // 2
    return Finding(
        "note", "nvlink",
        f"{without} of {len(cells) // 2} pairs of GPUs have none ({', '.join(kinds)}): keep parallel.tp and cp within linked "
        "GPUs, or at 1",
    )  # fmt: skip


def _peers(table: str) -> Iterator[Finding]:
    cells = _matrix(table)
    refused = [pair for pair, cell in cells.items() if cell != "OK" and pair[0] < pair[1]]
    if refused:
        first = ", ".join(f"{a}-{b} ({cells[a, b]})" for a, b in refused[:4])
        yield Finding(
            "note", "peer access",
            f"off between GPUs {first}{' and more' if len(refused) > 4 else ''}: NCCL copies through host memory. Turn off "
            "ACS and the IOMMU (iommu=pt) in firmware and kernel",
        )  # fmt: skip
    elif cells:
        yield Finding("ok", "peer access", "on between all GPUs")


def _gpus(root: Path) -> list[Path]:
    """PCI folders of NVIDIA's GPUs."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    return [d for d in devices if _read(d / "vendor") == "0x10de" and _read(d / "class").startswith("0x03")]


def _sockets(gpus: list[Path], root: Path) -> Iterator[Finding]:
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if nodes < 2:
        return
    at = {gpu.name: int(_read(gpu / "numa_node") or -1) for gpu in gpus}
    if any(node < 0 for node in at.values()):
        yield Finding(
            "note", "numa",
            f"{nodes} nodes, and the firmware does not say which one a GPU is on: ranks are not bound. Bind them by hand "
            "(numactl), or look for a NUMA setting of the firmware or of the virtual machine",
        )  # fmt: skip
        return
    each = "; ".join(f"node {node}: {sum(n == node for n in at.values())} GPUs" for node in sorted(set(at.values())))
    yield Finding("ok", "numa", f"{nodes} nodes, {each}; ranks keep to their GPU's (launch.bind_numa)")


def _adapters(root: Path) -> dict[str, tuple[str, str]]:
    """State and rate of every port of RDMA adapters."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return {f"{port.parents[1].name}/{port.name}": (_read(port / "state"), _read(port / "rate")) for port in ports}


def _infiniband(adapters: dict[str, tuple[str, str]], root: Path, *, gpus: bool) -> Iterator[Finding]:
    if not adapters:
        if gpus:
            yield Finding("note", "infiniband", "none: several machines would talk over TCP; one machine needs none")
        return
    active = {name: rate for name, (state, rate) in adapters.items() if "ACTIVE" in state}
    down = [name for name in adapters if name not in active]
    text = "; ".join(f"{name} {rate}" for name, rate in active.items()) or "no port is active"
    if down:
        text += (
            f"; down: {', '.join(down)}. Check cable and subnet manager (ibstat), or leave them out with NCCL_IB_HCA"
        )
    yield Finding("note" if down else "ok", "infiniband", text)
    if gpus and not re.search(r"^(nvidia_peermem|nv_peer_mem) ", _read(root / "proc/modules"), re.MULTILINE):
        yield Finding(
            "note", "gpudirect",
            "the kernel module nvidia_peermem is not loaded: messages may go through host memory. Load it: "
            "sudo modprobe nvidia_peermem (not needed where NCCL reports DMA-BUF)",
        )  # fmt: skip


def _locked(memlock: int | None, *, rdma: bool) -> Finding:
    if memlock is None:
        return Finding("ok", "locked memory", "without limit")
    limit = f"at most {memlock / 2**20:,.0f} MiB"
    if not rdma:
        return Finding("ok", "locked memory", f"{limit}; InfiniBand would need it without limit")
    return Finding(
        "note", "locked memory",
        f"{limit}: InfiniBand needs it without limit. Set `ulimit -l unlimited` (memlock in limits.conf, LimitMEMLOCK= of "
        "Slurm's or Docker's service, docker run --ulimit memlock=-1)",
    )  # fmt: skip


def _shared_memory(root: Path) -> Iterator[Finding]:
    with contextlib.suppress(OSError):
        size = shutil.disk_usage(root / "dev/shm").total / 2**30
        if size < 1:
            yield Finding(
                "note", "/dev/shm",
                f"{size:.2f} GiB: NCCL and gloo exchange through it, and end with a bus error where it is full. Give a "
                "container more: docker run --shm-size=16g, or --ipc=host",
            )  # fmt: skip
        else:
            yield Finding("ok", "/dev/shm", f"{size:.0f} GiB")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _ask(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
