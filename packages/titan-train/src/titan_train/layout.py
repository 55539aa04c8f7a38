"""How a configuration's degrees lay over the ranks. Pure arithmetic: no torch, no process group.

Everything that depends on the number of ranks is checked here, before any rank starts, so that a bad number is one
error at the terminal rather than one a rank.
"""

from dataclasses import dataclass
from typing import Literal

from titan_mesh import Layout, MeshSpec, Topology
from titan_pipeline import Schedule

from titan_train.config import Config
from titan_train.config.nearest import nearest_divisor
from titan_train.config.parallel import ParallelConfig
from titan_train.parallel.pipeline import plan_schedule

Mode = Literal["none", "fsdp", "hsdp", "ddp"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one optimizer step's sequences are cut over ranks and micro-batches."""

    global_batch: int
    """Sequences in one optimizer step."""

    dp_size: int
    """Data-parallel ranks: dp_replicate x dp_shard."""

    microbatch: int
    """Sequences in one forward and backward of one rank."""

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in one optimizer step; a pipeline runs them all in one schedule."""
        return self.global_batch // (self.dp_size * self.microbatch)


def build_layout(config: Config, world_size: int) -> Layout:
    """Resolve the parallel degrees for ``world_size`` ranks.

    Raises:
        ValueError: The degrees do not fit the ranks, or do not fit ``parallel.mode``.
    """
    parallel = config.parallel
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if parallel.mode == "ddp":
        if shard > 1:
            raise ValueError(
                f"parallel.mode='ddp' keeps whole parameters on every rank, so parallel.dp_shard={shard} cannot hold. "
                "Remove dp_shard, or use mode 'hsdp'."
            )
        replicate, shard = (replicate if replicate > 1 else -1), 1
    spec = MeshSpec(
        pp=parallel.pp, dp_replicate=replicate, dp_shard=shard, cp=parallel.cp, tp=parallel.tp, ep=parallel.ep
    ).resolve(world_size)
    if parallel.mode == "hsdp" and 1 in (spec.dp_replicate, spec.dp_shard * spec.cp):
        raise ValueError(
            f"parallel.mode='hsdp' needs dp_replicate > 1 and dp_shard > 1, not {spec.dp_replicate} and {spec.dp_shard} on "
            f"{world_size} ranks. " + _hsdp_hint(world_size)
        )
    if parallel.mode == "fsdp" and spec.dp_replicate > 1:
        raise ValueError(
            f"parallel.mode='fsdp' has one copy of the parameters, so parallel.dp_replicate={spec.dp_replicate} cannot hold. "
            "Set dp_replicate=1, or use mode 'hsdp'."
        )
    nodes = config.launch.nnodes
    gpus_per_node = world_size // nodes if world_size % nodes == 0 else world_size
    layout = Layout(spec, world_size=world_size, topology=Topology(gpus_per_node=gpus_per_node))
    if spec.ep > 1 and resolve_mode(parallel, layout, dtype=config.train.dtype) == "ddp":
        raise ValueError(
            f"parallel.ep={spec.ep} and mode 'ddp': expert parallelism borrows the ranks that parameters are sharded over, "
            "and ddp shards nothing. Use mode 'fsdp' or 'hsdp' with dp_shard > 1, or ep=1."
        )
    # named here, so that every rank makes the same groups: who shares a row, and who sees other tokens than this rank
    return layout.flatten("sequence", ("cp", "tp")).flatten("tokens", ("dp_replicate", "dp_shard", "cp", "tp"))


def resolve_mode(parallel: ParallelConfig, layout: Layout, *, dtype: str = "fp32") -> Mode:
    """The wrapping that ``parallel.mode`` means on this layout.

    Where no gradients are added over ranks, float32 needs no wrapper; in bf16, fsdp's mixed precision does the casts.
    Ranks that share sequences (cp) share parameters as well, so they count as shards.

    Raises:
        ValueError: An option was set that the resolved mode cannot honour.
    """
    mode: Mode
    spec = layout.spec
    copies = spec.dp_replicate * spec.dp_shard * spec.cp  # ranks whose gradients are added
    if parallel.mode != "auto":
        mode = parallel.mode
    elif copies == 1:
        mode = "fsdp" if dtype == "bf16" or parallel.offload != "none" else "none"
    elif spec.dp_replicate > 1:
        mode = "hsdp" if spec.dp_shard * spec.cp > 1 else "ddp"
    else:
        mode = "fsdp"
    if parallel.compress in ("fp16", "powersgd") and mode != "ddp":
        raise ValueError(
            f"parallel.compress={parallel.compress!r} works in mode 'ddp' only, and this run is {mode!r}. "
            "Use 'bf16', or mode='ddp'."
        )
    if parallel.offload != "none" and mode == "ddp":
        raise ValueError(
            f"parallel.offload={parallel.offload!r} needs sharded parameters: use mode 'fsdp' or 'hsdp', or 'none'."
        )
    shards = spec.dp_shard * spec.cp
    if isinstance(parallel.reshard, int) and mode in ("fsdp", "hsdp") and shards % parallel.reshard:
        raise ValueError(
            f"parallel.reshard={parallel.reshard} does not divide the {shards} ranks that parameters are sharded over. "
            f"The nearest valid choice is {nearest_divisor(shards, parallel.reshard)}."
        )
    if parallel.accumulate == "hsdp-ar" and mode != "hsdp":
        raise ValueError(f"parallel.accumulate='hsdp-ar' needs mode 'hsdp', and this run is {mode!r}. Use 'unsharded'.")
    return mode


def plan_batch(config: Config, layout: Layout) -> BatchPlan:
    """Cut the global batch over the data-parallel ranks.

    Raises:
        ValueError: The batch does not divide; the message names the nearest batch that does.
    """
    dp_size = layout.spec.dp_replicate * layout.spec.dp_shard
    batch, micro = config.train.global_batch, config.train.microbatch
    unit = dp_size * (micro or 1)
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        near = above if below == 0 or above - batch < batch - below else below
        per_rank = f" in micro-batches of train.microbatch={micro}" if micro else ""
        raise ValueError(
            f"train.global_batch={batch} cannot be cut evenly over {dp_size} data-parallel ranks{per_rank}: it must be a "
            f"multiple of {unit}. The nearest valid choice is {near}."
        )
    whole_share = 1 if layout.spec.pp > 1 else batch // dp_size
    return BatchPlan(global_batch=batch, dp_size=dp_size, microbatch=micro or whole_share)


def plan_pipeline(config: Config, layout: Layout, batch: BatchPlan) -> Schedule | None:
    """The pipeline's schedule; None without one.

    Raises:
        ValueError: The schedule cannot serve this many ranks and micro-batches.
    """
    if layout.spec.pp == 1:
        return None
    if config.parallel.accumulate != "sharded":
        raise ValueError(
            f"parallel.accumulate={config.parallel.accumulate!r} and parallel.pp={layout.spec.pp}: a pipeline always keeps "
            "whole gradients until its schedule ends. Leave it at 'sharded'."
        )
    return plan_schedule(config.pipeline, pp=layout.spec.pp, microbatches=batch.accumulation)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything about a run that its configuration and the number of ranks decide."""

    layout: Layout
    mode: Mode
    batch: BatchPlan
    schedule: Schedule | None
    """The pipeline's; None without one."""


def plan_run(config: Config, world_size: int) -> RunPlan:
    """Decide all of it, and with that check it, before any rank starts.

    Raises:
        ValueError: As `build_layout`, `resolve_mode`, `plan_batch` and `plan_pipeline`.
    """
    layout = build_layout(config, world_size)
    mode = resolve_mode(config.parallel, layout, dtype=config.train.dtype)
    batch = plan_batch(config, layout)
    return RunPlan(layout, mode, batch, plan_pipeline(config, layout, batch))


def _hsdp_hint(world_size: int) -> str:
    inner = [d for d in range(2, world_size) if world_size % d == 0]
    if not inner:
        return f"{world_size} ranks cannot be cut in two such degrees: use mode 'fsdp'."
    return f"Set dp_replicate to one of {inner} and leave dp_shard at -1."
