"""What code reads from its tensors: a number as a Python value, or the shape of a result that depends on numbers.

Beside that, what it does with tensors of given shapes is always the same. So a module that is known to return this after
reading that needs to run only up to its last read to say whether it returns the same again.
"""

from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class KnownReads(BaseException):
    """What was read up to here is known. Not an Exception, which models may catch."""


class Reads:
    """A block whose reads are noted.

    Args:
        known: Where all that was read is in it, as a tuple, the block ends with `KnownReads`.
    """

    def __init__(self, known: Container[tuple[str, ...]]) -> None:
        self.seen: tuple[str, ...] = ()
        self._known = known
        self._modes = ExitStack()

    def __enter__(self) -> "Reads":
        self._modes.enter_context(_Operations(self))
        self._modes.enter_context(_Methods(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.close()

    def note(self, value: Any) -> None:
        """A read; of tensors the shape is what was read."""
        self.seen = (*self.seen, str(tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, value)))
        if self.seen in self._known:
            raise KnownReads


class _Operations(TorchDispatchMode):
    """Sees ``item``, ``int``, ``if``, masks as indices, ``nonzero`` and their like, which are operators."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if reads and (func is not torch.ops.aten.index.Tensor or any(map(_is_mask, args[1]))):
            self._reads.note(result)
        return result


class _Methods(TorchFunctionMode):
    """Sees the ways to Python values that are no operators."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__"):
            self._reads.note(result.tolist() if hasattr(result, "tolist") else result)
        return result


def _is_mask(index: Any) -> bool:
    """Whether the shape of what is indexed depends on it; with integers it does not."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
