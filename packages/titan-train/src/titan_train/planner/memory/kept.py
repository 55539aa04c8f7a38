"""Bytes that one block keeps for backward, for one token of one microbatch, before tensor parallelism cuts them.

Eager blocks without recomputation have an exact form (`saved`). Compiled ones keep what the partitioner of torch.compile
leaves for backward; a test counts it. Of a selective region every other product's result is kept. `titan-train check` counts
by these formulas too. The TransformerEngine stacks are estimated: two elements of a gated feed-forward are kept for each
hidden channel in front of the gate and one behind it; of recomputed modules only the input. With sequence parallelism
everything is cut over tp.
"""

from dataclasses import replace

from titan_train.models.shape import AttentionWidths, Block, ExpertsShape, FeedForwardShape, ModelShape
from titan_train.planner.memory.saved import RankTokens, block_saved_bytes, has_closed_form
from titan_train.planner.setup import Setup

_FLOAT8_INPUTS = 0.5
"""Kept inputs of float8 products are float8 already."""


def kept_token_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes a token, for all blocks."""
    key = (
        "kept",
        setup.recompute,
        setup.recompute_modules,
        setup.recompute_share,
        setup.stack,
        setup.float8,
        setup.ep > 1,
    )
    if setup.stack == "eager":
        key = (*key, setup.tp, setup.tokens)
    if key not in shape.memo:
        shape.memo[key] = sum(b.count * block_token_bytes(b, shape.dim, setup) for b in shape.blocks)
    return shape.memo[key]


def block_token_bytes(block: Block, dim: int, setup: Setup) -> float:
    """Bytes a token, for a block of this recomputation."""
    if setup.recompute == "full":
        share = setup.recompute_share
        return share * 2.0 * dim + (1 - share) * _everything(block, dim, setup)
    if setup.recompute == "selective":
        return _selective(block, dim, setup)
    return _everything(block, dim, setup)


def _selective(block: Block, dim: int, setup: Setup) -> float:
    """The block's input, attention's result, and of the products' results each other one, as the policy counts them."""
    kept = 2.0 * dim + 2.0 * sum(_products(block, dim)[::2])
    if block.attention is not None:
        a = block.attention
        kept += 2.0 * a.heads * (a.head_dim if a.latent else a.v_dim) + 4.0 * a.heads  # latent: as wide as keys
    if isinstance(block.ffn, ExpertsShape):
        kept += 12.0 * block.ffn.per_token  # which experts, with which scores
        if setup.ep > 1:  # what was sent to experts, and what came back
            kept += 2.0 * 2.0 * block.ffn.per_token * (block.ffn.latent_dim or dim)
    if block.ssm is not None:
        kept += 4.0 * block.ssm.inner
    return kept


def _products(block: Block, dim: int) -> list[int]:
    """Elements a token of each product's result, in the order of forward."""
    a, f = block.attention, block.ffn
    if block.modulation and a is not None and isinstance(f, FeedForwardShape):
        return _modulated_products(block, a.heads * a.head_dim, dim, f.hidden)
    out: list[int] = []
    if a is not None and a.latent:
        queries = a.heads * a.head_dim
        out += [a.q_lora, a.kv_lora + a.rope_dim, queries] if a.q_lora else [queries, a.kv_lora + a.rope_dim]
        out += [a.heads * (a.head_dim - a.rope_dim + a.v_dim), dim]
    elif a is not None:
        out += [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim, dim]
    if isinstance(f, FeedForwardShape):
        out += [f.hidden] * (f.matrices - 1) + [dim]
    elif isinstance(f, ExpertsShape):
        shared = [f.shared_hidden] * (f.matrices - 1) + [dim] if f.shared_hidden else []
        routed = [f.per_token * f.hidden] * (f.matrices - 1) + [f.per_token * (f.latent_dim or dim)]
        out += [2 * f.num_experts, *routed, *shared]  # the router's scores are float32
    return out


def _modulated_products(block: Block, heads: int, dim: int, hidden: int) -> list[int]:
    """Of a DiT block, for an image token: the modulation comes first, once a sample, and text's products take turns."""
    if block.modulation < 6 * dim * dim:  # one stream
        return [0, heads, heads, heads, dim, hidden, dim]
    return [0, 0, 0, 0, 0, heads, heads, heads, 0, dim, 0, 0, hidden, dim]


def recomputed_token_bytes(block: Block, dim: int, setup: Setup) -> float:
    """Bytes a token that come to life again while backward passes through one block of this recomputation."""
    if setup.recompute == "none" and not setup.recompute_modules:
        return 0.0
    kept = block_token_bytes(block, dim, replace(setup, recompute_share=1.0))
    plain = replace(setup, recompute="none", recompute_modules=())
    return max(0.0, _everything(block, dim, plain) - kept)


def _everything(block: Block, dim: int, setup: Setup) -> float:
    modules = set(setup.recompute_modules)
    if setup.stack == "eager" and not modules and not setup.float8 and has_closed_form(block):
        tokens = max(setup.tokens, setup.tp)
        element = 4 if setup.precision == "fp32" else 2
        at = RankTokens(rows=1, seq_len=tokens, element=element, tp=setup.tp)
        return block_saved_bytes(block, dim, at) * setup.tp / tokens
    inputs = _FLOAT8_INPUTS if setup.float8 and setup.te else 1.0
    halves = min(block.norms, 2) or 2
    kept = 2.0 * dim * halves  # inputs of the norms
    if "layernorm" not in modules:
        kept += 2.0 * dim * halves * inputs
    if block.attention is not None:
        kept += _attention(block.attention, dim, inputs, modules)
    if block.ssm is not None:
        s = block.ssm
        kept += 2.0 * (5 * s.inner + 4 * s.groups * s.state)
    if isinstance(block.ffn, FeedForwardShape) and "mlp" not in modules:
        kept += 2.0 * block.ffn.hidden * (block.ffn.matrices - 1 + inputs)
    elif isinstance(block.ffn, ExpertsShape):
        kept += _experts(block.ffn, dim, inputs, modules, returned=not setup.te)
    if setup.stack == "eager" and block.norms <= 2:
        kept += _float32_copies(block, dim, halves)
    if block.modulation:  # what the gates are multiplied with
        kept += 2.0 * dim * halves
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
    """What unfused RMSNorm and RoPE keep besides: input and result in float32, rotated queries and keys."""
    kept = 8.0 * dim * halves
    a = block.attention
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
    return out + 2.0 * (a.heads + 2 * a.kv_heads) * a.head_dim


def _experts(e: ExpertsShape, dim: int, inputs: float, modules: set[str], *, returned: bool) -> float:
    if "moe" in modules:
        return 2.0 * dim
    width = e.latent_dim or dim
    # what experts receive, and what comes back where the routing weights are applied after them
    routed = 2.0 * width * inputs + (2.0 * width if returned else 0.0)
    hidden = 2.0 * e.hidden * (e.matrices - 1) + (0.0 if "moe_act" in modules else 2.0 * e.hidden * inputs)
    shared = 2.0 * e.shared_hidden * (e.matrices - 1 + inputs)
    return e.per_token * (routed + hidden) + shared + 8.0 * e.num_experts
