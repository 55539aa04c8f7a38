"""The account of what forward leaves for backward on one rank: the tensors that a block's program keeps, by operator and
sharding. `check`, `estimate`, `plan`, `dry-run` and the report count by it.

| program | kept of a block | held by |
|---|---|---|
| eager | what autograd saves, byte for byte | a run on fake tensors |
| compiled | what the partitioner of torch.compile leaves for backward | torch's partitioner |
| selective recomputation | the input, attention's result, every other product if backward reads it | real ranks' caches |
| full recomputation | the block's input | |
| Megatron's stacks, state-space, gated and cross-attending blocks | an estimate for each token, cut over tp | published rows |

Tensor parallelism cuts what lies between a column- and a row-parallel product. Norms and the residual stream have a share of the
tokens (with sequence parallelism); inputs of column-parallel products, latents and partial sums are whole on every rank.

Eager counts are those of a GPU, where an RMSNorm keeps its input; with ``launch.device = "cpu"`` those of a CPU, where it is
taken apart (its float32 input and result). Attention pads narrow values, as on a CPU.
Each tensor counts once, however many operators save it. Parameters do not count. The exact eager forms are in `saved`.

Letters: d width, n tokens of a rank, r those of its share of the residual stream, e bytes of an element.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

from titan_train.models.shape import AttentionWidths, Block, ExpertsShape, FeedForwardShape, ModelShape
from titan_train.planner.memory.saved import RankTokens, block_saved_bytes, has_closed_form, share_of
from titan_train.planner.setup import Setup

_FLOAT8_INPUTS = 0.5
"""Kept inputs of float8 products are float8 already."""
_INDEX, _WIDE = 8, 4  # bytes of int64, float32


def tokens_of(setup: Setup) -> RankTokens:
    """One microbatch on one rank."""
    return RankTokens(
        rows=setup.microbatch,
        seq_len=setup.seq_len // setup.cp,
        element=4 if setup.precision == "fp32" else 2,
        tp=setup.tp,
        tiles=setup.mlp_tiles,
        float8=0 if not setup.float8 else 2 if setup.precision == "blockwise" else 1,
        pays=partial(_pays, setup),
        fused_norms=setup.fused_norms,
        casting_norms=setup.float8 and setup.tp == setup.pp == 1,
        ep=setup.ep,
    )


def _pays(setup: Setup, tokens: int, inputs: int, outputs: int) -> bool:
    """Whether the trainer's linear of these sizes computes in float8 (``float8.min_speedup``)."""
    if setup.te or not setup.min_speedup:
        return True
    return _speedup(tokens, inputs, outputs, setup.precision, setup.stack) >= setup.min_speedup


@cache
def _speedup(tokens: int, inputs: int, outputs: int, recipe: str, stack: str) -> float:
    from titan_fp8 import Recipe, predict_speedup  # imports torch, which no other precision needs

    return predict_speedup(tokens, inputs, outputs, Recipe.get(recipe), eager=stack == "eager")


def kept_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes of one microbatch on one rank, for all blocks; of a DiT also those of its last layer."""
    if shape.kept is not None and not setup.te:
        counted = shape.num_layers * shape.kept(setup)
        as_counted = replace(setup, precision="bf16", ep=1)  # on one rank, where nothing of experts' exchange is kept
        if setup.float8 or (setup.ep > 1 and shape.moe):
            counted += _of_blocks(shape, setup) - _of_blocks(shape, as_counted)
        return counted
    blocks = _of_blocks(shape, setup)
    if not any(block.modulation for block in shape.blocks):
        return blocks
    at = tokens_of(setup)
    return blocks + 3 * at.element * at.whole * shape.dim  # its input, normalized, modulated


def _of_blocks(shape: ModelShape, setup: Setup) -> float:
    return _memo(shape, setup, "kept", lambda block, at: block.count * block_bytes(block, shape.dim, setup, at), sum)


def working_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes of one block's backward: what it recomputes, and the gradients on both sides of its widest operator."""

    def working(block: Block, at: RankTokens) -> float:
        widest = at.element * _widest(block, shape.dim, at) * at.whole / at.tp
        if shape.kept is not None and not setup.te and setup.recompute != "none":
            again = max(0.0, shape.kept(replace(setup, recompute="none")) - shape.kept(setup))
        else:
            again = _recomputed(block, shape.dim, setup, at)
        return again + _of_a_tile(block, shape.dim, setup, at) + 2 * widest

    return _memo(shape, setup, "working", working, lambda found: max(found, default=0.0))


