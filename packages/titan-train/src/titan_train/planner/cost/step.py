"""Seconds of one optimizer step, by term.

Per microbatch a rank runs its blocks; the terms of `titan_train.planner.cost.block` add up. Around them stand the loss
head, the transfers of data parallelism as far as compute does not hide them, the pipeline's bubble and transfers, the
optimizer and the host.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from titan_train.models.shape import ExpertsShape, ModelShape
from titan_train.planner.cost.block import BlockCost, Context, block_cost, in_bf16
from titan_train.planner.cost.constants import Constants
from titan_train.planner.cost.links import Span, gather_seconds, reduce_seconds, span
from titan_train.planner.cost.products import product_seconds, rates
from titan_train.planner.cost.schedules import schedule_cost
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.setup import Setup

TERMS = {
    "products": "dense matrix products and float8 casts",
    "attention": "attention, or the scan of state-space layers",
    "experts": "routed experts: grouped products, permutation, router",
    "pointwise": "norms, gates, residuals",
    "head": "last matrix product and loss",
    "recompute": "forward repeated in backward",
    "tp": "tensor parallelism's transfers that nothing hides",
    "cp": "context parallelism's transfers that attention does not hide",
    "ep": "tokens sent to experts and back, not hidden",
    "dp": "parameters gathered and gradients reduced, not hidden",
    "pp": "activations sent between stages, not hidden",
    "bubble": "pipeline ranks waiting: warm-up, cool-down and unequal stages",
    "offload": "copies to and from host memory, not hidden",
    "optimizer": "parameter update",
    "host": "launches that the device waits for, data, step overhead",
}


_SPLIT_COST = 1.03
"""Compute of a schedule that splits backward over that of one backward: more launches, and inputs that are read twice.
A prior."""
_INTERLEAVED = 1.6
"""Host time of a routed block whose forward and another microbatch's backward are launched piece by piece, over one pass."""
_UNFUSED = 1.35
"""Host time of a routed block that sorts, counts and sends by kernels of their own, over a fused dispatcher's."""
STATES_PASSES = {"bf16": 488.0, "int8": 216.0}
"""Bytes for each parameter that AdamW with small states moves, operator by operator: it has no fused kernel."""
_NEWTON_SCHULZ = 5
_HOST_UPDATE = 60e9
"""Bytes per second that the host's optimizer streams, a device's share of the host."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step."""

    terms: dict[str, float]
    """Seconds by term; they add up to the step."""

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.terms.values())


def context_of(shape: ModelShape, machine: Machine, constants: Constants, setup: Setup) -> Context:
    """DeviceRates and spans of a run."""
    shares = constants.local, constants.network
    return Context(
        machine,
        constants,
        setup,
        shape.dim,
        rates(machine, constants, setup.precision),
        span(machine, setup.tp, 1, *shares),
        span(machine, setup.cp, setup.tp, *shares),
        span(machine, setup.ep, 1, *shares),
    )


@dataclass(frozen=True, slots=True)
class MicrobatchTime:
    """Seconds of one microbatch through all blocks and the head: the same over any data-parallel and pipeline ranks."""

    passes: dict[str, float]
    """Of all blocks, by term."""
    head: float
    launches: float
    """That the host needs to launch its kernels."""
    forward: float
    backward: float


def microbatch_time(c: Context, shape: ModelShape) -> MicrobatchTime:
    """Seconds of one microbatch."""
    costs = [block_cost(c, block) for block in shape.blocks]
    head = head_seconds(c, shape)
    return MicrobatchTime(_all_blocks(c, shape, costs), head, _launches(c, shape), *_window(shape, costs, head))


