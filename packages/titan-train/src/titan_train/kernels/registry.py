"""Which kernels there are for an operation, what each needs, and which one runs."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

OPERATIONS = ("rms_norm", "swiglu", "rope", "cross_entropy")
"""What a kernel can be chosen for; keys of ``[kernels]``."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an operation."""

    operation: str
    name: str
    """``torch`` (the plain form, which every other must equal), ``titan`` or ``liger``."""
    package: str = ""
    """That must be importable."""
    extra: str = ""
    """Of titan-train that installs it."""
    cuda_only: bool = True

    def load(self) -> Callable[..., Any]:
        """The function; the signature is the plain form's, in `titan_train.kernels.forms`."""
        return getattr(importlib.import_module("titan_train.kernels.forms"), f"{self.operation}_{self.name}")

    def problem(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, or None."""
        if self.package and importlib.util.find_spec(self.package) is None:
            how = f": uv pip install 'titan-train[{self.extra}]'" if self.extra else ""
            return f"{self.package} is not installed{how}"
        if self.cuda_only and device.type != "cuda":
            return f"it is a kernel for CUDA devices, and this run is on {device.type}"
        return None


_KERNELS = {
    "rms_norm": (
        Kernel("rms_norm", "torch", cuda_only=False),
        Kernel("rms_norm", "titan", cuda_only=False),
        Kernel("rms_norm", "liger", package="liger_kernel", extra="kernels"),
    ),
    "swiglu": (
        Kernel("swiglu", "torch", cuda_only=False),
        Kernel("swiglu", "titan", cuda_only=False),
        Kernel("swiglu", "liger", package="liger_kernel", extra="kernels"),
    ),
    "rope": (
        Kernel("rope", "torch", cuda_only=False),
        Kernel("rope", "titan", package="triton"),
        Kernel("rope", "liger", package="liger_kernel", extra="kernels"),
    ),
    "cross_entropy": (
        Kernel("cross_entropy", "torch", cuda_only=False),
        Kernel("cross_entropy", "liger", package="liger_kernel", extra="kernels"),
    ),
}


def kernels_of(operation: str) -> tuple[Kernel, ...]:
    """Every kernel of one of `OPERATIONS`, the plain form first."""
    return _KERNELS[operation]


def find_kernel(operation: str, name: str, device: torch.device, *, source: str) -> Kernel:
    """The kernel called ``name``.

    Args:
        operation: One of `OPERATIONS`.
        name: Of the kernel.
        device: Where it is to run.
        source: Who asks, for the message: a key of the configuration, or a file.

    Raises:
        ValueError: There is none, or it cannot run there.
    """
    names = [kernel.name for kernel in kernels_of(operation)]
    if name not in names:
        raise ValueError(f"{source}={name!r}: there is no such kernel. Use one of auto, {', '.join(names)}.")
    kernel = next(kernel for kernel in kernels_of(operation) if kernel.name == name)
    problem = kernel.problem(device)
    if problem is not None:
        raise ValueError(f"{source}={name!r} cannot run: {problem}. Use 'auto', or 'torch'.")
    return kernel


def measured_choice(table: Mapping[str, Any], operation: str) -> str | None:
    """What a hardware file's ``[kernels]`` table says is the fastest; None where it says nothing."""
    found = table.get("kernels", {}).get(operation, {})
    return found.get("chosen") if isinstance(found, dict) else None
