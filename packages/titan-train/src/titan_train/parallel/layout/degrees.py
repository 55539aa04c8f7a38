"""How parallel degrees map to ranks and nodes, and which data-parallel wrapper follows from them."""

from typing import Literal

from titan_mesh import Layout, MeshSpec, Topology

from titan_train.config import Config
from titan_train.config.parallel import ParallelConfig
from titan_train.values import nearest_divisor

Mode = Literal["none", "fsdp", "hsdp", "ddp"]


def build_layout(config: Config, world_size: int, *, device: str = "") -> Layout:
    """Resolve the parallel degrees for ``world_size`` ranks.

    Args:
        config: The degrees.
        world_size: Ranks.
        device: What the ranks run on, where it is known; by default what ``launch.device`` says. CPUs have no NVLink.

    Raises:
        ValueError: The degrees do not fit the ranks, or do not fit ``parallel.mode``.
    """
    parallel = config.parallel
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if parallel.mode == "ddp":
        if shard > 1:
            raise ValueError(
                f"parallel.mode='ddp' keeps whole parameters on every rank, so parallel.dp_shard={shard} is impossible. "
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
            f"parallel.mode='fsdp' has one copy of the parameters, so parallel.dp_replicate={spec.dp_replicate} is impossible. "
            "Set dp_replicate=1, or use mode 'hsdp'."
        )
    nodes = config.launch.nnodes
    gpus_per_node = world_size // nodes if world_size % nodes == 0 else world_size
    domain = 1 if (device or config.launch.device) == "cpu" else None
    layout = Layout(spec, world_size=world_size, topology=Topology(gpus_per_node=gpus_per_node, nvlink_domain=domain))
    if spec.ep > 1 and resolve_mode(parallel, layout, dtype=config.train.dtype) == "ddp":
        raise ValueError(
            f"parallel.ep={spec.ep} and mode 'ddp': expert parallelism reuses the ranks that shard parameters, "
            "and ddp shards nothing. Use mode 'fsdp' or 'hsdp' with dp_shard > 1, or ep=1."
        )
    # named here, so that every rank makes the same groups: who shares a row, and who sees other tokens than this rank
    layout = layout.flatten("sequence", ("cp", "tp")).flatten("tokens", ("dp_replicate", "dp_shard", "cp", "tp"))
    # and who together hold each matrix of a model copy's stage
    return layout.flatten("matrices", ("dp_shard", "cp", "tp")) if config.optimizer.name == "muon" else layout


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
    # experts are cut over the ranks of tp as well: with fewer parts than those, several ranks hold the same ones
    expert_copies = copies * spec.tp // spec.ep if spec.ep > 1 else copies
    if parallel.mode != "auto":
        mode = parallel.mode
    elif copies == expert_copies == 1:
        mode = "fsdp" if dtype == "bf16" or parallel.offload != "none" else "none"
    elif spec.dp_replicate > 1:
        mode = "hsdp" if spec.dp_shard * spec.cp > 1 else "ddp"
    else:
        mode = "fsdp"
    _check_compression(parallel, mode, dtype)
    if parallel.offload != "none" and mode == "ddp":
        raise ValueError(
            f"parallel.offload={parallel.offload!r} needs sharded parameters: use mode 'fsdp' or 'hsdp', or 'none'."
        )
    for name, plain in (("reduce_scatter_group", "shared"), ("reduce_scatter_buffers", 1), ("symmetric_memory", False)):
        value = getattr(parallel, name)
        if value != plain and mode not in ("fsdp", "hsdp"):
            raise ValueError(
                f"parallel.{name}={value!r} needs sharded parameters, and this run is {mode!r}. Leave it out, or set mode='fsdp'."
            )
    if mode in ("fsdp", "hsdp"):
        _check_reshard(parallel, spec.dp_shard * spec.cp, spec.pp)
    if parallel.accumulate == "hsdp-ar" and mode != "hsdp":
        raise ValueError(f"parallel.accumulate='hsdp-ar' needs mode 'hsdp', and this run is {mode!r}. Use 'unsharded'.")
    return mode


def _check_reshard(parallel: ParallelConfig, shards: int, pp: int) -> None:
    if isinstance(parallel.reshard, int) and shards % parallel.reshard:
        raise ValueError(
            f"parallel.reshard={parallel.reshard} does not divide the {shards} ranks that parameters are sharded over. "
            f"The nearest valid choice is {nearest_divisor(shards, parallel.reshard)}."
        )
    if pp == 1 or parallel.reshard == "always":
        return
    asked = [
        f"_overrides={{{name!r}: {to!r}}}" for name, to in parallel.reshard_overrides.items() if to not in ("never", 1)
    ]
    asked += [f"={parallel.reshard}"] if parallel.reshard not in ("default", "never", 1) else []
    if asked:
        raise ValueError(
            f"parallel.reshard{asked[0]} and parallel.pp={pp}: a stage keeps what it has gathered until the end of the step. Set "
            "parallel.reshard='always', which frees it after each forward and backward, with reshard_overrides for what is not; "
            "or leave both out."
        )


