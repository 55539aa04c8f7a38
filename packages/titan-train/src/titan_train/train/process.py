"""What a rank's process is set to: its device, its random numbers, when it collects garbage."""

import gc
import os
import random

import numpy as np
import torch

from titan_train.config import Config


def device_of(config: Config) -> torch.device:
    """Where this rank computes."""
    if config.launch.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def device_name(device: torch.device) -> str:
    """As the vendor calls it; "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def set_seeds(seed: int, deterministic: bool) -> None:
    """Seed Python, numpy and torch; ask torch for deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class CollectedTogether:
    """Collect garbage on every rank at the same step: a rank that pauses alone makes all others wait."""

    def __init__(self, steps: int) -> None:
        """Collect every ``steps`` steps; 0 leaves it to Python."""
        self._steps = steps

    def __enter__(self) -> "CollectedTogether":
        if self._steps:
            gc.disable()
        return self

    def __call__(self, step: int) -> None:
        if self._steps and step % self._steps == 0:
            gc.collect(1)

    def __exit__(self, *_: object) -> None:
        if self._steps:
            gc.enable()
