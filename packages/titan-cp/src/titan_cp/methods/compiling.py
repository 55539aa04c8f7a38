"""A clean graph break around attention, for ``torch.compile``.

The ring's point-to-point transfers and the saved float32 log-sum-exp have no place in a compiled graph; what surrounds
attention does. Each attention function is therefore one opaque call: the compiled block is split in two there, and the
attention itself runs eagerly. ``fullgraph=True`` across it is refused by torch, by name.

Private: ``torch._compile._disable_dynamo``, because the public ``torch.compiler.disable`` imports the compiler at once
(seconds, in every process). Checked on torch 2.11 and 2.15 by ``tests/test_compile.py``.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_R = TypeVar("_R")


def graph_break(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``fn`` eagerly when called from compiled code. Costs one flag test otherwise."""
    eager = _disable_dynamo(fn)

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return eager(*args, **kwargs)
        return fn(*args, **kwargs)

    return call
