"""Seconds of one block for one microbatch on one rank: forward, backward and what recomputation repeats, by operator.

Operators are ``products`` (dense matrix products and casts), ``attention``, ``experts`` (grouped products, permutation,
router), ``pointwise`` (norms, gates, residuals). Transfers inside a block are ``tp``, ``cp`` and ``ep``, before overlap.
"""

from dataclasses import dataclass, field, replace

from titan_train.models.shape import AttentionWidths, Block, DeltaShape, ExpertsShape, FeedForwardShape, StateSpaceShape
from titan_train.planner.cost.constants import Constants
from titan_train.planner.cost.links import Span, exchange_seconds, gather_seconds, span
from titan_train.planner.cost.products import DeviceRates, cast_seconds, plain_precision, product_seconds, rates
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.setup import Setup

# A chunked scan computes decays and running sums in float32 beside its products: operations for each token, channel and
# element of the state, forward, at the rate that streaming kernels reach. Newer matrix units do not help it.
_SCAN_OPERATIONS = 14.0


# Attention to gathered keys over attention to a band: 557 TFLOP/s backward on B200 for 512 chosen keys of width 512 and 64
# heads (NVIDIA/cudnn-frontend, pull request 318), and indexer and compressor beside it.
_SPARSE_RATE = 0.4
# Times that attention which is not fused writes or reads its scores: the product writes, softmax reads and writes, the second
# product reads; backward reads the probabilities twice, writes, reads and writes their gradients, reads those twice.
_SCORE_PASSES = (4.0, 7.0)
# Keys of the tiles at both ends of a window, which kernels read whole.
_WINDOW_TILE = 256


@dataclass(slots=True)
class BlockCost:
    """Seconds by operator."""

    forward: dict[str, float] = field(default_factory=dict[str, float])
    backward: dict[str, float] = field(default_factory=dict[str, float])
    recompute: dict[str, float] = field(default_factory=dict[str, float])
    last: dict[str, float] = field(default_factory=dict[str, float])
    """Of forward: the product and the transfer at the end, whose results backward does not need."""

    def add(self, operator: str, forward: float, backward: float) -> None:
        """Count an operator's passes."""
        self.forward[operator] = self.forward.get(operator, 0.0) + forward
        self.backward[operator] = self.backward.get(operator, 0.0) + backward


@dataclass(frozen=True, slots=True)
class Context:
    """What all blocks of a run share."""

    machine: Machine
    constants: Constants
    setup: Setup
    dim: int
    rates: DeviceRates
    tp: Span
    cp: Span
    ep: Span

    def group(self, size: int, stride: int) -> Span:
        """The link of another group of ranks."""
        return span(self.machine, size, stride, self.constants.local, self.constants.network)


def block_cost(c: Context, block: Block) -> BlockCost:
    """Cost of one block; the mean of both kinds where a share of the blocks stays in bf16."""
    share = c.setup.bf16_share
    if not share or c.setup.precision == "bf16":
        return _block_cost(c, block)
    mean, plain = _block_cost(c, block), _block_cost(in_bf16(c), block)
    for into, other in zip(
        (mean.forward, mean.backward, mean.recompute), (plain.forward, plain.backward, plain.recompute), strict=True
    ):
        for name, seconds in other.items():
            into[name] = (1 - share) * into.get(name, 0.0) + share * seconds
    return mean


def in_bf16(c: Context) -> Context:
    """The same run with products in bf16."""
    setup = replace(c.setup, precision="bf16", bf16_share=0.0)
    return replace(c, setup=setup, rates=rates(c.machine, c.constants, "bf16"))


def _block_cost(c: Context, block: Block) -> BlockCost:
    cost = BlockCost()
    if block.attention is not None:
        _attention(c, block.attention, cost)
    if block.carried is not None:
        _carried(replace(c, setup=c.setup.changed(tp=1)) if block.whole_state else c, block.carried, cost)
    before = cost.forward.get("products", 0.0)
    if isinstance(block.ffn, FeedForwardShape):
        _feed_forward(c, cost, block.ffn.matrices, block.ffn.hidden)
    elif isinstance(block.ffn, ExpertsShape):
        _experts(c, block.ffn, cost)
    _pointwise(c, block, cost)
    _tensor_transfers(c, block, cost)
    _recompute(c, block, cost)
    if c.setup.mlp_tiles > 1:
        of_tiles = cost.forward.get("products", 0.0) - before
        cost.recompute["products"] = cost.recompute.get("products", 0.0) + of_tiles
    return cost


