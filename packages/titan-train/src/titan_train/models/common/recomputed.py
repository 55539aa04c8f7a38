"""A function that keeps its arguments alone for backward, and runs again there."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor

_inside = ContextVar("inside a recomputed function", default=False)


def recomputed(run: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """``run(*given)``, of which backward keeps ``given``.

    Its gradients are computed at once also where a pipeline splits backward into halves: each half would run it again, and
    FSDP may have freed the parameters before the second.
    """
    return cast(Tensor, _Recomputed.apply(run, *given))


def runs_again() -> bool:
    """Whether the operators that run now are of such a function's forward, or in `not_kept`: results not worth keeping."""
    return _inside.get()


@contextmanager
def not_kept() -> Generator[None]:
    """Operators in here are none of those that selective recomputation counts, and whose results it may keep."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *given: Tensor) -> Tensor:
        ctx.run, ctx.wanted = run, ctx.needs_input_grad[1:]
        ctx.save_for_backward(*given)
        with not_kept():
            return run(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = ctx.wanted
        with torch.enable_grad():
            given = [x.detach().requires_grad_(want) for x, want in zip(ctx.saved_tensors, wanted, strict=True)]
            out = ctx.run(*given)
        asked = [x for x in given if x.requires_grad]
        found = iter(torch.autograd.grad(out, asked, grads[0], allow_unused=True))
        return None, *(next(found) if want else None for want in wanted)
