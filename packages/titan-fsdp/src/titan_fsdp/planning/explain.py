"""The plan as a table a person reads before spending GPU hours."""

import itertools

import torch

from titan_fsdp.planning.collectives import planned_collectives
from titan_fsdp.planning.data import PlanData, PlannedUnit

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def explain_plan(plan: PlanData) -> str:
    """The plan as text: one line a unit (alike ones together), the step's collectives, warnings."""
    policy, sizes = plan.policy, plan.sizes
    rows = [("unit", "params", "gathered", "local", "compute", "reduce", "after forward", "mesh")]
    rows += _folded([_row(plan, unit) for unit in plan.units])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        f"mode {policy.mode}: shard {sizes.shard} × replicate {sizes.replicate}, "
        f"{sum(u.numel for u in plan.units):,} parameters in {len(plan.units)} units"
        + (f", {len(plan.ignored)} ignored" if plan.ignored else ""),
        "",
    ]
    for i, row in enumerate(rows):
        lines.append("  ".join(_pad(cell, widths[j], j) for j, cell in enumerate(row)).rstrip())
        if i == 0:
            lines.append("  ".join("-" * w for w in widths))
    lines += ["", *_settings(plan), *_step(plan)]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def human_bytes(count: float) -> str:
    """``1536`` → ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _row(plan: PlanData, unit: PlannedUnit) -> tuple[str, ...]:
    local = sum(p.shard_numel(unit.sizes.shard) * p.dtype.itemsize for p in unit.params)
    if not unit.params:
        after = "nothing of its own"
    elif plan.policy.mode == "ddp":
        after = "replicated"
    else:
        after = "freed" if unit.reshard else "kept"
        if not isinstance(unit.reshard, bool):
            after = f"kept over {unit.reshard} ranks"
    name = unit.name if len(unit.name) <= 48 else unit.name[:45] + "…"
    return (
        name,
        f"{unit.numel:,}",
        human_bytes(unit.gather_bytes),
        human_bytes(local),
        _SHORT[unit.param_dtype],
        _SHORT[unit.reduce_dtype],
        after,
        unit.mesh or "",
    )


def _folded(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Three or more rows in a row that differ in their names alone, as one."""
    folded: list[tuple[str, ...]] = []
    for _, group in itertools.groupby(rows, key=lambda row: row[1:]):
        alike = list(group)
        if len(alike) > 2:
            name = f"{alike[0][0]} … {alike[-1][0]}"
            folded.append((name, f"{len(alike)} x {alike[0][1]}", *alike[0][2:]))
        else:
            folded += alike
    return folded


def _settings(plan: PlanData) -> list[str]:
    policy = plan.policy
    divide = policy.grad_divide
    if divide == "mean":
        divide = f"the mean over {plan.sizes.total} ranks"
    elif divide == "sum":
        divide = "the sum over ranks"
    else:
        divide = f"the sum over ranks divided by {divide}"
    lines = [f"gradients: {divide}"]
    if policy.comm.reduce_scatter == "bf16":
        lines.append("reduce-scatter: sent in bf16, summed in fp32")
    if policy.comm.reduce_scatter_group == "own":
        lines.append("reduce-scatter: in a process group of its own, beside the all-gathers")
    if policy.comm.reduce_scatter_buffers > 1:
        lines.append(f"reduce-scatter: up to {policy.comm.reduce_scatter_buffers} inputs in flight")
    if policy.comm.symmetric_memory:
        lines.append("all-gather: into symmetric memory")
    if policy.comm.ddp_hook:
        lines.append(f"DistributedDataParallel with the {policy.comm.ddp_hook} hook")
    if policy.offload:
        lines.append(f"offload: shards live in host memory ({'pinned' if policy.offload == 'cpu' else 'not pinned'})")
    return lines


def _step(plan: PlanData) -> list[str]:
    step = planned_collectives(plan)
    if step is None:
        return ["one microbatch: one all-reduce a bucket of DistributedDataParallel (25 MiB)"]
    parts = [
        f"{getattr(step, kind)} {kind.replace('_', '-')} ({human_bytes(getattr(step, kind + '_bytes'))})"
        for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
        if getattr(step, kind)
    ]
    return ["one microbatch: " + (", ".join(parts) or "no collectives")]


def _pad(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column in (1, 2, 3) else cell.ljust(width)
