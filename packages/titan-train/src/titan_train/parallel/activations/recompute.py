"""Activation checkpointing and offload: what forward keeps, what backward computes again, and where it waits.

Applied inside a module's ``forward``, below its hooks, so that FSDP's gathers and tensor parallelism's boundaries stay
where they are and parameter names do not change. Recomputation gives the same bits: the random state is restored, and
nothing in the models changes state in forward.

| checkpoint | recomputed in backward |
|---|---|
| none | nothing |
| full | every block |
| every | each k-th block |
| pattern | the modules that the patterns name |
| selective | all but matrix products (each k-th is), attention, communication and routing |
| budget | what torch.compile picks to stay within a share of the activations' memory |

Selective follows "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198); the budget is
torch.compile's min-cut solver.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_train.config import ActivationsConfig
from titan_train.parallel.activations.offload import offload_activations

_MATMULS = ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2")
_FLOAT8_MATMULS = ("scaled_mm", "grouped_scaled_mm")
# Costly, or communicating, or deciding: recomputing them would cost more than keeping their results.
_KEPT = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_attention_math",
    "_efficient_attention_forward",
    "topk",
)
_KEPT_PACKED = (("titan_train", "document_attention"), ("torch_attn", "_varlen_attn"))
_KEPT_COMMUNICATION = ("all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce")


def apply_activation_checkpointing(model: nn.Module, blocks: list[nn.Module], config: ActivationsConfig) -> None:
    """Make ``model`` recompute and offload as configured; in place, before compilation and FSDP.

    Args:
        model: The model, for ``patterns``.
        blocks: Its repeated blocks, in order.
        config: What to do.
    """
    context_fn = functools.partial(_keep_costly, config.matmul_every) if config.checkpoint == "selective" else None
    for module in recomputed_modules(model, blocks, config):
        _recompute(module, context_fn)
    if config.offload:
        offload_activations(blocks[:-1])  # backward begins with the last: moving it away and back hides nothing


def recomputed_modules(model: nn.Module, blocks: list[nn.Module], config: ActivationsConfig) -> list[nn.Module]:
    """The modules whose forward backward runs again; arguments as in `apply_activation_checkpointing`."""
    if config.checkpoint in ("full", "every", "selective"):
        return blocks[:: config.every if config.checkpoint == "every" else 1]
    return _matching(model, config.patterns) if config.checkpoint == "pattern" else []


def _recompute(module: nn.Module, context_fn: Callable[[], Any] | None) -> None:
    inner = module.forward
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    module.forward = forward


def _keep_costly(matmul_every: int) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one region: forward marks what to keep, recomputation reads it back."""
    keeps = {False: SelectivePolicy(matmul_every), True: SelectivePolicy(matmul_every)}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = keeps[context.is_recompute].keeps(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = create_selective_checkpoint_contexts(policy)
    if torch.compiler.is_compiling():
        return contexts  # the compiler reads the policy from torch's own classes
    watched = keeps[False].watched
    return _Watch(contexts[0], watched), _Watch(contexts[1], watched)


class SelectivePolicy:
    """Which results one pass through a region keeps under ``checkpoint = "selective"``."""

    def __init__(self, matmul_every: int) -> None:
        """Start before the first operator; each ``matmul_every``-th product is recomputed, 0 keeps them all."""
        self._matmul_every = matmul_every
        self._seen = 0
        self._matmuls, kept = _costly_operators()
        self.watched = self._matmuls | kept
        """Operators whose results may be kept."""

    def keeps(self, op: Any) -> bool:
        """Whether the result of ``op``, which runs now, is kept."""
        if op in self._matmuls:
            self._seen += 1
            return not (self._matmul_every and self._seen % self._matmul_every == 0)
        return op in self.watched


def _costly_operators() -> tuple[set[Any], set[Any]]:
    """Matrix products; and what else is kept."""
    matmuls = {
        getattr(namespace, name).default
        for namespace, names in ((torch.ops.aten, _MATMULS), (torch.ops.titan_fp8, _FLOAT8_MATMULS))
        for name in names
        if hasattr(namespace, name)
    }
    kept = {
        getattr(packet, overload)
        for namespace, names in (
            (torch.ops.aten, _KEPT),
            (torch.ops._c10d_functional, _KEPT_COMMUNICATION),
            *((getattr(torch.ops, owner), (name,)) for owner, name in _KEPT_PACKED),
        )
        for name in names
        if (packet := getattr(namespace, name, None)) is not None
        for overload in packet.overloads()
    }
    return matmuls, kept


class _Watch(TorchDispatchMode):
    """Shows torch's mode only the operators that may be kept; the others run as if it were not there.

    torch demands that recomputation runs the same operators as forward, each as often. Hooks inside the region do not:
    FSDP gathers an expert unit in forward and may find it gathered in recomputation, or the other way round, and it marks
    its work for the profiler differently. None of that is kept, so none of it has to match.
    """

    def __init__(self, mode: Any, watched: set[Any]) -> None:
        super().__init__()
        self._mode = mode
        self._watched = watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default:
            # routers of transformers divide the values in place; what is kept must stay as it is
            kept = self._mode.__torch_dispatch__(func, types, args, kwargs)
            return tuple(result.clone() for result in kept)
        if func in self._watched:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def check_patterns(model: nn.Module, config: ActivationsConfig) -> None:
    """Refuse with a ValueError a pattern that matches no module of the whole model; a stage need not have them all."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in config.patterns if config.checkpoint == "pattern" else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"activations.patterns: {pattern!r} matches no module of {type(model).__name__}; it has "
                f"{', '.join(names[:7])}, …"
            )


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    found = {
        name: module
        for pattern in patterns
        for name, module in model.named_modules()
        if name and fnmatchcase(name, pattern)
    }
    # a module inside one that is recomputed as a whole needs no region of its own
    return [m for name, m in found.items() if not any(name.startswith(f"{other}.") for other in found)]
