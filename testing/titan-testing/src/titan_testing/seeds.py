"""One call that makes a test deterministic."""

import random

import numpy as np
import torch


def seed_everything(seed: int = 0) -> None:
    """Seed python, numpy and torch (every device) with ``seed``."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
