"""The largest number of bytes at one time, and the instant at which it is reached.

Instants are compared on the first pipeline rank (most microbatches in flight) and on the last (the head):

- backward of a block: states, kept activations, and one block's gathered parameters, gradients and recomputed values;
- loss: states, kept activations, logits with their gradient, the gathered head;

Megatron-style stacks (zero1) add a bf16 dummy gradient for one block, which TransformerEngine keeps for ever.
"""

from dataclasses import dataclass

from titan_train.planner.memory.kept import kept_token_bytes, recomputed_token_bytes
from titan_train.planner.memory.states import (
    dummy_gradient_bytes,
    gathered_block_bytes,
    gathered_head_bytes,
    state_bytes,
)
from titan_train.planner.model.shape import Block, ExpertsShape, FeedForwardShape, ModelShape
from titan_train.planner.setup import Setup

_GIB = 2.0**30
# bytes per logit at the loss: copies in bf16 and float32, log-softmax, gradient
_LOSS_BYTES = {"eager": 14.0, "compiled": 6.0, "fused": 4.0, "chunked": 1.0}


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
    """The peak over the first and the last pipeline rank."""
    ranks = [_rank_peak(shape, setup, first=True)]
    if setup.pp > 1:
        ranks.append(_rank_peak(shape, setup, first=False))
    return max(ranks, key=lambda peak: peak.allocated)


def in_flight(setup: Setup, *, first: bool) -> float:
    """Microbatches whose activations the rank holds at most, each of the rank's share of the blocks."""
    p, v, m = setup.pp, setup.stages_per_rank, setup.microbatches
    if p == 1:
        return 1.0
    if setup.schedule == "gpipe":
        return float(m)
    if setup.schedule == "zb_h2":
        return float(min(m, 2 * p - 1))
    if setup.schedule == "dualpipe_v":
        return min(float(m), p + 0.5)
    if setup.schedule in ("zbv", "zb_h1"):
        return float(min(m, p))
    if v > 1:
        return min(float(m), p + (p - 1) / v if first else 1 + (p - 1) / v)
    return float(min(m, p)) if first else 1.0


def _rank_peak(shape: ModelShape, setup: Setup, *, first: bool) -> MemoryPeak:
    tokens, tp = setup.tokens, setup.tp
    parts = dict(state_bytes(shape, setup, first=True))
    layers = kept_token_bytes(shape, setup) / setup.pp
    kept = layers * tokens / tp * in_flight(setup, first=first)
    parts["activations"] = kept * (1 - setup.offload_activations)
    if tp > 1:
        parts["tp buffers"] = 3 * 2.0 * tokens * shape.dim
    if setup.pp > 1 and setup.sharding == "fsdp":  # torch's stages hold buffers for every microbatch, both ways
        parts["receive buffers"] = setup.stages_per_rank * 2 * setup.microbatches * 2.0 * tokens * shape.dim / tp
    parts["workspace"] = 0.2 * _GIB if setup.sharding == "zero1" else 1.0 * _GIB
    working = working_set(shape, setup) * tokens / tp
    if setup.sharding == "zero1":
        parts["dummy gradients"] = dummy_gradient_bytes(shape, setup) if setup.te else 0.0
        backward = {"block working set": working}
        loss = {"head gradient": 2.0 * shape.head_parameters / tp}
    elif setup.pp == 1:
        head = gathered_head_bytes(shape, setup)
        backward = {
            "gathered block": gathered_block_bytes(shape, setup),
            "block working set": working,
            "gathered head": head,
        }
        loss = {"gathered head": head}
    else:
        backward = {"block working set": working}
        loss = {}
    if shape.vocab and (not first or setup.pp == 1):
        per_logit = _LOSS_BYTES[setup.loss]
        if setup.loss == "eager" and tp > 1:
            per_logit = 20.0
        loss["logits"] = per_logit * tokens * shape.vocab / tp * (1 + shape.mtp)
        loss["head input"] = 2 * 2.0 * tokens * shape.dim if setup.sharding != "zero1" else 0.0
    else:
        loss = {}
    at_loss = sum(loss.values()) > sum(backward.values())
    parts |= loss if at_loss else backward
    allocated = sum(parts.values())
    fragments = 1.04 if setup.sharding == "zero1" else 1.01
    where = "first" if first else "last"
    rank = f" on the {where} pipeline rank" if setup.pp > 1 else ""
    instant = ("the loss's backward" if at_loss else "backward of a block") + rank
    return MemoryPeak({k: v for k, v in parts.items() if v}, instant, allocated * fragments)


def working_set(shape: ModelShape, setup: Setup) -> float:
    """Bytes a token of one block's backward: what it recomputes, and the gradients on both sides of its widest operator."""
    key = ("working", setup.recompute, setup.recompute_modules, setup.stack, setup.float8, setup.ep > 1)
    if setup.stack == "eager":
        key = (*key, setup.tp, setup.tokens)
    if key not in shape.memo:
        shape.memo[key] = max(
            (recomputed_token_bytes(b, shape.dim, setup) + 4.0 * _widest(b, shape.dim) for b in shape.blocks),
            default=0.0,
        )
    return shape.memo[key]


def _widest(block: Block, dim: int) -> float:
    """Elements a token of the largest tensor in a block."""
    widest = float(dim)
    if block.attention is not None:
        widest = max(widest, block.attention.heads * block.attention.head_dim)
    if isinstance(block.ffn, FeedForwardShape):
        widest = max(widest, block.ffn.hidden)
    elif isinstance(block.ffn, ExpertsShape):
        widest = max(widest, block.ffn.per_token * max(block.ffn.hidden, block.ffn.latent_dim or dim))
    if block.ssm is not None:
        widest = max(widest, 2 * block.ssm.inner)
    return widest
