"""What forward keeps for backward, and where.

- `recompute`: activation checkpointing: what backward computes again. `apply_activation_checkpointing` applies both.
- `offload`: what waits in host memory, copied beside the computation.
"""

from titan_train.parallel.activations.offload import HostCopies, offload_activations
from titan_train.parallel.activations.recompute import (
    SelectivePolicy,
    apply_activation_checkpointing,
    check_patterns,
    recomputed_modules,
)

__all__ = [
    "HostCopies",
    "SelectivePolicy",
    "apply_activation_checkpointing",
    "check_patterns",
    "offload_activations",
    "recomputed_modules",
]
