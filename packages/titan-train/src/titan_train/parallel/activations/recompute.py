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
| selective | all but matrix products (each k-th is), attention, routing, exchanges and reductions: gathers are repeated |
| budget | what torch.compile picks to stay within a share of the activations' memory |

Selective follows "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198); the budget is
torch.compile's min-cut solver.
"""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_train.config import ActivationsConfig, Config
from titan_train.models.common.recomputed import runs_again
from titan_train.parallel.activations.offload import offload_activations
from titan_train.parallel.activations.tiles import check_tiles, tile_token_wise
from titan_train.parallel.structure import blocks_of, wrap_forward

_MATMULS = ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2")
_FLOAT8_MATMULS = ("scaled_mm", "grouped_scaled_mm")
# Costly, or communicating, or deciding: recomputing them would cost more than keeping their results. Gathers are not kept:
# their results are whole on every rank.
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
_KEPT_COMMUNICATION = ("all_to_all_single", "reduce_scatter_tensor", "all_reduce")


def apply_activation_checkpointing(model: nn.Module, blocks: list[nn.Module], config: ActivationsConfig) -> None:
    """Make ``model`` recompute and offload as configured; in place, before compilation and FSDP.

    Args:
        model: The model, for ``patterns``.
        blocks: Its repeated blocks, in order.
        config: What to do.
    """
    tile_token_wise(model, config)
    context_fn = functools.partial(keep_costly, config.matmul_every) if config.checkpoint == "selective" else None
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
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    wrap_forward(module, forward)


def keep_costly(matmul_every: int) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What torch's checkpoint takes as ``context_fn``: forward keeps the costly results, recomputation reads them back."""
    # The compiler reads the policy from torch's own classes. torch 2.11 asks for them outside of what it calls compiling.
    if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
        policies = {False: SelectivePolicy(matmul_every), True: SelectivePolicy(matmul_every)}

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = policies[context.is_recompute].keeps(op)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)
    forward = KeepCostly(SelectivePolicy(matmul_every))
    return forward, _ReadBack(forward)


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