def step_time(
    shape: ModelShape, machine: Machine, constants: Constants, setup: Setup, microbatch: MicrobatchTime | None = None
) -> StepTime:
    """Seconds of a step by term; ``microbatch`` spares what another setup of the same microbatch has computed."""
    c = context_of(shape, machine, constants, setup)
    microbatch = microbatch or microbatch_time(c, shape)
    m, p = setup.microbatches, setup.pp
    passes, head = microbatch.passes, microbatch.head
    compute = sum(passes.values()) + head
    terms = dict.fromkeys(TERMS, 0.0)
    for name, seconds in passes.items():
        terms[name] = m * seconds / p
    terms["head"] = m * head / p
    terms["ep"] *= 1 - (constants.hide_ep if setup.ep_overlap else 0.0)
    waiting = max(0.0, microbatch.launches - compute)
    terms["host"] = constants.step_s + m * (waiting / p)
    blocks = sum(passes.values()) / max(1, shape.num_layers)
    if p > 1:
        layers = shape.num_layers
        if setup.equal_stages and layers % p == 0:
            load = layers / p * blocks + head
        else:
            load = heaviest_rank(layers, head / blocks, p) * blocks
        terms["bubble"], terms["pp"] = _pipeline(c, load, compute / p)
    # while the device waits for launches, transfers go on: a third of it in forward
    forward, backward = microbatch.forward + 1 / 3 * waiting, microbatch.backward + 2 / 3 * waiting
    terms["dp"] = data_parallel_seconds(c, shape, forward, backward, head)
    terms["offload"] = _offload(c, shape, compute / p)
    terms["optimizer"] = _optimizer(c, shape)
    return StepTime(terms)