def _carried(c: Context, s: StateSpaceShape, cost: BlockCost) -> None:
    """A layer with a state: over context ranks one all-gather of a map and a state of each head, for each cut document."""
    _products(c, cost, "products", [(c.dim, s.projected, c.dim), (s.inner, c.dim, s.inner)])
    scan = _SCAN_OPERATIONS * c.setup.tokens * s.inner * s.state / c.setup.tp / c.machine.vector
    cost.add("attention", scan, 2.5 * scan)
    if c.setup.cp > 1:
        of_map = s.state**2 if isinstance(s, DeltaShape) else 1
        sent = 2 * 4.0 * s.heads * (of_map + s.state * s.head_dim) / c.setup.tp  # zig-zag: two pieces a rank
        gather = gather_seconds(sent * c.setup.cp, c.cp) + c.cp.latency_s
        cost.add("cp", gather, gather)


def _feed_forward(c: Context, cost: BlockCost, matrices: int, hidden: int) -> None:
    _products(c, cost, "products", [(c.dim, (matrices - 1) * hidden, c.dim), (hidden, c.dim, hidden)])


def _products(c: Context, cost: BlockCost, operator: str, shapes: list[tuple[int, int, int]]) -> None:
    """Dense products ``(inner, columns, elements to cast a token)``, each split over tp on its wider side."""
    rows = c.setup.tokens
    accumulate = 8.0 if c.setup.sharding == "zero1" else float(c.setup.element)
    lora = c.setup.task == "lora"
    for inner, columns, cast in shapes:
        forward = product_seconds(c.rates, rows, inner, columns / c.setup.tp)
        weight = product_seconds(c.rates, inner, rows, columns / c.setup.tp)
        weight += accumulate * inner * columns / c.setup.tp / c.rates.stream
        casts = cast_seconds(c.rates, rows * cast / (c.setup.tp if cast != c.dim else 1))
        back = cast_seconds(c.rates, rows * columns / c.setup.tp)
        cost.add(operator, forward + casts, forward + back + (0.0 if lora else weight))
        cost.last = {operator: forward + casts}