def _check_compression(parallel: ParallelConfig, mode: Mode, dtype: str) -> None:
    if parallel.compress in ("fp16", "powersgd") and mode != "ddp":
        raise ValueError(
            f"parallel.compress={parallel.compress!r} works in mode 'ddp' only, and this run is {mode!r}. "
            "Use 'bf16', or mode='ddp'."
        )
    if parallel.compress == "none" or mode == "none":
        return
    if mode == "ddp" and (dtype != "fp32" or parallel.reduce_dtype != "fp32" or parallel.keep_fp32):
        raise ValueError(
            f"parallel.compress={parallel.compress!r} in mode 'ddp' is of float32 gradients of a float32 model, and this run has "
            f"train.dtype={dtype!r}, parallel.reduce_dtype={parallel.reduce_dtype!r} and parallel.keep_fp32="
            f"{list(parallel.keep_fp32)}. Set both to 'fp32' and leave keep_fp32 out, or take compress='none' with "
            "reduce_dtype='bf16'."
        )
    if parallel.reduce_dtype != "fp32":
        raise ValueError(
            f"parallel.compress={parallel.compress!r} rounds float32 gradients on their way alone, and parallel.reduce_dtype="
            f"{parallel.reduce_dtype!r} has none. Set reduce_dtype='fp32', or compress='none'."
        )


def wrapped_over(layout: Layout, mode: Mode) -> dict[str, int]:
    """How many ranks share parameters and how many hold copies, by the names of `titan_fsdp.plan`."""
    spec = layout.spec
    if mode == "ddp":
        return {"replicate": spec.dp_replicate * spec.dp_shard * spec.cp}
    return {"shard": spec.dp_shard * spec.cp, "replicate": spec.dp_replicate}


def explain_mode(parallel: ParallelConfig, layout: Layout, mode: Mode, *, dtype: str) -> str:
    """One line for the log: what ``parallel.mode`` became, and what it is needed for.

    Args:
        parallel: The configuration.
        layout: The degrees.
        mode: From `resolve_mode`.
        dtype: ``train.dtype``.
    """
    if parallel.mode != "auto":
        return f"parallel.mode={parallel.mode!r} as configured"
    spec = layout.spec
    ranks = spec.dp_replicate * spec.dp_shard * spec.cp
    if mode == "none":
        why = "no wrapper: parameters are float32 and no other rank adds to their gradients"
    elif ranks > 1:
        why = {
            "ddp": f"{spec.dp_replicate} ranks hold whole copies and add their gradients",
            "hsdp": f"{spec.dp_replicate} copies, each sharded over {ranks // spec.dp_replicate} ranks",
            "fsdp": f"parameters, gradients and optimizer state are sharded over {ranks} ranks",
        }[mode]
    else:
        needs = ["mixed precision (bf16 compute, float32 master weights)"] if dtype == "bf16" else []
        needs += [f"offload to {parallel.offload!r}"] if parallel.offload != "none" else []
        why = f"for {' and '.join(needs) or 'experts that several ranks hold'}"
        if layout.num_ranks == 1:
            why += "; on one rank it makes no collective"
    return f"parallel.mode='auto' is {mode!r}: {why}"


def check_placement(layout: Layout, per_node: int) -> list[str]:
    """Hold the groups that exchange activations in every layer to one node.

    Ranks are numbered along the nodes and the mesh's innermost axis is tp, then cp: their groups are neighbours, and
    stay on a node if the node holds whole ones. Other axes exchange less and may cross.

    Args:
        layout: The degrees over all ranks.
        per_node: Ranks on each node.

    Returns:
        One line for each axis that crosses nodes though it would better not.

    Raises:
        ValueError: A tensor-parallel group would cross.
    """
    if _crossing(layout, "tp", per_node):
        tp = layout.size("tp")
        near = [n for n in (per_node // tp * tp, (per_node // tp + 1) * tp) if n]
        raise ValueError(
            f"parallel.tp={tp} ranks exchange in every layer and must share a node, but launch.nproc={per_node} ranks of a "
            f"node are not whole groups of {tp}. Use launch.nproc={near[0]}, or a tp that divides {per_node}."
        )
    crossing = _crossing(layout, "cp", per_node)
    if not crossing:
        return []
    return [f"parallel.cp={layout.size('cp')} ranks share sequences across nodes, such as ranks {crossing[0]}: slower"]


def _crossing(layout: Layout, axis: str, per_node: int) -> list[tuple[int, ...]]:
    return [group for group in layout.groups(axis) if len({rank // per_node for rank in group}) > 1]


def _hsdp_hint(world_size: int) -> str:
    inner = [d for d in range(2, world_size) if world_size % d == 0]
    if not inner:
        return f"{world_size} ranks cannot be cut in two such degrees: use mode 'fsdp'."
    return f"Set dp_replicate to one of {inner} and leave dp_shard at -1."
