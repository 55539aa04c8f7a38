"""A rank's GPU: which one it is, the CPU cores next to it, and the settings that CUDA reads when it starts.

Everything is done before CUDA is: its settings are read once, and threads keep the cores that they were started on.
"""

import logging
import os
import re
from collections.abc import MutableMapping
from pathlib import Path

from titan_train.rank_device import device_index

_log = logging.getLogger(__name__)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_cuda_defaults(environ: MutableMapping[str, str], *, pipeline: bool) -> None:
    """Set what CUDA and torch's allocator read from the environment, where the user has not.

    Segments of the allocator grow in place (``expandable_segments``): experts and packed rows change shapes, which
    fragments fixed ones until memory runs out with gigabytes free.

    Args:
        environ: The environment of a process that has not used CUDA yet.
        pipeline: Pipeline stages send through NCCL. Kernels are then loaded at the start: loading one at its first use
            in mid-step waits for the device, on which a send may wait for a peer that waits for this rank.
    """
    if not any(name in environ for name in _ALLOCATOR):
        environ[_ALLOCATOR[0]] = "expandable_segments:True"
    if pipeline:
        environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def cores_beside(pci: str, sys: Path = Path("/sys")) -> tuple[int, set[int]] | None:
    """The NUMA node of a PCI device, such as ``0000:19:00.0``, and its CPU cores; None where the system does not say."""
    try:
        node = int((sys / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return None
    return (node, cores_of(listed)) if node >= 0 else None


def cores_of(listed: str) -> set[int]:
    """The kernel's list of cores, such as ``0-47,96-143``, as numbers."""
    cores: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed):
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def bind_to_numa(pci: str, sys: Path = Path("/sys")) -> None:
    """Keep this thread, and those that it starts, on the cores beside a device, of those that it may use."""
    beside = cores_beside(pci, sys)
    if beside is None or not hasattr(os, "sched_setaffinity"):
        return
    node, cores = beside
    allowed = os.sched_getaffinity(0)
    if cores & allowed and cores & allowed != allowed:
        os.sched_setaffinity(0, cores & allowed)
        _log.info("bound to %d cores of NUMA node %d, beside the GPU at %s", len(cores & allowed), node, pci)


def prepare_gpu(local_rank: int, *, bind_numa: bool) -> None:
    """Select this rank's GPU, and the cores beside it.

    Raises:
        ValueError: As `device_index`.
    """
    import torch

    index = device_index(local_rank, torch.cuda.device_count())
    if bind_numa:
        device = torch.cuda.get_device_properties(index)
        bind_to_numa(f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0")
    torch.cuda.set_device(index)
