"""Plan against reality: count the collectives a step really issues and compare them with the closed forms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_fsdp.planning.collectives import Accumulate, Collectives, planned_collectives
from titan_fsdp.planning.data import PlanData
from titan_fsdp.training.state import reshard

# c10d operator → (kind, index of the argument whose bytes count). Names are the same in torch 2.11 to 2.15.
_OPERATORS = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
}


@dataclass(frozen=True, slots=True)
class Verification:
    """Planned and counted collectives of one step."""

    planned: Collectives | None
    observed: Collectives

    @property
    def ok(self) -> bool:
        """Whether all counts and bytes agree; True where the plan leaves the count to torch."""
        return self.planned is None or self.planned == self.observed

    def report(self) -> str:
        """One line a figure that differs, or one line saying that none does."""
        if self.planned is None:
            return f"counted {self.observed}; the plan leaves bucket counts to DistributedDataParallel"
        lines = [
            f"{name}: planned {getattr(self.planned, name):,}, counted {getattr(self.observed, name):,}"
            for name in self.planned.__dataclass_fields__
            if getattr(self.planned, name) != getattr(self.observed, name)
        ]
        return "\n".join(lines) or f"the step issued exactly the planned collectives: {self.observed}"


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives and their bytes inside a ``with`` block, wherever they are issued from."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count ``func`` if it is a collective, then run it."""
        found = _OPERATORS.get(func._schema.name)
        if found is not None:
            kind, index = found
            size = sum(t.numel() * t.element_size() for t in _tensors(args[index]))
            self.total += Collectives(**{kind: 1, f"{kind}_bytes": size})
        return func(*args, **(kwargs or {}))


def verify(
    plan: PlanData, model: nn.Module, step_fn: Callable[[], Any], microbatches: int = 1, keep: Accumulate = "sharded"
) -> Verification:
    """Run ``step_fn`` and compare the collectives it issued with the plan's.

    Args:
        plan: What was applied to ``model``.
        model: The wrapped model; its gathered parameters are freed first, so that the step starts as every step does.
        step_fn: One step: forward and backward of every microbatch. Clipping and the optimizer belong outside.
        microbatches: Microbatches that ``step_fn`` runs.
        keep: The accumulation mode it uses.
    """
    reshard(model)
    with CollectiveCounter() as counter:
        step_fn()
    return Verification(planned_collectives(plan, microbatches, keep), counter.total)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []
