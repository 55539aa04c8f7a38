"""Putting context parallelism into a model: one explicit module, and a reversible way to swap it in.

A model's attention inner, the part that takes ``(q, k, v)`` and has no weights, is a submodule; it is replaced by
`CPAttention`. Nothing of torch is patched, so attention elsewhere in the process is what it was, and two models (or two
parts of one) can follow different plans.
"""

import copy
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from titan_cp.backends import Backend
from titan_cp.methods.attention import attention
from titan_cp.planning.plan import AttentionPlan

DimOrder = Literal["bhtd", "bthd"]
"""Batch, heads, tokens, channels: as in ``scaled_dot_product_attention``; or with tokens before heads."""


class CPAttention(nn.Module):
    """Attention by a plan, as a module without weights: ``forward(q, k, v)`` to the output of the same shape.

    Args:
        plan: The plan to follow; None if it is set later, or given to each call.
        group: The context-parallel group, for every method but USP; None if the plan is for one rank.
        ring_group: USP's ring group.
        ulysses_group: USP's Ulysses group.
        dim_order: ``"bhtd"`` or ``"bthd"``, of arguments and result alike.
        scale: Factor on the scores; None for ``1/sqrt(D)``.
        backend: ``"auto"``, a name in `backends.BACKENDS`, or a `backends.Backend`.
    """

    def __init__(
        self,
        plan: AttentionPlan | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        ring_group: dist.ProcessGroup | None = None,
        ulysses_group: dist.ProcessGroup | None = None,
        dim_order: DimOrder = "bhtd",
        scale: float | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__()
        if dim_order not in ("bhtd", "bthd"):
            raise ValueError(f"dim_order={dim_order!r} does not exist. Use 'bhtd' (as torch's SDPA) or 'bthd'.")
        self.plan = plan
        self.group = group
        self.ring_group = ring_group
        self.ulysses_group = ulysses_group
        self.dim_order = dim_order
        self.scale = scale
        self.backend = backend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, plan: AttentionPlan | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of this rank's queries with all keys.

        Args:
            q: This rank's queries, ``dim_order``.
            k: This rank's keys, fewer heads under grouped-query attention.
            v: This rank's values, as ``k``.
            plan: The plan for this call; None for the module's.
            sinks: A logit per query head, as for `attention`; None for none.

        Raises:
            ValueError: If there is no plan, or the arguments do not fit it.
        """
        plan = self.plan if plan is None else plan
        if plan is None:
            raise ValueError(
                "CPAttention has no plan. Set .plan (ContextParallel.set_plan), or pass plan= to the call."
            )
        swap = self.dim_order == "bthd"
        if swap:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = attention(
            q,
            k,
            v,
            plan=plan,
            group=self.group,
            ring_group=self.ring_group,
            ulysses_group=self.ulysses_group,
            scale=self.scale,
            sinks=sinks,
            backend=self.backend,
        )
        return out.transpose(1, 2) if swap else out

    def __deepcopy__(self, memo: dict[int, Any]) -> "CPAttention":
        """A copy of its own, of the same ranks: a process group cannot be copied."""
        for group in (self.group, self.ring_group, self.ulysses_group):
            memo[id(group)] = group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """The method and layout followed, for ``print(model)``."""
        return "no plan yet" if self.plan is None else f"{self.plan.method}, {self.plan.layout}, {self.plan.size} ranks"


class ContextParallel:
    """What `apply_context_parallel` did to a model: change its plan, or undo it. Also a context manager."""

    def __init__(self, model: nn.Module, replaced: dict[str, nn.Module], placed: dict[str, CPAttention]) -> None:
        self._model = model
        self._replaced = replaced
        self.modules = placed
        """The modules in place, by name."""

    def set_plan(self, plan: AttentionPlan) -> None:
        """Follow another plan from the next call on: another length, or another packing."""
        for module in self.modules.values():
            module.plan = plan

    def remove(self) -> None:
        """Put the original modules back. A second call does nothing."""
        for name, module in self._replaced.items():
            self._model.set_submodule(name, module)
        self._replaced = {}

    def __enter__(self) -> "ContextParallel":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply_context_parallel(
    model: nn.Module,
    pattern: str,
    *,
    plan: AttentionPlan | None = None,
    group: dist.ProcessGroup | None = None,
    ring_group: dist.ProcessGroup | None = None,
    ulysses_group: dist.ProcessGroup | None = None,
    dim_order: DimOrder = "bhtd",
    scale: float | None = None,
    backend: str | Backend = "auto",
) -> ContextParallel:
    """Replace a model's attention inners by `CPAttention`.

    The model's inputs, rotary positions and labels remain the caller's: ``plan.shard``, ``plan.positions``,
    ``plan.shift_labels``.

    Args:
        model: The model, changed in place.
        pattern: Shell pattern of the submodules' names, e.g. ``"layers.*.attention.inner"``. They must hold no
            parameters or buffers and be called as ``inner(q, k, v)``. One that layers share is replaced in each.
        plan: The plan to follow; None if `ContextParallel.set_plan` follows.
        group: As for `CPAttention`, and so are the rest.
        ring_group: USP's ring group.
        ulysses_group: USP's Ulysses group.
        dim_order: ``"bhtd"`` or ``"bthd"``.
        scale: Factor on the scores; None for ``1/sqrt(D)``.
        backend: ``"auto"``, a name in `backends.BACKENDS`, or a `backends.Backend`.

    Returns:
        A handle that changes the plan, or puts the original modules back.

    Raises:
        ValueError: If no submodule matches, or one holds weights, or is context-parallel already. The model is then
            unchanged.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        near = [name for name in names if "att" in name.lower()][:8] or names[:8]
        raise ValueError(f"pattern={pattern!r} matches no submodule. Names here are, for example, {near}.")
    for name in matched:
        module = model.get_submodule(name)
        if isinstance(module, CPAttention):
            raise ValueError(
                f"{name!r} is context-parallel already. Call .remove() on the first handle, or .set_plan()."
            )
        held = [key for key, _ in [*module.named_parameters(), *module.named_buffers()]]
        if held:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) holds {held[:4]}, which replacing it would lose. Match the part "
                "that takes (q, k, v) and has no weights."
            )
    replaced = {
        name: model.get_submodule(name) for name in matched
    }  # all before any is replaced: layers may share parts
    made = {
        original: CPAttention(
            plan,
            group=group,
            ring_group=ring_group,
            ulysses_group=ulysses_group,
            dim_order=dim_order,
            scale=scale,
            backend=backend,
        ).train(original.training)
        for original in replaced.values()
    }
    placed = {name: made[original] for name, original in replaced.items()}
    for name, module in placed.items():
        model.set_submodule(name, module)
    return ContextParallel(model, replaced, placed)
