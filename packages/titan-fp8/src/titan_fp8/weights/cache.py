"""How long the cast of a weight is used: as long as someone has declared that the weight does not change.

Nothing about a tensor shows whether its values are still the same. Its address, its version counter and its gradient all
stay as they were when an optimizer writes through ``weight.data``, when numpy shares the memory, or when a collective
or another process writes in place. So a cast is never kept because a tensor looks unchanged. It is kept in an *open*
cache, and whoever opens the cache promises that the weight stays constant until it is closed. `titan_fp8.ConstantWeights`
opens those of a model for one optimizer step. A closed cache, the default, keeps nothing: each forward and each backward
casts the weight that it finds.

Two things make a broken promise loud. A version counter that has moved since the cast raises an error; it never counts as
evidence that nothing changed. With ``check=True`` a checksum of the weight is compared at every use.
"""

from typing import Any

import torch
from torch import Tensor

from titan_fp8.products import QTensor


class WeightCache:
    """The cast of one weight, kept while the cache is open. Copies and pickles as a closed one.

    For `titan_fp8.linear` without a module. It is a context manager::

        cache = WeightCache()
        with cache:  # the weight does not change in here
            for x in microbatches:
                titan_fp8.linear(x, w, cache=cache).sum().backward()
    """

    def __init__(self) -> None:
        self._name = "weight"
        self._open = False
        self._check = False
        self._opened_in_capture = False
        self._weight: Tensor | None = None
        self._cast: QTensor | None = None
        self._version = 0
        self._checksum = 0

    @property
    def is_open(self) -> bool:
        """Whether casts are kept."""
        return self._open

    def open(self, *, name: str = "weight", check: bool = False) -> None:
        """Keep casts from now on: the weight does not change until `close`.

        Args:
            name: The weight's name, for errors.
            check: Compare a checksum of the weight at every use. Reads the weight and waits for the device.
        """
        self.clear()
        self._name, self._check = name, check
        self._opened_in_capture = capturing()
        self._open = True

    def close(self) -> None:
        """Forget the cast; keep none from now on."""
        self.clear()
        self._open = False

    def __enter__(self) -> "WeightCache":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keeps(self, weight: Tensor) -> bool:
        """Whether casts of ``weight`` are kept now.

        Not while ``torch.compile`` traces, where the cast is part of the graph. While a CUDA graph is captured, only in a
        cache that was opened during the capture: a cast from outside would be frozen into every replay.
        """
        if torch.compiler.is_compiling() or not self._open or weight.is_inference():
            return False
        return not _on_device(weight) or self._opened_in_capture == capturing()

    def find(self, weight: Tensor) -> QTensor | None:
        """The cast of ``weight`` that was kept, or None.

        Raises:
            RuntimeError: If the weight has changed since it was cast, as far as can be seen.
        """
        if self._cast is None or self._weight is not weight or not self.keeps(weight):
            return None
        if weight._version != self._version or (self._check and checksum(weight) != self._checksum):
            raise RuntimeError(changed_message(self._name))
        return self._cast

    def keep(self, weight: Tensor, cast: QTensor) -> None:
        """Keep ``cast``, made of ``weight`` just now."""
        self._weight, self._cast, self._version = weight, cast, weight._version
        self._checksum = checksum(weight) if self._check else 0

    def clear(self) -> None:
        """Forget the cast and free its memory; an open cache stays open."""
        self._weight = self._cast = None

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()


def changed_message(name: str) -> str:
    """What to tell whoever changed a weight that was declared constant."""
    return (
        f"{name} was changed after it was cast to float8, in a block that declared it constant: the products would use the "
        "old values. Leave the ConstantWeights (or WeightCache) block before the optimizer step or anything else that "
        "changes weights, and enter it again for the next step."
    )


def checksum(tensor: Tensor) -> int:
    """A number that depends on every bit of a tensor and on its place. Waits for the device."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()]).long()
    # Odd factors: modulo 2^64 no change of a single value cancels.
    return int((bits * torch.arange(1, 2 * bits.numel(), 2, device=bits.device)).sum().item())


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _on_device(weight: Tensor) -> bool:
    return weight.is_cuda


def capturing() -> bool:
    """Whether a CUDA graph is being captured. Initializes nothing; torch's own test raises where there is no driver."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
