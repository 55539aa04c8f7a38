"""The plan as plain data: units with their parameters, the group sizes, and what they cost. No ranks, no tensors."""

import math
from dataclasses import dataclass, field

import torch

from titan_fsdp.planning.policy import Policy


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ranks of one data-parallel mesh: ``shard`` split parameters, ``replicate`` hold copies of the shards."""

    shard: int = 1
    replicate: int = 1
    replicated: bool = field(default=False, compare=False, repr=False)
    """Whether the mesh has an axis of replicas beside that of shards, be it of one rank: torch all-reduces over it."""

    @property
    def total(self) -> int:
        """Ranks of the mesh."""
        return self.shard * self.replicate


@dataclass(frozen=True, slots=True)
class PlannedParam:
    """One parameter of a unit. ``shape`` is what this rank would hold unsharded (after tensor parallelism)."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    shard_dim: int

    @property
    def numel(self) -> int:
        """Elements, unsharded."""
        return math.prod(self.shape)

    def shard_numel(self, shards: int) -> int:
        """Elements of one rank's shard, padded: the largest shard, which every rank's buffer is sized for."""
        rows = self.shape[self.shard_dim]
        return -(-rows // shards) * (self.numel // rows) if rows else 0


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One all-gather and one reduce-scatter's worth of parameters."""

    name: str
    """FQNs joined by ``+``; ``root`` for the root."""
    fqns: tuple[str, ...]
    params: tuple[PlannedParam, ...]
    reshard: bool | int
    """True: freed after forward; False: kept until backward; a number: kept sharded over so many ranks."""
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    sizes: Sizes
    mesh: str | None = None
    """Name of the unit's own mesh; None for the plan's."""

    @property
    def numel(self) -> int:
        """Parameter elements, unsharded."""
        return sum(p.numel for p in self.params)

    @property
    def trainable(self) -> bool:
        """Whether any parameter takes a gradient."""
        return any(p.trainable for p in self.params)

    def shard_numel(self, *, trainable_only: bool = False) -> int:
        """Elements of one rank's padded shard."""
        return sum(p.shard_numel(self.sizes.shard) for p in self.params if p.trainable or not trainable_only)

    @property
    def gather_bytes(self) -> int:
        """Bytes of one all-gather's output, padding included."""
        return self.shard_numel() * self.sizes.shard * self.param_dtype.itemsize

    @property
    def regather_bytes(self) -> int:
        """Bytes of backward's all-gather output; as many after resharding to a smaller group, over fewer ranks."""
        return self.gather_bytes

    @property
    def reduce_numel(self) -> int:
        """Elements of the reduction's input, padding included."""
        return self.shard_numel(trainable_only=True) * self.sizes.shard


@dataclass(frozen=True, slots=True)
class PlanData:
    """Everything decided: the policy, the sizes, the units in execution order (root last), notes and warnings."""

    policy: Policy
    sizes: Sizes
    units: tuple[PlannedUnit, ...]
    ignored: tuple[str, ...]
    buffer_bytes: int
    warnings: tuple[str, ...]
