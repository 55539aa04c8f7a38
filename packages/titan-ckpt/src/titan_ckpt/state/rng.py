"""The state of every random generator a training loop draws from: python, numpy, torch on CPU and CUDA."""

import random
from typing import Any

import numpy as np
import torch

from titan_ckpt.format.digest import digest
from titan_ckpt.state.leaves import tensor_bytes


def rng_state() -> dict[str, Any]:
    """The generators of this process, as plain data. CUDA's is of the current device, and only if CUDA is in use."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda = bytes(tensor_bytes(torch.cuda.get_rng_state())) if torch.cuda.is_initialized() else None
    return {
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys, dtype="<u4").tobytes(), int(position), int(has_gauss), float(gauss)),
        "torch": bytes(tensor_bytes(torch.get_rng_state())),
        "cuda": cuda,
        "seed": torch.initial_seed(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype="<u4"), position, has_gauss, gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))


def reseed(seed: int, step: int, rank: int) -> int:
    """Seed every generator from (seed, step, rank), for a resume on another number of ranks; return the seed used."""
    derived = int(digest(f"{seed} {step} {rank}".encode())[:15], 16)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)
    return derived
