"""A weight's cast, kept while the weight stays what it is: over the microbatches of one optimizer step.

Without it, a weight would be cast twice a microbatch (forward and backward); with it, once a step.

A cast is used again only if the weight has the same address and version counter, *and* gradients have begun to
accumulate in it. The second condition is for updates that the version counter does not see (``weight.data``,
collectives that write in place): after ``zero_grad()`` the next forward casts afresh whatever the counter says, so
that a weight can never be frozen by a stale copy. Backward uses the cast its forward made.

FSDP2 refills the same memory under the same version after every all-gather; but it re-assigns the parameter too, and
`Float8Linear` empties its cache then. So with FSDP2 a cast lives as long as the unsharded weight does.
"""

from typing import Any

import torch
from torch import Tensor

from titan_fp8._products import QTensor


class WeightCache:
    """The cast of one weight. Copies and pickles as an empty one."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._cast: QTensor | None = None
        self._trusted = False

    def find(self, weight: Tensor, *, in_backward: bool = False) -> QTensor | None:
        """The cast of ``weight`` as it is now, or None.

        Args:
            weight: The weight.
            in_backward: The backward of a forward that has seen this weight.
        """
        if self._cast is None or self._key != _key(weight):
            self.clear()
            return None
        return self._cast if self._trusted or in_backward or weight.grad is not None else None

    def keep(self, weight: Tensor, cast: QTensor, *, trusted: bool = False) -> None:
        """Keep ``cast`` for as long as ``weight`` is not changed.

        Args:
            weight: The weight.
            cast: Its cast.
            trusted: The caller casts after every update: no need to wait for gradients to accumulate.
        """
        self._key, self._cast, self._trusted = _key(weight), cast, trusted

    def clear(self) -> None:
        """Forget it, and free its memory."""
        self._key = self._cast = None

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()


def usable(cache: WeightCache | None, weight: Tensor) -> WeightCache | None:
    """The cache, where the cast of ``weight`` can be kept: it is a parameter with a version counter, in eager mode."""
    if cache is None or torch.compiler.is_compiling() or not weight.is_leaf or weight.is_inference():
        return None
    return cache


def _key(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight._version, weight.dtype, weight.device
