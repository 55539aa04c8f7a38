"""Where the ranks of a run come from, and what happens when one is lost."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """The ranks that `titan-train run` starts on this machine. Under torchrun, torchrun's own ranks are used."""

    nproc: int = 0
    """Ranks on this machine; 0 takes all GPUs or, where there are none, two CPU ranks."""

    nnodes: int = 1
    """Machines. `run` starts ranks on this one only: for more, use torchrun. `check` takes any number."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where it can."""

    timeout_s: float = 600.0
    """Seconds a collective may take before the run fails."""

    def __post_init__(self) -> None:
        if self.nproc < 0:
            raise ValueError(f"launch.nproc={self.nproc} must be >= 0; 0 takes all GPUs.")
        if self.nnodes < 1:
            raise ValueError(f"launch.nnodes={self.nnodes} must be at least 1; the nearest valid choice is 1.")
        if self.timeout_s <= 0:
            raise ValueError(f"launch.timeout_s={self.timeout_s} must be positive; the default is 600.")
