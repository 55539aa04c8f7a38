"""What one rank contributes to sums over all ranks.

The ranks of a tensor, context or pipeline group read the same batch, so one of them counts its labels; under dynamic context
parallelism all data-parallel ranks read one. The ranks of a context group compute different parts of the loss, so each of them
adds its own part.
"""

from dataclasses import dataclass

import torch.distributed as dist
from titan_mesh import Mesh
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReduceScope:
    """Which sums this rank takes part in."""

    counts_labels: bool
    """This rank is the first of those that read the same batch."""
    counts_loss: bool
    """This rank is the first of those that compute the same part of the loss."""
    tokens_group: dist.ProcessGroup | None
    """The ranks that see other tokens than this one, and this one; None for a run of one rank."""
    pipeline_group: dist.ProcessGroup | None
    """The ranks that hold the other stages of the same model, and this one; None without a pipeline."""
    world_size: int
    data_group: dist.ProcessGroup | None = None
    """The ranks that hold the same parts of the model and read other batches, and this one; None if there is no other."""

    @classmethod
    def of(cls, mesh: Mesh | None, *, sequence_parallel: bool, shared_over: str = "cp") -> "ReduceScope":
        """Where this rank is; ``mesh`` None is a run of one rank, ``shared_over`` the axis of ranks that share rows."""
        if mesh is None:
            return cls(True, True, None, None, 1)
        first = mesh.rank_in("tp") == 0 and mesh.rank_in("pp") == 0
        tokens = mesh.group("tokens" if sequence_parallel else "loss")
        pipeline = mesh.group("pp") if mesh.layout.spec.pp > 1 else None
        data = mesh.group("dp") if mesh.size("dp") > 1 else None
        return cls(first and mesh.rank_in(shared_over) == 0, first, tokens, pipeline, mesh.layout.num_ranks, data)

    def sum(self, value: Tensor) -> Tensor:
        """Add ``value`` over all ranks, in place; the same bits on each."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value
