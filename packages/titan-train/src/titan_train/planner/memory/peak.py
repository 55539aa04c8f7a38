"""The largest number of bytes at one time, by use, and the instant at which it is reached: the account of `plan`, `check`, a
rehearsal and the report. `plan` and `check --hardware` fill it from formulas, `check` with what `ranks` counts on the real model.

Instants are compared on the first pipeline rank (most microbatches in flight), on the last (the head), and on the fullest other:

- backward of a block: states, kept activations, and one block's gathered parameters, gradients and recomputed values;
- loss: states, kept activations, logits with their gradient, the gathered head;
- end of backward: states, and the embedding's reduction, which is the largest where embedding and head are one weight;

Megatron-style stacks (zero1) add a bf16 dummy gradient for one block, which TransformerEngine never frees.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from titan_pipeline import balanced_cut

from titan_train.models.shape import ModelShape, head_chunk_rows
from titan_train.planner.cost.schedules import schedule_cost
from titan_train.planner.memory.kept import kept_bytes, working_bytes
from titan_train.planner.memory.states import (
    dummy_gradient_bytes,
    gathered_block_bytes,
    gathered_end_bytes,
    gathered_head_bytes,
    state_bytes,
)
from titan_train.planner.setup import Setup

_GIB = 2.0**30
WORKSPACE = 1.0 * _GIB
"""Bytes of communicators and cuBLAS on a GPU."""
# bytes per logit at the loss: copies in bf16 and float32, log-softmax, gradient
_LOSS_BYTES = {"eager": 14.0, "compiled": 6.0, "fused": 4.0}


PARTS = {
    "parameters": "parameters, their shards where they are sharded",
    "gradients": "gradients, sharded as the parameters are",
    "optimizer": "optimizer state",
    "gathered": "parameters gathered and gradients not yet reduced, at this instant",
    "activations": "saved for backward, of all microbatches in flight",
    "block working set": "backward of one block: what it recomputes, its widest gradients",
    "logits": "logits of the loss and their gradient",
    "head input": "input of the head and its gradient",
    "tp buffers": "gathered inputs and partial sums of tensor parallelism",
    "messages": "received and sent between stages",
    "dummy gradients": "gradients of one block that TransformerEngine never frees",
    "head gradient": "gradient of the head's weight, until it is added to the others",
    "workspace": "communicators and libraries, on a GPU",
}


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Bytes of the fullest rank at its fullest instant."""

    parts: dict[str, float]
    """Bytes by use; they add up to ``allocated``."""
    instant: str
    """What the rank is doing."""
    reserved: float
    """Bytes that the allocator holds, fragmentation counted."""

    @property
    def allocated(self) -> float:
        """Bytes in use."""
        return sum(self.parts.values())

    @property
    def allocated_gib(self) -> float:
        """The same, in GiB."""
        return self.allocated / _GIB

    @property
    def reserved_gib(self) -> float:
        """The same, in GiB."""
        return self.reserved / _GIB


def memory_peak(shape: ModelShape, setup: Setup) -> MemoryPeak:
    """The peak over the first pipeline rank, the last and the fullest other; on a V the first has both ends."""
    if setup.pp == 1:
        return rank_peak(shape, setup, first=True, head=True)
    peak = partial(rank_peak, shape, setup, blocks=(kept_bytes(shape, setup), working_bytes(shape, setup)))
    if setup.head_on_first_rank:
        ends, *inner = block_shares(shape, setup)
        ranks = [peak(first=True, head=True, share=ends), peak(first=False, head=False, share=max(inner))]
    else:
        # others than the trainer cut evenly
        ours = setup.sharding == "fsdp" and not setup.receive_ahead and not setup.equal_stages
        first, *inner, last = block_shares(shape, setup) if ours else (0.0, 0.0)
        ranks = [peak(first=True, head=False, share=first), peak(first=False, head=True, share=last)]
        begin, end = in_flight(setup, 0.0), in_flight(setup, 1.0)
        held = [begin + (end - begin) * (number / (setup.pp - 1)) for number in range(1, setup.pp - 1)]
        fullest = max(zip(inner, held, strict=False), key=math.prod, default=None)
        if fullest is not None:
            ranks.append(peak(first=False, head=False, share=fullest[0], under_way=fullest[1]))
    return max(ranks, key=lambda rank: rank.allocated)


def block_shares(shape: ModelShape, setup: Setup) -> list[float]:
    """Parts of the blocks on each pipeline rank, as the trainer cuts them: stages of equal FLOPs, the last with the head."""
    key = "head in blocks", setup.seq_len
    if key not in shape.memo:
        block = replace(shape, vocab=0, mtp=0).flops_per_token(setup.seq_len, causal=False) / shape.num_layers
        shape.memo[key] = round(shape.mtp + (1 + shape.mtp) * 6.0 * shape.head_parameters / block, 2)
    return _shares(shape.num_layers, shape.memo[key], setup.pp, setup.stages_per_rank, setup.head_on_first_rank)


@lru_cache(maxsize=1024)
def _shares(layers: int, head: float, pp: int, stages_per_rank: int, on_a_v: bool) -> list[float]:
    stages = 2 * pp if on_a_v else pp * stages_per_rank
    costs = [1.0] * layers
    costs[-1] += head
    cut = [len(part) for part in balanced_cut(costs, stages)]
    on_rank = [[rank, -1 - rank] if on_a_v else range(rank, stages, pp) for rank in range(pp)]
    return [sum(cut[stage] for stage in held) / layers for held in on_rank]


