"""How many collectives a step issues, and of how many bytes: closed forms over the plan.

With G units, R of them freed after forward, m microbatches (shard group larger than one rank):

| keep        | all-gathers            | reduce-scatters | all-reduces (hsdp) |
|-------------|------------------------|-----------------|--------------------|
| sharded     | m (G + R)              | m G             | m G                |
| unsharded   | m (G + R)              | G               | G                  |
| zero1       | G + m Rk               | G               | G                  |
| hsdp-ar     | m (G + R)              | m G             | G                  |

Rk of the R are resharded to a number of ranks, which torch cannot suspend at run time: zero1 gathers them in every
backward. In ddp mode nothing is gathered or scattered; the all-reduces are the reduce-scatter column. A unit without
trainable parameters is never reduced, and one on a 1-D mesh of its own is never all-reduced in hsdp mode.
``Comm(reduce_scatter="bf16")`` replaces each reduce-scatter by one all-to-all.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from titan_fsdp.planning.data import PlanData, PlannedUnit

Accumulate = Literal["sharded", "unsharded", "zero1", "hsdp-ar"]


@dataclass(frozen=True, slots=True)
class Collectives:
    """Counts, and bytes of the larger side of each: all-gather output, reduce-scatter input, all-reduce buffer."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    all_to_all: int = 0
    all_gather_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_bytes: int = 0
    all_to_all_bytes: int = 0

    def __add__(self, other: "Collectives") -> "Collectives":
        return Collectives(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))

    def __mul__(self, times: int) -> "Collectives":
        return Collectives(*(getattr(self, n) * times for n in self.__dataclass_fields__))


def check_keep(keep: str) -> None:
    """Raise ValueError unless ``keep`` is an accumulation mode."""
    if keep not in get_args(Accumulate):
        raise ValueError(f"keep={keep!r} is not one of {', '.join(map(repr, get_args(Accumulate)))}.")


def planned_collectives(
    plan: PlanData, microbatches: int = 1, keep: Accumulate = "sharded", *, mesh: str | None = "all"
) -> Collectives | None:
    """Collectives of one step; None where the count is torch's own (buckets of DistributedDataParallel).

    Args:
        plan: The plan.
        microbatches: Forward-backward passes in the step.
        keep: What `accumulate` keeps between them.
        mesh: The mesh whose units are counted, by its name in the policy; None is the plan's own, "all" counts all.
    """
    check_keep(keep)
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: a step has at least one. Use 1 or more.")
    if plan.policy.comm.ddp_hook is not None:
        return None
    total = Collectives()
    for i, unit in enumerate(plan.units):
        if mesh not in ("all", unit.mesh):
            continue
        # A unit whose next one has a gradient is prefetched for backward, even if it has none itself.
        before = plan.units[: i + 2]
        regathered = bool(unit.reshard) and (unit.name == "root" or any(u.trainable for u in before))
        total += _gathers(unit, microbatches, keep, regathered) + _reductions(plan, unit, microbatches, keep)
    return total


def _gathers(unit: PlannedUnit, microbatches: int, keep: Accumulate, regathered: bool) -> Collectives:
    if unit.sizes.shard == 1 or not unit.params:
        return Collectives()
    one = Collectives(all_gather=1, all_gather_bytes=unit.gather_bytes)
    again = Collectives(all_gather=1, all_gather_bytes=unit.regather_bytes) if regathered else Collectives()
    if keep == "zero1":
        return one if isinstance(unit.reshard, bool) else one + again * microbatches
    return (one + again) * microbatches


def _reductions(plan: PlanData, unit: PlannedUnit, microbatches: int, keep: Accumulate) -> Collectives:
    if not unit.trainable:
        return Collectives()
    size = unit.reduce_numel * unit.reduce_dtype.itemsize
    scattered = Collectives()
    if unit.sizes.shard > 1 and plan.policy.comm.reduce_scatter == "bf16":
        scattered = Collectives(all_to_all=1, all_to_all_bytes=unit.reduce_numel * 2)
    elif unit.sizes.shard > 1:
        scattered = Collectives(reduce_scatter=1, reduce_scatter_bytes=size)
    reduced = Collectives()
    if plan.policy.mode == "ddp" or unit.sizes.replicated:
        reduced = Collectives(all_reduce=1, all_reduce_bytes=size // unit.sizes.shard)
    scatters = microbatches if keep in ("sharded", "hsdp-ar") else 1
    reduces = microbatches if keep == "sharded" else 1
    return scattered * scatters + reduced * reduces
