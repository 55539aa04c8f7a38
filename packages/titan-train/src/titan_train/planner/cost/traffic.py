"""Counts and bytes of a step's transfers by axis, as titan-train issues them: what the seconds of `links` are spent on.

Bytes are those of the whole message: an all-gather's result, a reduce-scatter's input, what an all-to-all or a send
sends. Left out is the step's bookkeeping (losses, norms, flags). A test holds counts and bytes to a real step's.
"""

from collections import Counter
from dataclasses import dataclass

from titan_train.models.shape import Block, ExpertsShape, ModelShape
from titan_train.planner.setup import Setup


@dataclass(frozen=True, slots=True)
class Traffic:
    """Transfers of one rank in one step, by (axis, kind)."""

    counts: Counter[tuple[str, str]]
    num_bytes: Counter[tuple[str, str]]

    def add(self, axis: str, kind: str, count: int, each: float) -> None:
        """Count transfers of one size."""
        if count:
            self.counts[axis, kind] += count
            self.num_bytes[axis, kind] += round(count * each)


def step_traffic(shape: ModelShape, setup: Setup, *, element_bytes: int = 2, grad_bytes: int = 4) -> Traffic:
    """Transfers of the first rank (of the first pipeline rank, if there are several)."""
    traffic = Traffic(Counter(), Counter())
    layers = [b for b in shape.blocks for _ in range(b.count)]
    if setup.pp > 1:
        layers = layers[: -(-len(layers) // setup.pp)]
    _data_parallel(traffic, shape, setup, layers, element_bytes, grad_bytes)
    if setup.tp > 1:
        _tensor_parallel(traffic, shape, setup, layers, element_bytes)
    if setup.cp > 1:
        _context_parallel(traffic, setup, layers, element_bytes)
    if setup.ep > 1:
        sent = setup.tokens / setup.tp * shape.dim * element_bytes
        for block in layers:
            if isinstance(block.ffn, ExpertsShape):
                # dispatch and combine, forward and backward
                again = 2 if setup.recompute == "full" else 0
                traffic.add("ep", "all_to_all", setup.microbatches * (4 + again), sent * block.ffn.per_token)
    if setup.pp > 1:
        hidden = setup.tokens * shape.dim * max(b.streams for b in layers) * element_bytes / setup.tp
        traffic.add("pp", "send", setup.microbatches, hidden)
    return traffic


def sharded_elements(shape: ModelShape, block: Block, tp: int) -> int:
    """A block's elements that tensor parallelism leaves on one rank, routed experts not counted: norms stay whole."""
    whole = block.norms * shape.dim
    if block.attention is not None and block.attention.qk_norm:
        whole += 2 * block.attention.head_dim
    if isinstance(block.ffn, ExpertsShape):
        whole += shape.dim * block.ffn.num_experts
    return whole + (block.mixer_parameters(shape.dim) + block.dense_parameters(shape.dim) - whole) // tp


def _data_parallel(
    traffic: Traffic, shape: ModelShape, setup: Setup, layers: list[Block], element_bytes: int, grad_bytes: int
) -> None:
    """One unit for the embedding, for each block and for norm and head; the last unit stays gathered into backward."""
    shards, copies = setup.dp_shard * setup.cp, setup.dp_replicate
    if shards == 1:
        return
    embedding = shape.head_parameters // setup.tp
    units = [embedding, *(sharded_elements(shape, b, setup.tp) for b in layers)]
    last = embedding + shape.final_norm * shape.dim
    if setup.pp == 1:
        units.append(last)
    m = setup.microbatches
    for number, elements in enumerate(units):
        gathers = m if not setup.reshard else 2 * m
        if setup.pp > 1:
            gathers, reduces = 1, 1
        else:
            gathers = m if number == len(units) - 1 else gathers
            reduces = m
        traffic.add("shard", "all_gather", gathers, elements * element_bytes)
        traffic.add("shard", "reduce_scatter", reduces, elements * grad_bytes)
        if copies > 1:
            traffic.add("replicate", "all_reduce", reduces, elements / shards * grad_bytes)
    for block in layers:
        if isinstance(block.ffn, ExpertsShape):
            _experts(traffic, shape, setup, block, element_bytes, grad_bytes)


def _experts(
    traffic: Traffic, shape: ModelShape, setup: Setup, block: Block, element_bytes: int, grad_bytes: int
) -> None:
    shards = setup.expert_shard
    if shards == 1:
        return
    axis = "shard" if setup.ep == 1 else "expert shard"
    elements = block.expert_parameters(shape.dim) // setup.ep
    m = setup.microbatches
    if setup.ep == 1:  # they travel with their block
        traffic.num_bytes[axis, "all_gather"] += 2 * m * elements * element_bytes
        traffic.num_bytes[axis, "reduce_scatter"] += m * elements * grad_bytes
        return
    traffic.add(axis, "all_gather", 2 * m, elements * element_bytes)
    traffic.add(axis, "reduce_scatter", m, elements * grad_bytes)


def _tensor_parallel(
    traffic: Traffic, shape: ModelShape, setup: Setup, layers: list[Block], element_bytes: int
) -> None:
    """A gather before and a reduce-scatter after each half of a block, mirrored in backward; the same around the model."""
    m, count = setup.microbatches, len(layers)
    whole = setup.tokens * shape.dim * element_bytes
    first = setup.pp > 1  # the first pipeline rank has no head
    gathers, scatters = 4 * count + (1 if first else 2), 4 * count + (1 if first else 2)
    if setup.recompute == "full":  # forward's again, but for the last one of each block
        gathers, scatters = gathers + 2 * count, scatters + count
    traffic.add("tp", "all_gather", m * gathers, whole)
    traffic.add("tp", "reduce_scatter", m * scatters, whole)
    norms = sum(b.norms * shape.dim for b in layers) + (0 if first else shape.final_norm * shape.dim)
    traffic.add("tp", "all_reduce", 1, norms * 4 / (setup.dp_shard * setup.cp))
    if not first and setup.loss == "chunked":  # the log-sum-exp and the label's logit of each rank, in some chunks
        traffic.add("tp", "all_gather", m, 2 * setup.tokens * 4 * setup.tp)
    elif not first:  # of the vocabulary-parallel loss: the largest logit, then sums
        traffic.add("tp", "all_reduce", m, setup.tokens * 4)
        traffic.add("tp", "all_reduce", m, 2 * setup.tokens * 4)


def _context_parallel(traffic: Traffic, setup: Setup, layers: list[Block], element_bytes: int) -> None:
    m, n = setup.microbatches, setup.cp
    again = 1 if setup.recompute == "full" else 0
    for block in layers:
        a = block.attention
        if block.delta is not None:  # maps and states of two cut pieces a rank, and again where backward runs the layer
            d = block.delta
            state = 2 * 4 * d.heads * d.state * (d.state + d.head_dim) / setup.tp
            traffic.add("cp", "all_gather", m * (3 + again), n * state)
        if a is None:
            continue
        q = setup.tokens * a.heads * a.head_dim * element_bytes / setup.tp
        kv = setup.tokens * a.kv_heads * a.head_dim * element_bytes / setup.tp
        if setup.cp_method == "ulysses":
            traffic.add("cp", "all_to_all", m * (2 + again), q + 2 * kv)
            traffic.add("cp", "all_to_all", m * (2 + again), q)
        elif setup.cp_method == "allgather":
            heads = max(1, a.kv_heads // setup.tp)
            # as titan-cp's `gather_heads`: what makes 8 MiB, or the size of a rank's own keys and values
            small = (8 << 20) // (setup.seq_len * 2 * a.head_dim * element_bytes)
            steps = -(-heads // max(1, min(heads, max(heads // n, small))))
            traffic.add("cp", "all_gather", steps * m * (2 + again), 2 * n * kv / steps)
            traffic.add("cp", "reduce_scatter", steps * m, 2 * n * kv / steps)
        else:  # keys and values go round in forward and backward; their gradients go round and home
            hops = (2 + again) * (n - 1) + n
            traffic.add("cp", "send", m * hops, 2 * kv)