def _attention(c: Context, a: AttentionWidths, cost: BlockCost) -> None:
    dim, setup = c.dim, c.setup
    q = a.heads * a.head_dim
    if a.latent:
        nope = a.head_dim - a.rope_dim
        q_in = a.q_lora or dim
        shapes = [
            (q_in, q, q_in),
            (a.kv_lora, a.heads * (nope + a.v_dim), a.kv_lora),
            # the narrow projections to the latents are whole on each tensor-parallel rank
            (dim, (a.q_lora + a.kv_lora + a.rope_dim) * setup.tp, dim),
            (a.heads * a.v_dim, dim, a.heads * a.v_dim),
        ]
    else:
        kv = (1 if a.shared_kv else 2) * a.kv_heads * a.head_dim
        shapes = (
            [(a.q_lora, q, a.q_lora), (dim, (a.q_lora + kv) * setup.tp, dim)]
            if a.q_lora
            else [(dim, (2 if a.gated else 1) * q + kv, dim)]
        )
        # grouped: each of the groups has its part of the heads
        out = a.o_groups * a.o_lora
        shapes += [(q // a.o_groups, out, q), (out, dim, out)] if a.o_lora else [(q, dim, q)]
    _products(c, cost, "products", shapes)
    seen = setup.seq_len * setup.attention_share * (0.5 if a.causal else 1.0)
    each = 2.0 * setup.tokens * a.heads * (a.head_dim + a.v_dim) / setup.tp
    flops = each * (min(seen, a.window + (0 if a.sparse else _WINDOW_TILE)) if a.window else seen)
    # kernels of float8 attention skip nothing outside a window in backward
    behind = each * seen if c.constants.attention8 and setup.float8 and not a.sparse else flops
    if a.cross_tokens:
        _products(c, cost, "products", [(dim, q, dim), (q, dim, q)])
        across = 2.0 * setup.tokens * a.cross_tokens * a.heads * 2 * a.head_dim / setup.tp
        flops, behind = flops + across, behind + across
    narrow = min(1.0, (a.head_dim + a.v_dim) / 256) ** 0.5  # heads below 128 channels fill the units less
    rate = c.rates.attention * narrow * (c.constants.context if setup.cp > 1 else 1.0)
    rate *= _SPARSE_RATE if a.sparse else 1.0
    scores = 0.0
    if not a.fused:
        scores = setup.element * setup.tokens * setup.seq_len / setup.cp * a.heads / setup.tp / c.rates.stream
    passes, back_passes = _SCORE_PASSES
    forward, backward = flops / rate, 2.5 * behind / (rate * c.constants.attention_backward)
    if a.fused and a.causal and not (a.window or a.sparse or a.cross_tokens) and a.head_dim == a.v_dim:
        forward, backward = _measured_attention(c, a) or (forward, backward)
    cost.add("attention", forward + passes * scores, backward + back_passes * scores)
    if setup.cp > 1:
        _context_transfers(c, a, cost, flops / rate)


def _measured_attention(c: Context, a: AttentionWidths) -> tuple[float, float] | None:
    """Forward and backward of causal attention by the machine's table, which holds one head of one sequence."""
    s, tables = c.setup, c.rates.tables
    if tables is None:
        return None
    found = [
        tables.find(f"attention.{plain_precision(c.rates)}{way}", s.seq_len, a.head_dim) for way in ("", "_backward")
    ]
    if found[0] is None or found[1] is None:
        return None
    heads = s.microbatch * a.heads / s.tp / s.cp * s.attention_share / (c.constants.context if s.cp > 1 else 1.0)
    return heads * found[0], heads * found[1]


def _context_transfers(c: Context, a: AttentionWidths, cost: BlockCost, compute: float) -> None:
    """Ring hops hide behind attention; an all-to-all and an all-gather stand in front of it."""
    setup, around = c.setup, c.cp
    kv = float(setup.element) * setup.tokens * a.kv_heads * (a.head_dim + a.v_dim) / min(setup.tp, a.kv_heads)
    if setup.cp_method == "ulysses":
        heads, around = _of_heads(c)
        sent = float(setup.element) * setup.tokens * (2 * a.heads + 2 * a.kv_heads) * a.head_dim / setup.tp
        seconds = exchange_seconds(sent, heads, c.machine, network_share=c.constants.network)
        seconds += 3 * heads.latency_s
        cost.add("cp", seconds, seconds)
    if setup.cp_method == "allgather":
        gather = gather_seconds(kv * setup.cp, c.cp)
        cost.add("cp", gather, 1.5 * gather)
    elif around.size > 1:
        each = kv / around.bytes_per_s * (1 if around.local else around.per_domain) + around.latency_s
        hop = (around.size - 1) * each
        cost.add("cp", max(0.0, hop - compute), max(0.0, 3 * hop - 2.5 * compute))


def _of_heads(c: Context) -> tuple[Span, Span]:
    """The ranks of Ulysses, neighbours, and those of the ring between their groups."""
    s = c.setup
    degree = s.ulysses_degree or s.cp
    return c.group(degree, s.tp), c.group(s.cp // degree, s.tp * degree)


def _experts(c: Context, e: ExpertsShape, cost: BlockCost) -> None:
    setup, constants = c.setup, c.constants
    tokens = setup.tokens / setup.tp  # tokens are cut over tp in front of the router
    width = e.latent_dim or c.dim
    local = e.num_experts / setup.ep
    routed = tokens * e.per_token * setup.imbalance
    rows = max(1.0, routed / local)
    scale = constants.expert_scale
    full = rows + constants.expert_rows
    # no table has grouped products
    part = replace(c.rates, products=c.rates.products * rows / full, plain=c.rates.plain * rows / full, tables=None)
    up = product_seconds(part, rows, width, (e.matrices - 1) * e.hidden)
    down = product_seconds(part, rows, e.hidden, width)
    accumulate = (8.0 if setup.sharding == "zero1" else setup.element) * e.matrices * width * e.hidden / c.rates.stream
    casts = cast_seconds(c.rates, rows * (width + e.hidden))
    forward = local * (up + down + casts)
    backward = local * (2 * (up + down) + accumulate + 2 * casts)
    passes = setup.element * constants.routing_passes * routed * width / c.rates.stream
    passes += setup.element * constants.pointwise * 3 * routed * e.hidden / c.rates.stream
    router = (
        product_seconds(c.rates, tokens, c.dim, e.num_experts, plain=True)
        + 20.0 * tokens * e.num_experts / c.rates.stream
    )
    cost.add(
        "experts", scale * (forward + passes + router + constants.sync_s), scale * (backward + 2 * passes + 2 * router)
    )
    last = {"experts": scale * local * (down + cast_seconds(c.rates, rows * e.hidden))}
    if e.shared_hidden:
        _feed_forward(c, cost, e.matrices, e.shared_hidden)
    if e.latent_dim:
        _products(c, cost, "products", [(c.dim, e.latent_dim, c.dim), (e.latent_dim, c.dim, e.latent_dim)])
    if setup.ep > 1:
        once = _dispatch_seconds(c, e, float(setup.element) * routed * width)
        cost.add("ep", scale * 2 * once, scale * 2 * once)
        last["ep"] = scale * once
    cost.last = last


def _dispatch_seconds(c: Context, e: ExpertsShape, sent: float) -> float:
    """One way, dispatch or combine. A fused dispatcher sends a token once to each domain, and once to each rank in it."""
    constants, group = c.constants, c.ep
    fused = c.setup.dispatcher != "alltoall"
    share = constants.exchange_fused if fused else constants.exchange
    domains = max(1, group.size // group.per_domain)
    reached = min(domains, e.max_groups) if e.max_groups else domains
    across = _distinct(reached, e.per_token) if fused and domains > 1 else 1.0
    inside = _distinct(group.size, e.per_token) if fused else 1.0
    if group.local:
        seconds = exchange_seconds(sent * inside, group, c.machine, network_share=share)
        return seconds if fused else seconds / share
    share *= 1.0 if fused else constants.network
    return exchange_seconds(sent, group, c.machine, network_share=share, copies=across)


def _distinct(places: int, picks: int) -> float:
    """Expected number of different places among ``picks`` uniform ones, over ``picks``."""
    return places * (1 - (1 - 1 / places) ** picks) / picks


def _pointwise(c: Context, block: Block, cost: BlockCost) -> None:
    setup = c.setup
    elements = 10.0 * c.dim * (0.5 * block.norms if block.norms else 1.0)
    if block.attention is not None:
        a = block.attention
        elements += 2.0 * (a.heads * a.head_dim + a.kv_heads * a.head_dim)
    if isinstance(block.ffn, FeedForwardShape):
        elements += 3.0 * block.ffn.hidden
    elif isinstance(block.ffn, ExpertsShape):
        elements += 3.0 * block.ffn.shared_hidden
    if block.streams > 1:  # around each half: read the streams twice, write what it reads; read both, write the streams
        elements += 2 * (4 * block.streams + 2) * c.dim
    seconds = setup.element * c.constants.pointwise * elements * setup.tokens / setup.tp / c.rates.stream
    cost.add("pointwise", seconds, 2 * seconds)


def _tensor_transfers(c: Context, block: Block, cost: BlockCost) -> None:
    """Gather and reduce-scatter around each of a block's two halves; one more gather of the input in backward."""
    if c.setup.tp == 1:
        return
    halves = (block.attention is not None or block.carried is not None) + isinstance(block.ffn, FeedForwardShape)
    if isinstance(block.ffn, ExpertsShape) and block.ffn.shared_hidden:
        halves += 1
    activations = float(c.setup.element) * c.setup.tokens * c.dim
    gathered = activations * (0.75 if c.setup.precision == "tensorwise" and not c.setup.te else 1.0)
    each = gather_seconds(gathered, c.tp)
    exposed = 1.0 - (c.constants.hide_tp if c.setup.async_tp else 0.0)
    again = 0.0 if c.setup.overlap else 1.0
    cost.add("tp", 2 * halves * each * exposed, (2 + again) * halves * each * exposed)
    cost.last["tp"] = each * exposed


_REPEATED = {
    # module: parts of (products, attention, experts, pointwise, tp, cp, ep) that are repeated, gated feed-forward
    "core_attn": {"attention": 1.0},
    "layernorm": {"pointwise": 0.35},
    "moe_act": {"experts": 0.05},
    "mlp": {"products": 0.6, "pointwise": 0.4},
    "moe": {"experts": 0.9, "ep": 1.0},
    "mla_up_proj": {"products": 0.15},
}


def _recompute(c: Context, block: Block, cost: BlockCost) -> None:
    setup = c.setup
    if setup.recompute == "full":
        parts = dict.fromkeys(cost.forward, 1.0)
    elif setup.recompute == "selective":
        parts = {"products": 0.37, "pointwise": 0.8, "tp": 0.5, "experts": 0.4}
    else:
        parts: dict[str, float] = {}
        for module in setup.recompute_modules:
            if module == "mlp" and not isinstance(block.ffn, FeedForwardShape):
                continue  # Megatron's name for the feed-forward of dense blocks
            for operator, part in _REPEATED.get(module, {}).items():
                parts[operator] = min(1.0, parts.get(operator, 0.0) + part)
    for operator, part in parts.items():
        seconds = part * cost.forward.get(operator, 0.0)
        if setup.recompute == "full" and setup.early_stop:
            seconds -= cost.last.get(operator, 0.0)
        cost.recompute[operator] = setup.recompute_share * seconds
