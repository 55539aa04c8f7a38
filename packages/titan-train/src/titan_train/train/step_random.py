"""Random numbers of a step, such as dropout's: a function of the run's seed, the step and this rank's place.

So a checkpoint holds no generator, and a step draws the same numbers whether the run was stopped before it or not, as the
order of the data does not depend on that either.

Ranks that compute on other tokens draw other numbers: those of data and context parallelism, and of tensor parallelism if it
splits the sequence. So do the stages of a pipeline. Ranks that hold copies of the same activations draw the same, or the
copies would part. On a GPU this is the device's generator; those of the host (Python's, numpy's, torch's) are the same on every
rank there, because what they decide, such as to skip a layer, may decide who takes part in a collective.
"""

import hashlib
import random
from collections.abc import Mapping

import numpy as np
import torch
from titan_mesh import Mesh


def place_of_rank(mesh: Mesh | None, *, sequence_parallel: bool) -> dict[str, int]:
    """Where this rank is on the axes over which random numbers differ; ``mesh`` None is a run of one rank."""
    if mesh is None:
        return {}
    axes = ("dp", "cp", "pp", "tp") if sequence_parallel else ("dp", "cp", "pp")
    return {axis: mesh.rank_in(axis) for axis in axes}


def step_seed(seed: int, step: int, place: Mapping[str, int]) -> int:
    """The seed of one rank for one step, in [0, 2^63). Places that are 0 on an axis do not count it."""
    beside = "".join(f" {axis}={index}" for axis, index in sorted(place.items()) if index)
    return int.from_bytes(hashlib.sha256(f"{seed} {step}{beside}".encode()).digest()[:8], "big") >> 1


class StepRandom:
    """Seeds the generators of this process before each step."""

    def __init__(self, seed: int, device: torch.device, place: Mapping[str, int]) -> None:
        """Nothing is seeded yet.

        Args:
            seed: The run's.
            device: Where the model computes.
            place: From `place_of_rank`.
        """
        self._seed, self._place, self._device = seed, dict(place), device

    def __call__(self, step: int) -> None:
        """Seed for the step with this number."""
        alike, own = step_seed(self._seed, step, {}), step_seed(self._seed, step, self._place)
        random.seed(alike)
        np.random.seed(alike % 2**32)
        if self._device.type == "cuda":
            torch.default_generator.manual_seed(alike)
            torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(own)
        else:
            torch.default_generator.manual_seed(own)


class RandomState:
    """The random number generators of this rank, as they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.host = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Go back to it."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