def _memo(
    shape: ModelShape,
    setup: Setup,
    name: str,
    of_block: Callable[[Block, RankTokens], float],
    combine: Callable[[Iterator[float]], float],
) -> float:
    key = (
        name, setup.recompute, setup.mlp_tiles, setup.recompute_modules, setup.recompute_share, setup.early_stop, setup.stack,
        setup.precision, setup.min_speedup, setup.fused_norms,
        setup.ep, setup.tp, setup.pp > 1, setup.microbatch, setup.cp > 1 and setup.cp_method, setup.seq_len // setup.cp,
    )  # fmt: skip
    if key not in shape.memo:
        at = tokens_of(setup)
        shape.memo[key] = combine(of_block(block, at) for block in shape.blocks)
    return shape.memo[key]


def block_bytes(block: Block, dim: int, setup: Setup, at: RankTokens) -> float:
    """Bytes that one block of this recomputation keeps, by its program."""
    if block.modulation:  # tensor parallelism does not split its tokens
        at = replace(at, sequence_parallel=False)
    if setup.recompute == "full":
        share = setup.recompute_share
        return share * at.element * dim * block.streams * at.residual + (1 - share) * _everything(block, dim, setup, at)
    if setup.recompute == "selective":
        return _selective(block, dim, setup, at) + (_exchanged(block, setup, at) if setup.stack == "compile" else 0)
    return _everything(block, dim, setup, at)


def _exchanged(block: Block, setup: Setup, at: RankTokens) -> float:
    """Under Ulysses attention keeps its result by heads, and the product after it the same by tokens; of narrow values it keeps
    it padded and the product has one without in any case. Published peaks of Megatron's stack leave no room for two.
    """
    if block.attention is None or setup.cp == 1 or setup.cp_method != "ulysses" or setup.te:
        return 0.0
    if block.attention.v_dim < block.attention.head_dim:
        return 0.0
    return at.whole * at.element * share_of(block.attention.heads, at.tp) * block.attention.v_dim


def _recomputed(block: Block, dim: int, setup: Setup, at: RankTokens) -> float:
    """Bytes that come to life again while backward passes through one block of this recomputation."""
    if setup.recompute == "none" and not setup.recompute_modules:
        return 0.0
    kept = block_bytes(block, dim, replace(setup, recompute_share=1.0), at)
    plain = replace(setup, recompute="none", recompute_modules=())
    return max(0.0, _everything(block, dim, plain, at) - kept)


def _of_a_tile(block: Block, dim: int, setup: Setup, at: RankTokens) -> float:
    """Bytes of a feed-forward's hidden layers that come to life again for one tile of tokens."""
    if at.tiles == 1:
        return 0.0
    plain = replace(setup, recompute="none", recompute_modules=(), mlp_tiles=1)
    whole, kept = (_everything(block, dim, plain, replace(at, tiles=tiles)) for tiles in (1, at.tiles))
    return (whole - kept) / at.tiles


def _everything(block: Block, dim: int, setup: Setup, at: RankTokens) -> float:
    """Bytes of a block that recomputes nothing, or modules of Megatron's."""
    return _of_program(block, dim, setup, at) + _exchanged(block, setup, at)


