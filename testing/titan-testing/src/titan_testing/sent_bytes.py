"""Bytes that a rank sends, counted where the code under test calls torch.distributed."""

from collections.abc import Callable
from typing import Any, Self

import torch.distributed as dist


class SentBytes:
    """Counts what this rank sends to others, at torch.distributed's own functions: ``with SentBytes() as sent: …``.

    ``count`` is in bytes: a message counts once, a gathered part once for each other rank, an exchanged one without the part
    that stays here.
    """

    def __init__(self) -> None:
        self.count = 0
        self._original: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        self._wrap("batch_isend_irecv", lambda ops: sum(o.tensor.nbytes for o in ops if o.op is dist.isend))
        self._wrap("all_gather_into_tensor", lambda out, x, group, **_: x.nbytes * (group.size() - 1))
        self._wrap("reduce_scatter_tensor", lambda out, x, group, **_: x.nbytes // group.size() * (group.size() - 1))
        self._wrap("all_to_all_single", lambda out, x, group, **_: x.nbytes // group.size() * (group.size() - 1))
        return self

    def _wrap(self, name: str, sent: Callable[..., int]) -> None:
        original = self._original[name] = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += sent(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(dist, name, counted)

    def __exit__(self, *_: object) -> None:
        for name, original in self._original.items():
            setattr(dist, name, original)