@lru_cache(maxsize=4096)
def heaviest_rank(layers: int, head: float, p: int) -> float:
    """Blocks' worth of work on the pipeline's busiest rank, when the rank with the head is given fewer blocks."""
    best = math.inf
    for last in range(layers // p + 2):
        others = math.ceil((layers - last) / (p - 1))
        best = min(best, max(others, last + head))
    return best


def _all_blocks(c: Context, shape: ModelShape, costs: list[BlockCost]) -> dict[str, float]:
    """Seconds of one microbatch through all blocks, by term."""
    out: dict[str, float] = {}
    for block, cost in zip(shape.blocks, costs, strict=True):
        for part in (cost.forward, cost.backward):
            for name, seconds in part.items():
                out[name] = out.get(name, 0.0) + block.count * seconds
        for name, seconds in cost.recompute.items():
            key = name if name in ("tp", "cp", "ep") else "recompute"
            out[key] = out.get(key, 0.0) + block.count * seconds
    for cost in second_token(c, shape, costs):
        for part in (cost.forward, cost.backward):
            for name, seconds in part.items():
                out[name] = out.get(name, 0.0) + shape.mtp * seconds
    return out


def second_token(c: Context, shape: ModelShape, costs: list[BlockCost]) -> list[BlockCost]:
    """What predicts one further token: a mixer with a feed-forward. Hybrids have two blocks for it, whose products stay in
    bf16.
    """
    if not shape.mtp:
        return []
    if shape.mtp_block is not None:
        return [block_cost(c, shape.mtp_block)]
    if shape.blocks[-1].ffn is not None:
        return [costs[-1]]
    plain = in_bf16(c)
    return [block_cost(plain, block) for block in shape.mtp_blocks]


def head_seconds(c: Context, shape: ModelShape) -> float:
    if not shape.vocab:
        return 0.0
    s = c.setup
    product = product_seconds(c.rates, s.tokens, shape.dim, shape.vocab / s.tp, plain=True)
    logits = s.tokens * shape.vocab / s.tp
    per_logit = {"eager": 40.0, "compiled": 16.0, "fused": 10.0, "chunked": 16.0}[s.loss]
    return (1 + shape.mtp) * (3 * product + per_logit * logits / c.rates.stream)


def _launches(c: Context, shape: ModelShape) -> float:
    """Seconds that the host needs to launch one microbatch's kernels; backward launches twice as many as forward."""
    again = 3 + (c.setup.recompute == "full")
    seconds = shape.num_layers * c.constants.kernels * c.constants.kernel_s * again
    routed = sum(b.count for b in shape.blocks if isinstance(b.ffn, ExpertsShape)) * c.constants.routed_launch_s
    if c.setup.te and c.setup.dispatcher == "alltoall":
        routed *= _UNFUSED
    return seconds + (_INTERLEAVED if c.setup.ep_overlap and c.setup.stack == "te" else 1.0) * routed


def _pipeline(c: Context, load: float, even: float) -> tuple[float, float]:
    """Seconds of bubble, unequal stages included, and of exposed transfers."""
    s = c.setup
    p, v, m = s.pp, s.stages_per_rank, s.microbatches
    cost = schedule_cost(s.schedule, p, v, m)
    # the schedule's bubble with equal stages; a rank that is loaded more waits less
    bubble = m * (load - even) + cost.bubble / (p - 1) * max(0.0, p * even - load)
    bubble += (_SPLIT_COST - 1) * m * even if cost.splits else 0.0
    sent = s.element * s.tokens * c.dim / s.tp
    link = c.group(p, s.world_size // p)
    hop = sent / link.bytes_per_s * (1 if link.local else max(1, link.per_domain)) + link.latency_s
    exposed = 1.0 if not s.overlap else 0.25 if v > 1 else 0.5
    count = 2 * (m * v + (p - 1))
    return bubble, exposed * hop * count


def _window(shape: ModelShape, costs: list[BlockCost], head: float) -> tuple[float, float]:
    """Seconds of forward and of backward of one microbatch through all blocks."""
    forward = backward = 0.0
    for block, cost in zip(shape.blocks, costs, strict=True):
        forward += block.count * sum(cost.forward.values())
        backward += block.count * (sum(cost.backward.values()) + sum(cost.recompute.values()))
    return forward + head / 3, backward + 2 * head / 3


def rank_parameters(shape: ModelShape, setup: Setup, *, first: bool = True, share: float = 0.0) -> tuple[float, float]:
    """Dense and expert parameters of one rank before sharding: the pipeline rank with the embedding, or an inner one.

    ``share`` is the rank's part of the blocks; 0 takes an even one. An inner rank with a share of its own holds blocks with
    experts alone, where it can: a model's dense blocks are its first.
    """
    dense, experts = shape.totals
    if share and not first and experts:
        experts *= min(1 / share, shape.num_layers / sum(n for n, _, routed in shape.block_sizes if routed))
    share = share or 1 / setup.pp
    return dense * share / setup.tp + rank_ends(shape, setup, first=first), experts * share / setup.ep


def rank_ends(shape: ModelShape, setup: Setup, *, first: bool = True) -> float:
    """Parameters of embedding and head on one rank before sharding."""
    if not first and setup.pp > 1:
        return 0.0
    apart = setup.pp > 1 and not setup.head_on_first_rank
    return shape.head_parameters * (1 if apart or shape.tied else 2) / setup.tp


def data_parallel_seconds(c: Context, shape: ModelShape, forward: float, backward: float, head: float) -> float:
    """Exposed seconds of a step's gathers and reductions."""
    s = c.setup
    if s.task == "lora" and s.sharding != "fsdp":
        return 0.0
    dense, experts = rank_parameters(shape, s)
    shard = s.dp_shard * s.cp
    group = c.group(shard, s.tp)
    replicas = c.group(s.dp_replicate, s.tp * shard)
    expert_shards = s.expert_shard
    expert_group = c.group(expert_shards, s.ep)
    gather_bytes = 1.0 if s.precision == "tensorwise" or (s.te and s.float8) else float(s.element)
    train = 0.0 if s.task == "lora" else 1.0
    reduce_bytes = s.grad_bytes * train

    def both(num: float, where: Span, bytes_each: float) -> float:
        return gather_seconds(num * bytes_each, where, _calls(s, shape, num, where))

    gather = both(dense, group, gather_bytes) + both(experts, expert_group, gather_bytes)
    reduce = both(dense, group, reduce_bytes) + both(experts, expert_group, reduce_bytes)
    across = reduce_seconds(dense * reduce_bytes / shard, replicas, _calls(s, shape, dense, replicas)) + reduce_seconds(
        experts * reduce_bytes / expert_shards, replicas, _calls(s, shape, experts, replicas)
    )
    f, b = forward / s.pp, backward / s.pp
    if not s.overlap:
        return gather + reduce + across
    late = across if s.stack == "xla" else 0.0  # a scan over layers has all gradients at its end only
    across -= late
    if s.sharding == "fsdp" and s.pp == 1:
        m = s.microbatches
        layers = max(1, shape.num_layers)
        again = gather if s.reshard else 0.0
        each = max(0.0, gather - f) + max(0.0, again + reduce + across - b)
        hidden = (gather + again + reduce + across) - each
        edge = (gather + reduce + across) / layers
        return m * (each + c.constants.contention * hidden) + edge + late
    chunks = max(1, min(s.microbatches, s.pp)) if s.pp > 1 else 1
    window_f, window_b = f * chunks / max(1, s.pp), b * chunks / max(1, s.pp)
    each = max(0.0, gather - window_f) + max(0.0, reduce + across - window_b)
    hidden = gather + reduce + across - each
    return each + c.constants.contention * hidden


def _calls(setup: Setup, shape: ModelShape, parameters: float, group: Span) -> float:
    """Collectives in which so many parameters are gathered or reduced: one a block, or Megatron's buckets."""
    if setup.sharding == "fsdp":
        return shape.num_layers / setup.pp + 1
    return math.ceil(parameters / max(40e6, 1e6 * group.size))


def _offload(c: Context, shape: ModelShape, compute: float) -> float:
    s = c.setup
    seconds = 0.0
    if s.offload_activations:
        each = 26 if s.stack == "eager" else 17  # of a block's width; eager norms and rotations keep more
        moved = s.element * s.tokens * shape.dim / s.tp * each * shape.num_layers / s.pp * s.offload_activations
        seconds += s.microbatches * max(0.0, 2 * moved / c.machine.host_bandwidth - 0.9 * compute)
    if s.offload_optimizer:
        dense, experts = rank_parameters(shape, s)
        local = dense / (s.dp_shard * s.cp) + experts / s.expert_shard
        gathers = s.weight_bytes * (s.microbatches * (1 + s.reshard) + 1)  # parameters, and gradients back
        copies = max(0.0, gathers * local / c.machine.host_bandwidth - 0.5 * s.microbatches * compute)
        seconds += s.offload_optimizer * (copies + (3 * s.weight_bytes + 2 * s.state_bytes[0]) * local / _HOST_UPDATE)
    return seconds


def _optimizer(c: Context, shape: ModelShape) -> float:
    s = c.setup
    if s.task == "lora":
        return 0.0
    dense, experts = rank_parameters(shape, s)
    shard = 1 if s.sharding == "ddp" else s.dp_shard * s.cp
    local = dense / shard + experts / (1 if s.sharding == "ddp" else s.expert_shard)
    # parameter and state read and written, gradient read, a bf16 copy written of what is no bf16 itself
    of_blocks, of_ends = s.state_bytes
    copy = s.element if s.weight_bytes > s.element else 0.0
    moved = STATES_PASSES.get(s.states, 3 * s.weight_bytes + copy + 2 * of_blocks)
    seconds = moved * local * (1 - s.offload_optimizer) / c.rates.stream
    if (
        of_blocks < of_ends
    ):  # Muon: five Newton-Schulz steps of at most 6 x width operations an element, by the element's owner
        seconds += _NEWTON_SCHULZ * 6 * shape.dim * local / c.rates.plain
    return seconds
