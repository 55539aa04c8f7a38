"""What eager autograd saves in one microbatch, byte for byte, for the blocks of the shipped families.

`titan_train.planner.memory.ranks` counts the same by running the model on fake tensors, which takes seconds and works for any
model; a test holds the two equal over families, layouts and recomputation. `kept` is the account that both belong to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from titan_train.models.shape import AttentionWidths, Block, ExpertsShape, FeedForwardShape, ModelShape

_WIDE = 4  # bytes of float32
_INDEX = 8  # bytes of int64


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTokens:
    """What one rank computes a microbatch on."""

    rows: int
    """Sequences."""
    seq_len: int
    """Tokens of a sequence on this rank, after context parallelism."""
    element: int
    """Bytes of an element in compute: 2 for bf16, 4 for float32."""
    tp: int = 1
    sequence_parallel: bool = True
    float8: int = 0
    """Bytes of an element that a float8 product keeps of its input; 0 computes in ``element``."""
    pays: Callable[[int, int, int], bool] = lambda _tokens, _inputs, _outputs: True
    """Whether float8 is used for a linear of so many tokens, inputs and outputs: small ones are left out."""
    tiles: int = 1
    """Parts of the sequence in which feed-forwards run; of more than one the input alone is kept."""
    fused_norms: bool = False
    """An RMSNorm is one kernel and keeps its input, as torch's on a GPU does."""
    casting_norms: bool = False
    """So are those in front of float8 products, which normalize and cast in one pass."""
    ep: int = 1
    """Ranks that share the experts."""

    def kept_of_experts(self, f: ExpertsShape, width: int) -> float:
        """Bytes of the casts of what ``width`` elements in front of grouped products hold, for the weights' gradient: each
        expert's rows fill up blocks of 128, whose number is not known, so that there is room for any; a scale for each block.
        """
        rows = self.residual * f.per_token
        if not self.float8:
            return self.element * rows * width
        padded = -(-(rows + 127 * f.num_experts // self.ep) // 128) * 128
        return padded * width * (1 + _WIDE / 128)

    def kept_input(self, inputs: int, *outputs: int) -> int:
        """Bytes for each token and each of ``inputs`` elements that whole linears of one input keep of it.

        One cast serves all of them, or else each that is cast has its own, and the others the input itself.
        """
        cast = [bool(self.float8) and self.pays(self.whole, inputs, each) for each in outputs]
        return self.float8 if all(cast) else self.float8 * sum(cast) + self.element

    def kept_beside(self, inputs: int, outputs: int) -> int:
        """Bytes for each token and each of ``inputs`` elements of a linear's cast, whose input is kept by others anyway."""
        kept = self.kept_input(inputs, outputs)
        return kept if kept < self.element else 0

    @property
    def whole(self) -> int:
        """Tokens inside attention and feed-forward."""
        return self.rows * self.seq_len

    @property
    def residual(self) -> int:
        """Tokens between them."""
        return self.whole // self.tp if self.sequence_parallel else self.whole


def stage_saved_bytes(
    shape: ModelShape,
    layers: range,
    recomputed: Sequence[bool],
    at: RankTokens,
    *,
    chunked_loss: bool,
    block_bytes: Callable[[Block], float],
    shared_angles: bool,
) -> int:
    """Bytes that forward of some blocks leaves for backward, with the embedding and the head where they belong to them.

    Args:
        shape: The whole model.
        layers: The blocks of this stage.
        recomputed: For each of them, whether backward runs it again; it then keeps its input alone.
        at: The microbatch.
        chunked_loss: The head computes the loss and keeps no logits.
        block_bytes: Bytes of a block that is not recomputed as a whole.
        shared_angles: All blocks keep the same rotary angles, which `block_bytes` leaves out.
    """
    first, last = layers.start == 0, layers.stop == shape.num_layers
    total = float(_embedding(shape, at)) if first else 0.0
    kinds = [block for block in shape.blocks for _ in range(block.count)]
    for layer, again in zip(layers, recomputed, strict=True):
        total += at.element * shape.dim * at.residual if again else block_bytes(kinds[layer])
    if shared_angles and not all(recomputed):
        total += _rotary(shape, at)
    return int(total) + (_head(shape, at, chunked_loss=chunked_loss) if last else 0)


def has_closed_form(block: Block) -> bool:
    """Whether `block_saved_bytes` knows the block: causal attention over all tokens, and a feed-forward without a latent."""
    a, f = block.attention, block.ffn
    if a is None or f is None or block.carried or not a.causal or a.gated or a.window or a.cross_tokens:
        return False
    return not (isinstance(f, ExpertsShape) and (f.latent_dim or not f.gated or f.bias))


def block_saved_bytes(block: Block, dim: int, at: RankTokens) -> int:
    """Bytes of one block that is not recomputed, without the rotary angles, which all blocks share."""
    assert block.attention is not None
    assert block.ffn is not None
    if block.norms > 2:
        total = 2 * _layer_norm(dim, at.residual, at.element)
    else:
        total = sum(
            _rms_norm(dim, at.residual, replace(at, fused_norms=fused)) for fused in _fused_norms(block, dim, at)
        )
    if block.attention.latent:
        total += _latent_attention(block.attention, dim, at)
    else:
        total += _attention(block.attention, dim, at)
    if isinstance(block.ffn, FeedForwardShape):
        return total + _feed_forward(block.ffn.hidden, dim, at, gated=block.ffn.gated)
    return total + _experts(block.ffn, dim, at)


def _fused_norms(block: Block, dim: int, at: RankTokens) -> list[bool]:
    """Whether the norm before attention and that before the feed-forward keep their input alone: their readers are float8."""
    a, f = block.attention, block.ffn
    assert a is not None
    first = () if a.latent else (a.heads * a.head_dim, a.kv_heads * a.head_dim)
    second = (f.hidden,) if isinstance(f, FeedForwardShape) else ()
    cast = [at.kept_input(dim, *readers) == at.float8 for readers in (first, second)]
    return [at.fused_norms or (at.casting_norms and all_of_them) for all_of_them in cast]


def _rms_norm(width: int, tokens: int, at: RankTokens) -> int:
    """One number a token; and the input, or taken apart the input and the result before the weight, both in float32."""
    return tokens * (at.element * width + _WIDE if at.fused_norms else _WIDE * (2 * width + 1))


def _layer_norm(width: int, tokens: int, element: int) -> int:
    return tokens * element * (width + 2)


def share_of(heads: int, tp: int) -> int:
    """Heads of one rank; where there are fewer than ranks, several ranks have the same one."""
    return max(1, heads // tp)


def _attention(a: AttentionWidths, dim: int, at: RankTokens) -> int:
    heads, kv_heads = share_of(a.heads, at.tp), share_of(a.kv_heads, at.tp)
    query, key = a.heads * a.head_dim, a.kv_heads * a.head_dim
    total = at.whole * at.kept_input(dim, query, key, key) * dim
    total += at.whole * at.element * (2 * heads + 2 * kv_heads) * a.head_dim  # q, k, v, result
    total += at.whole * at.kept_beside(query, dim) * heads * a.head_dim  # the result's cast
    total += _WIDE * at.whole * heads  # log-sum-exp
    if a.qk_norm:
        total += _rms_norm(a.head_dim, at.whole * (heads + kv_heads), at)
    return total


def _latent_attention(a: AttentionWidths, dim: int, at: RankTokens) -> int:
    heads, n, e = share_of(a.heads, at.tp), at.whole, at.element
    total = e * n * dim + e * n * (a.q_lora + a.kv_lora)  # inputs of the projections
    total += _rms_norm(a.q_lora, n, at) if a.q_lora else 0
    total += _rms_norm(a.kv_lora, n, at)
    if e == _WIDE or at.fused_norms:  # the norm's input is not a copy then, but part of the projection's result
        total += e * n * a.rope_dim
    total += 4 * e * n * heads * a.head_dim + _WIDE * n * heads  # q, k, v and result as wide as keys; log-sum-exp
    if a.v_dim < a.head_dim:
        total += e * n * heads * a.v_dim  # the result without its padding
    return total


def _feed_forward(hidden: int, dim: int, at: RankTokens, *, gated: bool) -> int:
    given, down = at.kept_input(dim, hidden), at.kept_input(hidden, dim)
    hidden //= at.tp
    if at.tiles > 1:
        return at.element * at.whole * dim
    if at.float8 and down == at.float8:  # the activation and the product's cast are one pass
        return at.whole * (given * dim + ((2 if gated else 1) * at.element + down) * hidden)
    return at.whole * (given * dim + at.element * (4 if gated else 2) * hidden)


def _experts(f: ExpertsShape, dim: int, at: RankTokens) -> int:
    """Each rank routes its own tokens to experts of full width; shared experts are cut as a feed-forward is."""
    n, e, k = at.residual, at.element, f.per_token
    router = _WIDE * n * dim + _WIDE * n * f.num_experts + _INDEX * n * k  # input, scores, choice
    router += _WIDE * n * (k + 1) if f.normalized else 0
    router += _WIDE * dim * f.num_experts if e != _WIDE else 0  # the gate's weight in float32
    router += _INDEX * f.num_experts + 3 * _WIDE  # counts and losses
    rows = 2 * _INDEX * n * k + _WIDE * n * k + _WIDE * f.num_experts  # orders, weights, ends of groups
    rows += e * n * k * (dim + 3 * f.hidden)
    rows += int(at.kept_of_experts(f, dim * (2 if at.float8 else 1) + f.hidden))  # each product casts what it reads
    if not f.shared_hidden:
        return router + rows
    same_input = e == _WIDE and (at.tp == 1 or not at.sequence_parallel)  # the router saves the same tensor
    hidden = 0 if at.tiles > 1 else 4 * (f.shared_hidden // at.tp)
    shared = e * at.whole * (hidden + (0 if same_input else dim))
    return router + rows + shared


def _embedding(shape: ModelShape, at: RankTokens) -> int:
    """Tokens, learned positions, and which tokens are in other ranks' rows of the embedding."""
    return (_INDEX + (at.tp > 1)) * at.whole + (_INDEX * at.seq_len if shape.positions else 0)


def _rotary(shape: ModelShape, at: RankTokens) -> int:
    """Cosine and sine, the same for all rows."""
    attention = shape.blocks[0].attention
    if shape.positions or attention is None:
        return 0
    return _WIDE * at.seq_len * (attention.rope_dim or attention.head_dim)


def _head(shape: ModelShape, at: RankTokens, *, chunked_loss: bool) -> int:
    layer_norm = shape.final_norm == 2
    total = _layer_norm(shape.dim, at.residual, at.element) if layer_norm else _rms_norm(shape.dim, at.residual, at)
    if not chunked_loss:
        total += at.element * at.whole * shape.dim + at.whole * _WIDE * (shape.vocab // at.tp + 1)
    return total
