"""What cannot fit: the term that breaks it, and the smallest change that makes it fit."""

from collections.abc import Iterator
from dataclasses import replace

from titan_train.config.optimizer import ADAMW_STATE_BYTES
from titan_train.models.shape import ModelShape
from titan_train.planner.estimate import StepEstimate
from titan_train.planner.memory.peak import MemoryPeak, memory_peak
from titan_train.planner.search.search import Searcher
from titan_train.planner.search.space import PlanRequest, degrees
from titan_train.planner.setup import Setup

_GIB = 2.0**30


def breaking_term(peak: MemoryPeak) -> tuple[str, float]:
    """The use that takes the most bytes."""
    return max(peak.parts.items(), key=lambda part: part[1])


def changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Changes that lower memory, those that cost the least speed first."""
    if not setup.reshard:
        yield "reshard after forward", replace(setup, reshard=True)
    if setup.microbatch > 1:
        yield f"microbatch {setup.microbatch // 2}", replace(setup, microbatch=setup.microbatch // 2)
        yield "microbatch 1", replace(setup, microbatch=1)
    if setup.recompute == "none" and not setup.te:
        yield "selective recomputation", replace(setup, recompute="selective")
    full = _recomputed(setup)
    if full != setup:
        yield "full recomputation", full
        if setup.microbatch > 1:
            yield "full recomputation and microbatch 1", replace(full, microbatch=1)
    if setup.state_bytes == (ADAMW_STATE_BYTES["fp32"],) * 2 and setup.sharding == "fsdp":
        for states in ("bf16", "int8"):
            less = replace(setup, states=states, state_bytes=(ADAMW_STATE_BYTES[states],) * 2)
            yield f"optimizer.states = {states!r}", less
            both = replace(full, states=states, state_bytes=less.state_bytes)
            yield f"full recomputation and optimizer.states = {states!r}", both
    words = "the optimizer state in host memory" if setup.te else "parameters and optimizer state in host memory"
    if setup.pp == 1 or setup.te:
        yield words, replace(setup, offload_optimizer=1.0)
        yield (
            f"full recomputation, microbatch 1 and {words}",
            replace(full, microbatch=1, offload_optimizer=1.0),
        )


def _recomputed(setup: Setup) -> Setup:
    """The setup with every block computed again as a whole."""
    return replace(setup, recompute="full", recompute_share=1.0, recompute_modules=())


def sharded(setup: Setup) -> Setup:
    """The setup with parameters sharded over all its data-parallel ranks."""
    return setup if setup.te else replace(setup, sharding="fsdp", dp_replicate=1, dp_shard=setup.dp)


def exchanges(shape: ModelShape, setup: Setup) -> Iterator[tuple[str, Setup]]:
    """The same devices with more shards: of copies first; then the sequence or the heads are cut, the least cut first."""
    copies, setup = setup, sharded(setup)
    full = replace(_recomputed(setup), microbatch=1)
    if setup != copies and setup.dp > 1:
        words = f"parallel.mode='fsdp' with dp_replicate=1, dp_shard={setup.dp_shard}"
        yield words, setup
        yield f"{words}, full recomputation, microbatch 1", full
    for factor in (2, 4, 8, 16, 32):
        if setup.dp_shard % factor:
            return
        cp, tp = setup.cp * factor, setup.tp * factor
        if setup.seq_len % (2 * cp * setup.tp) == 0:
            words = f"cp={cp}, dp_shard={setup.dp_shard // factor}, full recomputation, microbatch 1"
            yield words, replace(full, cp=cp, dp_shard=setup.dp_shard // factor)
        if all(block.splits(tp) for block in shape.blocks):
            words = f"tp={tp}, dp_shard={setup.dp_shard // factor}, full recomputation, microbatch 1"
            yield words, replace(full, tp=tp, dp_shard=setup.dp_shard // factor)


def refuse_setup(shape: ModelShape, setup: Setup, peak: MemoryPeak, limit_bytes: float) -> str:
    """The sentence for one setup that does not fit."""
    name, size = breaking_term(peak)
    text = (
        f"does not fit: {peak.allocated_gib:.1f} GiB at {peak.instant}, and {limit_bytes / _GIB:.1f} GiB are usable. "
        f"Largest use: {name}, {size / _GIB:.1f} GiB."
    )
    for words, changed in changes(setup):
        smaller = memory_peak(shape, changed)
        if smaller.allocated <= limit_bytes:
            return f"{text} Smallest change that fits: {words} ({smaller.allocated_gib:.1f} GiB)."
    for words, changed in exchanges(shape, setup):
        smaller = memory_peak(shape, changed)
        if smaller.allocated <= limit_bytes:
            return f"{text} Smallest change that fits on these devices: {words} ({smaller.allocated_gib:.1f} GiB)."
    devices = fewest_shards(shape, setup, limit_bytes)
    if devices:
        return f"{text} No single change is enough; with {devices} devices (more shards) it fits."
    return (
        f"{text} No recomputation, shards or cut of sequence and heads over these devices is enough: use a shorter sequence, "
        "or a machine with more memory."
    )


def fewest_shards(shape: ModelShape, setup: Setup, limit_bytes: float) -> int | None:
    """Devices at which more sharding, with full recomputation, fits; None if it never does."""
    setup = sharded(setup)
    for factor in (2, 4, 8, 16, 32, 64):
        changed = replace(
            _recomputed(setup), dp_shard=setup.dp_shard * factor, global_batch=setup.global_batch * factor
        )
        if memory_peak(shape, changed).allocated <= limit_bytes:
            return changed.world_size
    return None


def refuse_search(request: PlanRequest, closest: StepEstimate | None) -> str:
    """The sentence for a search that found nothing."""
    given = f"{request.shape.name} on {request.gpus} x {request.machine.title} at {request.seq_len:,} tokens"
    if closest is None:
        for name, value in request.fixed.items():
            free = replace(request, fixed={n: v for n, v in request.fixed.items() if n != name})
            if name != "microbatch" and next(degrees(request), None) is None and next(degrees(free), None) is not None:
                legal = ", ".join(map(str, sorted({found[name] for found in degrees(free)})))
                return f"{given}: no legal layout has {name}={value}. With the other choices {name} may be {legal}."
        whole = request.global_batch // request.gpus * request.gpus
        near = " or ".join(str(batch) for batch in (whole, whole + request.gpus) if batch)
        nearest = (
            f" The nearest batch that all devices can share evenly: {near}." if request.global_batch != whole else ""
        )
        return (
            f"{given}: no legal layout. The global batch ({request.global_batch}) must be a multiple of the data-parallel "
            "ranks, and the sequence must divide over cp and tp; change the batch or the fixed degrees."
            f"{nearest}"
        )
    name, size = breaking_term(closest.memory)
    text = (
        f"{given} does not fit: the layout that needs the least memory ({closest.setup.describe()}) needs "
        f"{closest.memory.allocated_gib:.1f} GiB, and {request.limit_bytes / _GIB:.1f} GiB are usable. "
        f"Largest use: {name}, {size / _GIB:.1f} GiB."
    )
    fewest, smaller = "Smallest number of devices that fits:", ""
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(
            request, gpus=request.gpus * factor, global_batch=max(request.global_batch, request.gpus * factor)
        )
        best = Searcher(more).run(1).best
        if best and best[0].setup.states == request.states[0]:
            return f"{text} {fewest} {more.gpus}{f', or {smaller}' if smaller else ''}."
        if best and not smaller:
            smaller = f"{more.gpus} with optimizer.states = {best[0].setup.states!r}"
    if smaller:
        return f"{text} {fewest} {smaller}."
    for factor in (2, 4, 8, 16):
        if request.seq_len // factor >= 1024:
            shorter = replace(request, seq_len=request.seq_len // factor)
            if Searcher(shorter).run(1).best:
                return f"{text} Longest sequence that fits: {shorter.seq_len:,}."
    return f"{text} No change of layout is enough: use a machine with more memory."