def in_flight(setup: Setup, at: float) -> float:
    """Microbatches whose activations a rank holds at most, each of the rank's share of the blocks; ``at`` is its place from the
    first (0) to the last (1), between which their number falls evenly. On a V 0 is the rank with both ends.
    """
    if setup.pp == 1:
        return 1.0
    cost = schedule_cost(setup.schedule, setup.pp, setup.stages_per_rank, setup.microbatches)
    return cost.first + (cost.last - cost.first) * at


def rank_peak(
    shape: ModelShape,
    setup: Setup,
    *,
    first: bool,
    head: bool,
    share: float = 0.0,
    under_way: float = 0.0,
    counted: Mapping[str, float] | None = None,
    blocks: tuple[float, float] | None = None,
) -> MemoryPeak:
    """The peak of one pipeline rank.

    Args:
        shape: The whole model.
        setup: How it runs.
        first: The rank has the embedding.
        head: It has the head and the loss.
        share: Its part of the blocks; 0 takes an even one.
        under_way: Microbatches that it holds activations of; 0 takes those of the first rank or of the last.
        counted: Bytes of the states, ``gathered`` (in backward), ``gathered at end`` (of it) and ``activations``, counted on the
            model.
        blocks: `kept_bytes` and `working_bytes`, which are the same for all ranks, where the caller has them.
    """
    kept, working = blocks or (kept_bytes(shape, setup) if counted is None else 0.0, working_bytes(shape, setup))
    tp, fsdp, hidden = setup.tp, setup.sharding != "zero1", float(setup.element) * setup.tokens * shape.dim
    parts = dict(state_bytes(shape, setup, first=first or head, head=head, share=share))
    throughout = parts.pop("gathered", 0.0)
    if counted is None:
        under_way = under_way or in_flight(setup, 0.0 if first else 1.0)
        parts["activations"] = kept * (share or 1 / setup.pp) * under_way
    else:
        parts |= {name: size for name, size in counted.items() if not name.startswith("gathered")}
    stay = 0.0 if setup.te else min(1.0, 2 * setup.pp / shape.num_layers)  # two blocks: the last, and one on its way
    parts["activations"] *= 1 - setup.offload_activations * (1 - stay)
    if tp > 1:
        parts["tp buffers"] = 3 * hidden
    if setup.pp > 1 and setup.sharding == "fsdp":  # both ways; ours: two received ahead of need, and one on its way out
        messages = setup.stages_per_rank * setup.microbatches if setup.receive_ahead else 2 + 1
        parts["messages"] = 2 * messages * hidden / tp
    parts["workspace"] = WORKSPACE if fsdp else 0.2 * _GIB
    backward = {"block working set": working}
    loss: dict[str, float] = {}
    end: dict[str, float] = {}
    if not fsdp:
        parts["dummy gradients"] = dummy_gradient_bytes(shape, setup) if setup.te else 0.0
        loss["head gradient"] = 2.0 * shape.head_parameters / tp
    else:
        alone = setup.pp == 1
        at_head = gathered_head_bytes(shape, setup) if alone else 0.0
        block = gathered_block_bytes(shape, setup) if alone and setup.wrapped else 0.0
        backward["gathered"] = throughout + block if counted is None else counted["gathered"]
        loss["gathered"] = throughout + at_head if counted is None or alone else counted["gathered"]
        if counted is not None:
            end["gathered"] = counted.get("gathered at end", 0.0)
        elif alone and setup.sharding == "fsdp" and setup.wrapped:
            end["gathered"] = gathered_end_bytes(shape, setup)
    if shape.vocab and head:
        if setup.loss == "chunked":
            loss |= chunked_loss(shape, setup)
        else:
            per_logit = _LOSS_BYTES[setup.loss] if setup.loss != "eager" or tp == 1 else 20.0
            if counted is not None:
                per_logit -= 4.0  # saved for backward, and counted there
            loss["logits"] = per_logit * setup.tokens * shape.vocab / tp * (1 + shape.mtp)
        loss["head input"] = 2 * hidden if fsdp else 0.0
    else:
        loss = {}
    end["activations"] = -parts["activations"]
    instants = {"the loss's backward": loss, "backward of a block": backward, "the end of backward": end}
    instant, most = max(instants.items(), key=lambda at: sum(at[1].values()))
    parts |= most
    parts["activations"] = max(0.0, parts["activations"])
    allocated = sum(parts.values())
    fragments = 1.01 if fsdp else 1.04
    where = "first" if first else "last" if head else "fullest inner"
    rank = f" on the {where} pipeline rank" if setup.pp > 1 else ""
    return MemoryPeak({k: v for k, v in parts.items() if v}, instant + rank, allocated * fragments)


def chunked_loss(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Bytes of the loss that is computed a chunk of tokens at a time, on a GPU: the gradient of the head's weight in float32, and
    beside it the logits of one chunk in bf16, or in backward what FSDP is given of it, in bf16. With the gradient of the hidden
    states, what an H100 used (benchmarks/results/gpu_h100_202611.md).
    """
    vocab = shape.vocab / setup.tp
    rows = min(setup.tokens, head_chunk_rows(vocab, "cuda"))
    weight = 4.0 * shape.head_parameters / setup.tp
    scaled = weight / 2 if setup.element == 2 else 0.0  # float32 is scaled in place
    return {"logits": max(setup.element * rows * vocab, scaled), "head gradient": (1 + shape.mtp) * weight}
