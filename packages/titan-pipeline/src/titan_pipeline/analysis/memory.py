"""Activation memory of a rank, action by action."""

from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.schedule import Kind, Schedule


def memory_levels(schedule: Schedule, rank: int, costs: Costs) -> list[float]:
    """Memory held *while* each action of the rank runs; the largest entry is the peak.

    A forward takes ``activation`` when it starts. An input gradient turns it into ``weight_context`` when it ends, a
    weight gradient or a whole backward gives everything back when it ends. A forward of an evaluation schedule
    gives its activation back when it ends.
    """
    keep = not schedule.forward_only
    level = 0.0
    levels: list[float] = []
    for kind, stage, _ in schedule.ranks[rank]:
        during, after = level, level
        if kind is Kind.F:
            during = level + costs.activation[stage]
            after = during if keep else level
        elif kind is Kind.I:
            after = level - costs.activation[stage] + costs.weight_context[stage]
            during = max(level, after)
        elif kind is Kind.W:
            after = level - costs.weight_context[stage]
        elif kind is Kind.B:
            after = level - costs.activation[stage]
        levels.append(during)
        level = after
    return levels