def _of_program(block: Block, dim: int, setup: Setup, at: RankTokens) -> float:
    a, f = block.attention, block.ffn
    if block.modulation and a is not None and isinstance(f, FeedForwardShape):
        return _modulated(block, a, f, dim, setup, at)
    plain = a is not None and f is not None and not (block.carried or a.gated or a.cross_tokens)
    if plain and not setup.recompute_modules:
        if setup.stack == "compile" and not (isinstance(f, ExpertsShape) and f.latent_dim):
            return _compiled(block, dim, at)
        if setup.stack == "eager" and has_closed_form(block):
            return block_saved_bytes(block, dim, at)
    total = _estimated(block, dim, setup, at) * at.whole / at.tp
    if isinstance(f, ExpertsShape) and setup.float8 and not setup.te:  # counted as their products' inputs so far
        width = (f.latent_dim or dim) + f.hidden
        twice = (f.latent_dim or dim) if setup.stack == "eager" else 0  # each product casts what it reads
        total += at.kept_of_experts(f, width + twice) - at.element * at.residual * f.per_token * width
    if block.delta is not None or (a is not None and a.gated):
        total += 2 * at.element * dim * (at.whole - at.residual)  # what enters column-parallel products is whole
    return total


def _compiled(block: Block, dim: int, at: RankTokens) -> float:
    """The partitioner keeps products' inputs, attention's, and statistics of norms; what is between them is run again. Inputs of
    float8 products are kept as casts; of attention's result there is one beside what is kept anyway.
    """
    a, f, e, n, r = block.attention, block.ffn, at.element, at.whole, at.residual
    assert a is not None
    cast = 1 if at.float8 else 0
    at = replace(at, float8=cast)
    layer_norm = block.norms > 2
    total = 2.0 * e * dim * r + 2 * r * (2 * e if layer_norm else _WIDE)  # inputs and statistics of both norms
    heads, kv_heads = share_of(a.heads, at.tp), share_of(a.kv_heads, at.tp)
    key = a.kv_heads * a.head_dim
    down = (a.q_lora or a.heads * a.head_dim, a.kv_lora + a.rope_dim) if a.latent else (a.heads * a.head_dim, key, key)
    result = a.v_dim if a.latent else a.head_dim
    total += at.kept_input(dim, *down) * n * dim + _WIDE * n * heads  # gathered input, log-sum-exp
    total += at.kept_beside(a.heads * result, dim) * n * heads * result
    if a.latent:
        total += 2 * e * n * (a.q_lora + a.kv_lora) + _WIDE * n * (2 if a.q_lora else 1)
        total += 2 * e * n * heads * (a.head_dim + a.v_dim)
    else:
        total += e * n * 2 * (heads + kv_heads) * a.head_dim
    if a.qk_norm:
        total += n * (heads + kv_heads) * (e * a.head_dim + _WIDE)
    if not layer_norm:
        total += _WIDE * at.seq_len * (a.rope_dim or a.head_dim)
    if isinstance(f, FeedForwardShape):
        if at.tiles > 1:
            return total + n * e * dim
        return total + n * _of_feed_forward(f.hidden, f.matrices, dim, at)
    assert isinstance(f, ExpertsShape)
    k = f.per_token
    total += r * (_WIDE * (dim + f.num_experts) + (3 * _INDEX + _WIDE) * k) + _WIDE * f.num_experts * dim  # router
    total += r * k * e * (dim + (f.matrices - 1) * f.hidden) + at.kept_of_experts(f, dim + f.hidden)
    if f.shared_hidden:
        total += n * _of_feed_forward(f.shared_hidden, f.matrices, dim, at)
    return total


def _modulated(block: Block, a: AttentionWidths, f: FeedForwardShape, dim: int, setup: Setup, at: RankTokens) -> float:
    """A DiT block. Its gates keep what they multiply, and projections of two streams a copy of each one's tokens."""
    heads, e, double, eager = a.heads * a.head_dim, at.element, not _is_single(block, dim), setup.stack == "eager"
    at = replace(at, float8=1 if at.float8 else 0)
    readers = [(heads, heads, heads), (f.hidden,)] if double else [(heads, heads, heads, f.hidden)]
    norms = [at.kept_input(dim, *outputs) for outputs in readers]
    whole = e * 2.0 + sum(norms)  # the block's input, and what its last gate multiplies
    if double:  # what the first gate multiplies; the sum between the branches, which a compiled block forms again
        whole += e * (1 + eager)
    cut = double and at.rows > 1  # of one sample, a stream's tokens are a view of both streams'
    if eager and not at.casting_norms:
        whole += e * (len(norms) + 2 * (cut and not at.float8))  # before modulation; joined and cut again
    out = at.kept_input(heads, dim) if cut else at.kept_beside(heads, dim)
    of_heads = e * 6.0 + out  # queries and keys before their norms and after rotation, values, the result
    of_hidden = e + at.kept_input(f.hidden, dim)
    statistics = _WIDE * (2 * len(norms) + 3 * a.heads / at.tp)
    return at.whole * (whole * dim + (of_heads * heads + of_hidden * f.hidden) / at.tp + statistics)