class KeepCostly(TorchDispatchMode):
    """Forward of one region: keeps the results that the policy chooses, as far as recomputation will ask for them.

    Recomputation ends at the last tensor that autograd packs, so a result that comes after the last pack is never read: the
    last product of a pre-norm block, which is added to the residual stream. Under tensor parallelism it is a partial sum over
    all tokens, as large as several of the others together. A result therefore waits until the next pack, and those that
    still wait at the end are let go.

    torch's own caching mode demands that recomputation runs the same operators as forward, each as often. Hooks inside the
    region do not: FSDP gathers an expert unit in forward and may find it gathered in recomputation, or the other way round,
    and it marks its work for the profiler differently. None of that is kept, so none of it has to match here.
    """

    def __init__(self, policy: SelectivePolicy) -> None:
        """Start before the region's first operator."""
        super().__init__()
        self.policy = policy
        self.kept: dict[tuple[Any, int], Any] = {}
        """Results and their versions, by operator and the number of its call."""
        self._waiting: dict[tuple[Any, int], Any] = {}
        self._calls: Counter[Any] = Counter()
        self._packs: saved_tensors_hooks | None = None

    def __enter__(self) -> Self:
        """Watch operators and packs."""
        # Hooks do not nest: those of the checkpoint are called by ours.
        private: Any = torch._C
        hooks = private._autograd._top_saved_tensors_default_hooks(False)
        assert hooks is not None, "a region is entered inside torch's checkpoint"
        pack, unpack = hooks

        def settle_and_pack(tensor: Tensor) -> Any:
            self.settle()
            return pack(tensor)

        self._packs = saved_tensors_hooks(settle_and_pack, unpack)
        self._packs.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        """Let go of what recomputation will not ask for."""
        super().__exit__(*exc)
        assert self._packs is not None
        self._packs.__exit__(*exc)
        self._packs = None
        self._waiting.clear()

    def settle(self) -> None:
        """Autograd packs a tensor: recomputation will come this far."""
        if self._waiting:
            self.kept |= self._waiting
            self._waiting.clear()

    def kept_tensors(self) -> list[Tensor]:
        """What is held for recomputation."""
        return [leaf.tensor for leaf in tree_leaves(self.kept) if isinstance(leaf, _Kept)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and keep its result if the policy wants it."""
        out = func(*args, **(kwargs or {}))
        if func in self.policy.watched and not runs_again():
            if self.policy.keeps(func):
                self._waiting[func, self._calls[func]] = tree_map(_with_version, out)
            self._calls[func] += 1
        if func is torch.ops.aten.topk.default:
            # routers of transformers divide the values in place; what is kept must stay as it is
            return tuple(result.clone() for result in out)
        return out


class _ReadBack(TorchDispatchMode):
    """Recomputation of the region: what forward kept is read once instead of computed."""

    def __init__(self, forward: KeepCostly) -> None:
        super().__init__()
        self._forward = forward
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Self:
        self._calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._forward.policy.watched and not runs_again():
            key = func, self._calls[func]
            self._calls[func] += 1
            if key in self._forward.kept:
                return tree_map(_unchanged, self._forward.kept.pop(key))
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Kept:
    """A tensor, and its version when it was kept."""

    tensor: Tensor
    version: int


def _with_version(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Without the graph, which would hold itself; with the version counter, which detaching below autograd would leave behind.
    key = torch._C.DispatchKey.ADInplaceOrView  # pyright: ignore[reportPrivateUsage]
    with torch._C._SetExcludeDispatchKeyGuard(key, False):  # pyright: ignore[reportPrivateUsage]
        tensor = value.detach()
    return _Kept(tensor, tensor._version)  # pyright: ignore[reportPrivateUsage]


def _unchanged(value: Any) -> Any:
    if not isinstance(value, _Kept):
        return value
    if value.tensor._version != value.version:  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError(
            f"activations.checkpoint='selective' kept a result of shape {tuple(value.tensor.shape)} that the model changed in "
            "place afterwards, so backward would read the wrong values. Use checkpoint='full', or change a copy in the model."
        )
    return value.tensor


def check_activations(config: Config, model: nn.Module) -> None:
    """Refuse what compilation does not allow, and patterns that match nothing.

    Raises:
        ValueError: Names the keys.
    """
    check_patterns(model, config.activations)
    check_tiles(model, config.activations)
    of_blocks = {
        f"activations.checkpoint={config.activations.checkpoint!r}": config.activations.checkpoint
        not in ("none", "pattern"),
        "activations.offload=true": config.activations.offload,
        "compile.enabled=true": config.compile.enabled,
    }
    if any(of_blocks.values()) and not blocks_of(model):
        setting = next(name for name, given in of_blocks.items() if given)
        raise ValueError(
            f"{setting}: {type(model).__name__} has no repeated blocks, so nothing would change. Hold its layers in an "
            "nn.ModuleList, or recompute modules by name with activations.checkpoint='pattern'."
        )
    if config.activations.offload and config.compile.enabled:
        raise ValueError(
            "activations.offload=true and compile.enabled=true: a compiled block decides what it saves, and cannot be told "
            "to move it. Set activations.offload=false, or compile.enabled=false."
        )
    if config.activations.checkpoint == "budget" and not config.compile.enabled:
        raise ValueError(
            "activations.checkpoint='budget' is decided by torch.compile, which is disabled. Set compile.enabled=true, or "
            "use 'selective'."
        )


def check_patterns(model: nn.Module, config: ActivationsConfig) -> None:
    """Refuse with a ValueError a pattern that matches no module of the whole model; a stage need not have them all."""
    names = [name for name, module in model.named_modules() if name and _has_forward(module)]
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
        if name and fnmatchcase(name, pattern) and _has_forward(module)
    }
    # a module inside one that is recomputed as a whole needs no region of its own
    return [m for name, m in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def _has_forward(module: nn.Module) -> bool:
    """Whether it can be called: lists and dictionaries of modules have no forward of their own."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward
