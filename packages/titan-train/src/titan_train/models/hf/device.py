"""Which code of transformers' layers runs where: kernels of other packages on a GPU, plain torch everywhere else.

Problem: transformers decides when it is imported. Where fla-core, mamba-ssm or causal-conv1d is installed, the functions of
its layers with states and convolutions (Qwen3-Next, Kimi Linear, Mamba, Jamba, LFM2, ...) are that package's kernels from then
on, for tensors of every device. Triton's kernels take the addresses of CPU tensors for addresses on the GPU: what they compute
is garbage, and an illegal access ends the CUDA context of the whole process. A probe on the CPU, and a run or an export there,
would do so on every machine with a GPU.

Idea: the decision is made at each call, by where the tensors are. Such a function carries the torch form that it stands for
(``__wrapped__``); in the module of a model that was built, it is replaced by one that takes the torch form off the GPU. This
is all that is changed in transformers, and on a GPU it computes what it did.

Limits: functions of ``use_kernel_func_from_hub_with_fallback`` (transformers 5.18 to 5.23). Calls that name documents
(``cu_seqlens``, ``seq_idx``) are refused off the GPU, as transformers refuses them where no package is installed.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

_HOME = "hub_kernels.py"
"""The file of transformers in which it wraps such functions."""


def keep_kernels_on_gpus(model: nn.Module) -> None:
    """Let the layers of this model, and of all models of its modules of code, call kernels only with tensors on a GPU.

    Args:
        model: Of transformers, built in any way; others are left alone.
    """
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    for name in names:
        if not name.startswith("transformers.models.") or name not in sys.modules:
            continue
        code = vars(sys.modules[name])
        for key, function in list(code.items()):
            if _is_kernel(function):
                code[key] = _by_device(function)


def _is_kernel(function: Any) -> bool:
    """Whether this is a function of transformers that calls another package's."""
    if not isinstance(function, types.FunctionType) or not function.__code__.co_filename.endswith(_HOME):
        return False
    # without a package it is the torch form, with a word that it is slow
    return hasattr(function, "__wrapped__") and inspect.getclosurevars(function).nonlocals.get(
        "is_new_implementation", True
    )


def _by_device(kernel: types.FunctionType) -> Callable[..., Any]:
    in_torch = cast("Callable[..., Any]", inspect.unwrap(kernel))
    known = frozenset(inspect.signature(in_torch).parameters)

    @functools.wraps(kernel)
    def run(*args: Any, **keywords: Any) -> Any:
        given = next((x for x in (*args, *keywords.values()) if isinstance(x, Tensor)), None)
        if given is None or given.device.type not in ("cpu", "meta"):
            return kernel(*args, **keywords)
        if keywords.get("cu_seqlens") is not None or keywords.get("seq_idx") is not None:
            raise ValueError(
                f"{in_torch.__name__} of transformers cannot keep packed documents apart on the CPU. Use a model with a plan, or "
                "rows of one document (data.document_mask=false)."
            )
        return in_torch(*args, **{key: value for key, value in keywords.items() if key in known})

    return run