def _modulated_selective(
    block: Block, a: AttentionWidths, f: FeedForwardShape, dim: int, setup: Setup, at: RankTokens
) -> float:
    """Of a DiT block's products keys, the feed-forward's first, and the last one where two branches meet in it. Compiled, sums
    over ranks instead of partial ones; under context parallelism what attention reads, and the sums that follow it.
    """
    heads, double, compiled = a.heads * a.head_dim / at.tp, not _is_single(block, dim), setup.stack == "compile"
    width = (1 if double else 2) * dim + 2 * heads + f.hidden / at.tp
    if compiled and setup.cp > 1:
        width += 3 * heads + (1 + double + (double and at.tp > 1)) * dim
    elif compiled and at.tp > 1 and double:
        width += 2 * dim
    return at.whole * (at.element * width + _WIDE * a.heads / at.tp)


def _is_single(block: Block, dim: int) -> bool:
    """Of DiT blocks: attention and feed-forward stand beside each other on one stream."""
    return block.modulation < 6 * dim * dim


def _of_feed_forward(hidden: int, matrices: int, dim: int, at: RankTokens) -> float:
    """Bytes of each token: input, results of the products before the last, and its input."""
    inner = 0 if at.tiles > 1 else at.element * (matrices - 1) + at.kept_input(hidden, dim)
    return at.kept_input(dim, hidden) * dim + inner * (hidden // at.tp)


def _selective(block: Block, dim: int, setup: Setup, at: RankTokens) -> float:
    """The block's input, attention's result, and of the products' results each other one that recomputation reads."""
    e, n, r = at.element, at.whole, at.residual
    a, f = block.attention, block.ffn
    if block.modulation and a is not None and isinstance(f, FeedForwardShape):
        return _modulated_selective(block, a, f, dim, setup, at)
    results = _products(block, dim, at)
    # context parallelism's exchange cuts a compiled block into pieces, which keep their inputs and begin to count anew
    pieces = setup.stack == "compile" and setup.cp > 1
    needed = list(range(0, len(results), 2))
    out = 4 if a is not None and a.latent and a.q_lora else 3  # the product of attention's result
    if pieces and a is not None:  # of the products before attention, what norms of queries read
        needed = [0] * bool(a.q_lora or a.qk_norm) + [out, *range(out + 1, len(results), 2)]
    state = block.delta if setup.stack == "compile" else None
    if state is not None:  # it cuts a block as well: of the second piece, what follows it
        needed = list(range(3, len(results), 2))
    # recomputation that does not stop early reads all; an eager float8 linear saves its input after its product
    if setup.early_stop and not (setup.stack == "eager" and setup.float8):
        ends_in_product = not isinstance(f, ExpertsShape) or (f.shared_hidden and not f.shared_gate)
        if ends_in_product and len(results) - 1 in needed:
            needed.remove(len(results) - 1)
    kept = e * dim * r + sum(results[i] for i in needed)
    if a is not None:
        heads = share_of(a.heads, at.tp)
        kept += n * heads * (e * (a.head_dim if a.latent else a.v_dim) + _WIDE)  # latent: as wide as keys
        if setup.stack == "compile" and at.tp > 1:  # the scattered sum, and not the partial one
            kept += e * dim * r - (results[out] if out in needed else 0)
        if pieces:  # the input of the projections, before it is gathered too; queries, keys and values
            kv_heads = share_of(a.kv_heads, at.tp)
            reads = heads * (2 * a.head_dim + a.v_dim) if a.latent else (heads + 2 * kv_heads) * a.head_dim
            kept += e * (n * (dim + reads) + r * dim * (at.tp > 1))
    if state is not None:  # what enters the state layer and the piece after it
        kept += e * (n * (state.projected + state.inner) / at.tp + 2 * dim * r + n * dim * (at.tp > 1))
    if isinstance(f, ExpertsShape):
        k = f.per_token
        kept += r * k * (_INDEX if setup.stack == "compile" else _INDEX + _WIDE)  # which experts, with which scores
        # what was sent to experts, and what came back; the tokens that enter the second compiled piece
        if setup.ep > 1:
            kept += 2 * e * r * k * (f.latent_dim or dim) + e * dim * r * (setup.stack == "compile")
    if block.ssm is not None:
        kept += 2 * e * n * block.ssm.inner / at.tp
    return kept


def _products(block: Block, dim: int, at: RankTokens) -> list[float]:
    """Bytes of each product's result on one rank, in the order of forward."""
    a, f, n, r, e = block.attention, block.ffn, at.whole, at.residual, at.element
    out: list[float] = []
    if a is not None:
        heads, kv_heads = share_of(a.heads, at.tp), share_of(a.kv_heads, at.tp)
        queries = heads * a.head_dim * (1 + a.gated)
        if a.latent:  # the latents are whole on every rank
            out += [a.q_lora, a.kv_lora + a.rope_dim, queries] if a.q_lora else [queries, a.kv_lora + a.rope_dim]
            out += [heads * (a.head_dim - a.rope_dim + a.v_dim), dim]
        else:
            out += [queries, kv_heads * a.head_dim, kv_heads * a.head_dim, dim]
    if block.delta is not None:
        gates = 2 * block.delta.heads // at.tp
        out += [block.delta.projected / at.tp - gates, gates, dim]
    if isinstance(f, FeedForwardShape):
        out += [f.hidden // at.tp] * (f.matrices - 1) + [dim]
    out = [e * n * width for width in out]
    if isinstance(f, ExpertsShape):
        rows = e * r * f.per_token
        shared = [e * n * (f.shared_hidden // at.tp)] * (f.matrices - 1) + [e * n * dim] if f.shared_hidden else []
        shared = [e * n] * f.shared_gate + shared
        out += [_WIDE * r * f.num_experts, *[rows * f.hidden] * (f.matrices - 1), rows * (f.latent_dim or dim), *shared]
    return out


def _estimated(block: Block, dim: int, setup: Setup, at: RankTokens) -> float:
    """Bytes for each token, before tensor parallelism cuts them. Of recomputed modules the input alone is kept."""
    modules = set(setup.recompute_modules)
    inputs = _FLOAT8_INPUTS if setup.float8 and setup.te else 1.0
    halves = min(block.norms, 2) or 2
    kept = 2.0 * dim * halves  # inputs of the norms
    if "layernorm" not in modules:
        kept += 2.0 * dim * halves * inputs
    if block.attention is not None:
        kept += _attention(block.attention, dim, inputs, modules)
    if block.ssm is not None:
        s = block.ssm
        kept += 2.0 * (5 * s.inner + 4 * s.keys)
    if block.delta is not None:  # the projections' results, the state layer's, the gated product; the rest is run again
        kept += 2.0 * (block.delta.projected + (2 + inputs) * block.delta.inner)
    if isinstance(block.ffn, FeedForwardShape) and "mlp" not in modules and at.tiles == 1:
        kept += 2.0 * block.ffn.hidden * (block.ffn.matrices - 1 + inputs)
    elif isinstance(block.ffn, ExpertsShape):
        shared = block.ffn.shared_hidden if at.tiles == 1 else 0
        kept += _experts(replace(block.ffn, shared_hidden=shared), dim, inputs, modules, returned=not setup.te)
    kept *= at.element / 2
    if setup.stack == "eager" and block.norms <= 2:
        kept += _float32_copies(block, dim, halves)
    if setup.stack == "compile":
        kept += _compiled_extras(block, dim, halves)
    return kept


def _compiled_extras(block: Block, dim: int, halves: int) -> float:
    """What a compiled block keeps in float32 beside the products' inputs: angles, norms' statistics, the router's input."""
    kept = 4.0 * halves
    a = block.attention
    if a is not None:
        kept += 4.0 * (a.rope_dim or a.head_dim)
        if a.qk_norm:
            kept += 2.0 * (a.heads + a.kv_heads) * a.head_dim
    if isinstance(block.ffn, ExpertsShape):
        kept += 4.0 * dim + 32.0 * block.ffn.per_token
    return kept


def _float32_copies(block: Block, dim: int, halves: int) -> float:
    """What unfused RMSNorm and RoPE keep besides: input and result in float32, rotated queries and keys.

    Where layers carry a state norms keep one copy; gates are applied in float32, and experts' activations apart.
    """
    a, f = block.attention, block.ffn
    if block.delta is not None or (a is not None and a.gated):
        kept = 4.0 * dim * halves
        kept += 8.0 * block.delta.inner if block.delta is not None else 0.0
        kept += 4.0 * (a.heads + a.kv_heads) * a.head_dim if a is not None and a.qk_norm else 0.0
        if isinstance(f, ExpertsShape):
            kept += 4.0 * dim + 2.0 * (f.per_token * f.hidden + f.shared_hidden)
        return kept
    kept = 8.0 * dim * halves
    if a is not None and not a.latent:
        rotated = (a.heads + a.kv_heads) * a.head_dim
        kept += 2.0 * rotated + (8.0 * rotated if a.qk_norm else 0.0)
    elif a is not None:
        kept += 2.0 * a.heads * (2 * a.head_dim + a.v_dim)  # queries, keys and values before they are put together
    return kept


def _attention(a: AttentionWidths, dim: int, inputs: float, modules: set[str]) -> float:
    out = 2.0 * a.heads * a.v_dim * inputs
    if "core_attn" not in modules:
        out += 4.0 * a.heads  # log-sum-exp
    if a.latent:
        latents = 2.0 * 2 * (a.q_lora + a.kv_lora) + 2.0 * a.rope_dim
        heads = 2.0 * a.heads * (2 * a.head_dim + a.v_dim)  # query, key, value as attention reads them
        if "mla_up_proj" in modules:
            return out + latents
        return out + latents + heads
    gate = 4.0 * a.heads * a.v_dim if a.gated else 0.0  # itself, and what it multiplies
    return out + gate + 2.0 * (a.heads + 2 * a.kv_heads) * a.head_dim


def _experts(e: ExpertsShape, dim: int, inputs: float, modules: set[str], *, returned: bool) -> float:
    if "moe" in modules:
        return 2.0 * dim
    width = e.latent_dim or dim
    # what experts receive, and what comes back where the routing weights are applied after them
    routed = 2.0 * width * inputs + (2.0 * width if returned else 0.0)
    hidden = 2.0 * e.hidden * (e.matrices - 1) + (0.0 if "moe_act" in modules else 2.0 * e.hidden * inputs)
    shared = 2.0 * e.shared_hidden * (e.matrices - 1 + inputs)
    return e.per_token * (routed + hidden) + shared + 8.0 * e.num_experts


def _widest(block: Block, dim: int, at: RankTokens) -> float:
    """Elements a token of the largest tensor in a block; tiles make a feed-forward's narrower on the mean."""
    widest = float(dim)
    if block.attention is not None:
        widest = max(widest, block.attention.heads * block.attention.head_dim)
    if isinstance(block.ffn, FeedForwardShape):
        widest = max(widest, block.ffn.hidden / at.tiles)
    elif isinstance(block.ffn, ExpertsShape):
        widest = max(widest, block.ffn.per_token * max(block.ffn.hidden, block.ffn.latent_dim or dim))
    if block.carried is not None:
        widest = max(widest, 2 * block.carried.inner)
    return widest
