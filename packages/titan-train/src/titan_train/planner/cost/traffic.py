"""Counts and bytes of a step's transfers by axis, as titan-train issues them: what the seconds of `links` are spent on.

Bytes are those of the whole message: an all-gather's result, a reduce-scatter's input, what an all-to-all or a send
sends. Left out is the step's bookkeeping (losses, norms, flags). A test holds counts and bytes to a real step's.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_train.models.shape import Block, ExpertsShape, ModelShape
from titan_train.planner.setup import Setup

if TYPE_CHECKING:
    from titan_fsdp import Collectives


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


def step_traffic(
    shape: ModelShape | None,
    setup: Setup,
    wrapper: Mapping[str | None, "Collectives"],
    *,
    element_bytes: int = 2,
    held: int | None = None,
) -> Traffic:
    """Transfers of the first rank (of the first pipeline rank, if there are several).

    Args:
        shape: The model; None where it is not known and the ranks are data parallel alone.
        setup: How it is run.
        wrapper: What data parallelism sends, by mesh, counted on the wrapped module (`titan_fsdp.WrapPlan.collectives`).
        element_bytes: Of an element that the other axes send.
        held: Blocks of the first pipeline rank; None where it holds all.
    """
    traffic = Traffic(Counter(), Counter())
    _data_parallel(traffic, wrapper)
    if shape is None:
        return traffic
    layers = [b for b in shape.blocks for _ in range(b.count)][:held]
    if setup.tp > 1:
        _tensor_parallel(traffic, shape, setup, layers, element_bytes)
    if setup.cp > 1:
        _context_parallel(traffic, setup, layers, element_bytes)
    if setup.ep > 1:
        sent = setup.tokens / setup.tp * shape.dim * element_bytes
        for number, block in enumerate(layers):
            if isinstance(block.ffn, ExpertsShape):
                # dispatch and combine, forward and backward
                again = 2 * _runs_again(setup, number)
                traffic.add("ep", "all_to_all", setup.microbatches * (4 + again), sent * block.ffn.per_token)
    if setup.pp > 1:
        hidden = setup.tokens * shape.dim * max(b.streams for b in layers) * element_bytes / setup.tp
        traffic.add("pp", "send", setup.microbatches, hidden)
    return traffic


def _data_parallel(traffic: Traffic, wrapper: Mapping[str | None, "Collectives"]) -> None:
    kinds = {"all_gather": "shard", "reduce_scatter": "shard", "all_to_all": "shard", "all_reduce": "replicate"}
    for mesh, found in wrapper.items():
        for kind, axis in kinds.items():
            axis = axis if mesh is None else f"expert {axis}"
            count = getattr(found, kind)
            traffic.add(axis, kind, count, getattr(found, f"{kind}_bytes") / max(1, count))


def _tensor_parallel(
    traffic: Traffic, shape: ModelShape, setup: Setup, layers: list[Block], element_bytes: int
) -> None:
    """A gather before and a reduce-scatter after each half of a block, mirrored in backward; the same around the model."""
    m, count = setup.microbatches, len(layers)
    whole = setup.tokens * shape.dim * element_bytes
    first = setup.pp > 1  # the first pipeline rank has no head
    gathers, scatters = 4 * count + (1 if first else 2), 4 * count + (1 if first else 2)
    again = sum(_runs_again(setup, number) for number in range(count))
    gathers, scatters = gathers + 2 * again, scatters + again  # forward's, but for the last one of each block
    if setup.recompute == "selective":  # what is gathered is whole on every rank, and not kept; compiled, sums are
        gathers, scatters = gathers + 2 * count, scatters + (0 if setup.stack == "compile" else count)
    traffic.add("tp", "all_gather", m * gathers, whole)
    traffic.add("tp", "reduce_scatter", m * scatters, whole)
    norms = sum(b.norms * shape.dim for b in layers) + (0 if first else shape.final_norm * shape.dim)
    traffic.add("tp", "all_reduce", 1, norms * 4 / (setup.dp_shard * setup.cp))
    if not first and setup.loss == "chunked":  # the log-sum-exp and the label's logit of each rank, in some chunks
        traffic.add("tp", "all_gather", m, 2 * setup.tokens * 4 * setup.tp)
    elif not first:  # of the vocabulary-parallel loss: the largest logit, then sums
        traffic.add("tp", "all_reduce", m, setup.tokens * 4)
        traffic.add("tp", "all_reduce", m, 2 * setup.tokens * 4)


def _runs_again(setup: Setup, number: int) -> bool:
    """Whether backward runs a pipeline rank's block again, of which each k-th is recomputed."""
    return setup.recompute == "full" and number % round(1 / setup.recompute_share) == 0


def _context_parallel(traffic: Traffic, setup: Setup, layers: list[Block], element_bytes: int) -> None:
    m, n = setup.microbatches, setup.cp
    # compiled, the exchange stands between the pieces of a block that are recomputed
    repeated = setup.recompute == "selective" and setup.stack != "compile"
    for number, block in enumerate(layers):
        a, again = block.attention, int(repeated or _runs_again(setup, number))
        if block.delta is not None:  # maps and states of two cut pieces a rank, and again where backward runs the layer
            d = block.delta
            state = 2 * 4 * d.heads * d.state * (d.state + d.head_dim) / setup.tp
            traffic.add("cp", "all_gather", m * (3 + again), n * state)
        if a is None:
            continue
        q = setup.tokens * a.heads * a.head_dim * element_bytes / setup.tp
        heads = max(1, a.kv_heads // setup.tp)
        kv = setup.tokens * heads * a.head_dim * element_bytes
        if setup.cp_method == "ulysses":
            kv *= n // math.gcd(heads, n)  # repeated until every rank gets as many
            traffic.add("cp", "all_to_all", m * (2 + again), q + 2 * kv)
            traffic.add("cp", "all_to_all", m * (2 + again), q)
        elif setup.cp_method == "allgather":
            # as titan-cp's `gather_heads`: what makes 8 MiB, or the size of a rank's own keys and values
            small = (8 << 20) // (setup.seq_len * 2 * a.head_dim * element_bytes)
            steps = -(-heads // max(1, min(heads, max(heads // n, small))))
            traffic.add("cp", "all_gather", steps * m * (2 + again), 2 * n * kv / steps)
            traffic.add("cp", "reduce_scatter", steps * m, 2 * n * kv / steps)
        else:  # keys and values go round in forward and backward; their gradients go round and home
            hops = (2 + again) * (n - 1) + n
            traffic.add("cp", "send", m * hops, 2 * kv)
