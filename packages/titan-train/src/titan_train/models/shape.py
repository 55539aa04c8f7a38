"""The shape of a model: groups of equal blocks between an embedding and a head. No torch.

A family's arguments state it (`titan_train.models.family.Family.shape`), and the planner reads it. A block is a mixer
(grouped-query attention, latent attention, or a layer with a state: Mamba-2, gated delta net) and a feed-forward (dense or
routed); either may be absent, so that hybrid models are described too. Parameter counts are exact for the shipped decoders; a
test compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}
"""Float32 logits of one chunk: on a CPU what its caches hold, on a GPU enough rows that adding to W's gradient is hidden."""


def head_chunk_rows(vocab: float, device: str) -> int:
    """Rows of one chunk of the loss that is computed in the head: a power of two, at least 64, so that products stay products of
    matrices.

    Args:
        vocab: Entries of the vocabulary on one rank.
        device: Its type.
    """
    fitting = int(_CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"]) // (4 * vocab))
    return max(64, 1 << max(0, fitting.bit_length() - 1))


@dataclass(frozen=True, slots=True)
class AttentionWidths:
    """Grouped-query attention, or latent attention (MLA) if ``kv_lora`` is set."""

    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query and key head; of MLA: the part without positions plus the rotated part."""
    value_dim: int = 0
    """Width of a value head; 0 takes ``head_dim``."""
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    """Rotated channels: of an MLA key, shared by all heads; of a head where only part of it is rotated. 0 is all."""
    qk_norm: bool = False
    bias: bool = False
    causal: bool = True
    window: int = 0
    """Tokens a query sees back; 0 is all."""
    cross_tokens: int = 0
    """Tokens of a text that a second, cross-attending layer reads; 0 is none."""
    o_lora: int = 0
    """Width of each of ``o_groups`` groups between the heads and the output; 0 is one full matrix."""
    o_groups: int = 1
    shared_kv: bool = False
    """One projection is key and value."""
    gated: bool = False
    """Queries' projection also gives a gate for each channel of the result (Qwen3-Next)."""
    sparse: bool = False
    """Keys are chosen for each query and gathered, not a band."""
    fused: bool = True
    """Scores stay on the chip."""

    @property
    def v_dim(self) -> int:
        """Width of a value head."""
        return self.value_dim or self.head_dim

    @property
    def latent(self) -> bool:
        """Whether keys and values come from a latent (MLA)."""
        return self.kv_lora > 0


@dataclass(frozen=True, slots=True)
class FeedForwardShape:
    """A dense feed-forward: three matrices if gated, else two."""

    hidden: int
    gated: bool = True
    bias: bool = False

    @property
    def matrices(self) -> int:
        """Matrices of ``dim x hidden``."""
        return 3 if self.gated else 2


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A routed feed-forward, with the shared experts beside it."""

    num_experts: int
    per_token: int
    hidden: int
    shared_hidden: int = 0
    """Hidden width of all shared experts together."""
    gated: bool = True
    latent_dim: int = 0
    """Width that tokens are projected to before they are sent to experts; 0 sends them whole."""
    bias: bool = False
    max_groups: int = 0
    """Groups of experts (nodes) that a token's experts may come from; 0 is any."""
    normalized: bool = True
    """A token's weights are divided by their sum."""
    shared_gate: bool = False
    """The shared experts' result is multiplied by a gate of its own."""

    @property
    def matrices(self) -> int:
        """Matrices of each expert."""
        return 3 if self.gated else 2


@dataclass(frozen=True, slots=True)
class StateSpaceShape:
    """A Mamba-2 layer, and what every layer with a state has."""

    heads: int
    """Value heads, each with a state."""
    key_heads: int
    """Query and key heads, Mamba-2's groups; each serves ``heads / key_heads`` value heads."""
    head_dim: int
    """Channels of a value head."""
    state: int
    """Channels of a key head: a value head's state is ``state x head_dim``."""
    gates: ClassVar[int] = 1
    """Columns of the projections beside those of values, gates and keys, for each value head."""

    @property
    def inner(self) -> int:
        """Width inside the layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.key_heads * self.state

    @property
    def projected(self) -> int:
        """Columns of the projections in front."""
        return 2 * self.inner + 2 * self.keys + self.gates * self.heads

    def parameters(self, dim: int) -> int:
        """Of the matrices."""
        return dim * self.projected + self.inner * dim


@dataclass(frozen=True, slots=True)
class DeltaShape(StateSpaceShape):
    """A gated delta net (arXiv:2412.06464)."""

    taps: int
    """Tokens that the short convolutions see."""
    gates: ClassVar[int] = 2

    def parameters(self, dim: int) -> int:
        """Of matrices, convolutions, decays and the norm of the result."""
        taps = self.taps * (2 * self.keys + self.inner)
        return StateSpaceShape.parameters(self, dim) + taps + 2 * self.heads + self.head_dim


@dataclass(frozen=True, slots=True)
class Block:
    """``count`` equal blocks."""

    count: int
    attention: AttentionWidths | None = None
    ffn: FeedForwardShape | ExpertsShape | None = None
    ssm: StateSpaceShape | None = None
    delta: DeltaShape | None = None
    whole_state: bool = False
    """Its layer with a state is whole on every tensor-parallel rank."""
    norms: int = 2
    streams: int = 1
    """Residual streams that hyper-connections mix before and after each half (arXiv 2409.19606)."""
    modulation: int = 0
    """Parameters of a DiT block that a token does not meet: its modulation, and the weights of the other stream."""

    @property
    def carried(self) -> StateSpaceShape | None:
        """The layer that carries a state from token to token, if it is one."""
        return self.ssm or self.delta

    @property
    def only_counted(self) -> bool:
        """Whether only a run on fake tensors tells what it keeps for backward: there is no formula, compiled or not."""
        return self.delta is not None or (self.attention is not None and self.attention.gated)

    def splits(self, tp: int) -> bool:
        """Whether each of ``tp`` tensor-parallel ranks can have whole heads."""
        a = self.attention
        if a is not None and (a.heads % tp or not (a.latent or a.kv_heads % tp == 0)):
            return False
        return self.delta is None or self.whole_state or self.delta.key_heads % tp == 0

    def mixer_parameters(self, dim: int) -> int:
        """Parameters of attention or of a layer with a state."""
        total = self.modulation + self.norms * dim
        a = self.attention
        if a is not None:
            if a.latent:
                nope = a.head_dim - a.rope_dim
                q_in = a.q_lora or dim
                total += (dim * a.q_lora + a.q_lora if a.q_lora else 0) + q_in * a.heads * a.head_dim
                total += dim * (a.kv_lora + a.rope_dim) + a.kv_lora
                total += a.kv_lora * a.heads * (nope + a.v_dim) + a.heads * a.v_dim * dim
            else:
                q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
                total += a.q_lora * (dim + q) if a.q_lora else dim * q
                total += dim * q if a.gated else 0
                total += a.o_lora * (q + a.o_groups * dim) if a.o_lora else q * dim
                total += (1 if a.shared_kv else 2) * dim * kv + (2 * a.head_dim if a.qk_norm else 0)
                total += (q + 2 * kv + dim) if a.bias else 0
            if a.cross_tokens:
                total += 4 * dim * a.heads * a.head_dim
        return total + (0 if self.carried is None else self.carried.parameters(dim))

    def dense_parameters(self, dim: int) -> int:
        """Parameters of the feed-forward that every token meets: dense, or shared experts and router."""
        if isinstance(self.ffn, FeedForwardShape):
            bias = (self.ffn.hidden * (self.ffn.matrices - 1) + dim) if self.ffn.bias else 0
            return self.ffn.matrices * dim * self.ffn.hidden + bias
        if isinstance(self.ffn, ExpertsShape):
            e = self.ffn
            gate = dim if e.shared_gate else 0
            return dim * e.num_experts + e.matrices * dim * e.shared_hidden + gate + 2 * dim * e.latent_dim
        return 0

    def expert_parameters(self, dim: int) -> int:
        """Parameters of all routed experts."""
        if not isinstance(self.ffn, ExpertsShape):
            return 0
        e = self.ffn
        width = e.latent_dim or dim
        return e.num_experts * (e.matrices * width * e.hidden + (e.hidden * (e.matrices - 1) + width if e.bias else 0))


@dataclass(frozen=True)
class ModelShape:
    """A model."""

    name: str
    dim: int
    blocks: tuple[Block, ...]
    vocab: int
    """Rows of embedding and head; 0 for a model without them (DiT)."""
    tied: bool = False
    positions: int = 0
    """Learned positions."""
    final_norm: int = 1
    mtp: int = 0
    """Modules that predict a further token, each with its own pass through the head; see `mtp_blocks`."""
    mtp_block: Block | None = None
    """The block of such a module, where it is not the last of ``blocks``."""
    kept: Callable[[Any], float] | None = field(default=None, compare=False)
    """From a planner's setup to the bytes that one block keeps for backward, where a module of its own was counted."""

    @cached_property
    def moe(self) -> bool:
        """Whether any block has routed experts."""
        return any(isinstance(b.ffn, ExpertsShape) for b in self.blocks)

    @cached_property
    def num_layers(self) -> int:
        """Blocks."""
        return sum(b.count for b in self.blocks)

    @cached_property
    def block_sizes(self) -> tuple[tuple[int, int, int], ...]:
        """For each group of blocks: their number, and one block's dense and routed parameters."""
        return tuple(
            (b.count, b.mixer_parameters(self.dim) + b.dense_parameters(self.dim), b.expert_parameters(self.dim))
            for b in self.blocks
        )

    @cached_property
    def totals(self) -> tuple[int, int]:
        """Dense and routed parameters of all blocks, those of the modules for further tokens among them."""
        joins = 2 * self.dim**2 + 3 * self.dim  # a projection and three norms
        dense = sum(b.mixer_parameters(self.dim) + b.dense_parameters(self.dim) for b in self.mtp_blocks) + joins
        experts = sum(b.expert_parameters(self.dim) for b in self.mtp_blocks)
        return self.mtp * dense + sum(n * dense for n, dense, _ in self.block_sizes), self.mtp * experts + sum(
            n * experts for n, _, experts in self.block_sizes
        )

    @property
    def mtp_blocks(self) -> tuple[Block, ...]:
        """Blocks of one module that predicts a further token: a mixer with a feed-forward, of hybrids two blocks."""
        if self.mtp_block is not None:
            return (self.mtp_block,)
        last = self.blocks[-1]
        return (last,) if last.ffn is not None else (last, next(b for b in self.blocks if b.ffn is not None))

    @cached_property
    def memo(self) -> dict[tuple[object, ...], Any]:
        """Values that a search asks for again and again, by name and arguments."""
        return {}

    @property
    def head_parameters(self) -> int:
        """Elements of the head's matrix."""
        return self.vocab * self.dim

    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        embedding = self.vocab * self.dim * (1 if self.tied else 2) + self.positions * self.dim
        return embedding + self.final_norm * self.dim + sum(self.totals)

    def active_parameters(self) -> int:
        """Parameters one token meets."""
        idle = 0
        for count, b in self._all_blocks:
            if isinstance(b.ffn, ExpertsShape):
                idle += count * b.expert_parameters(self.dim) * (1 - b.ffn.per_token / b.ffn.num_experts)
        return round(self.parameters() - idle)

    def flops_per_token(self, seq_len: int, *, causal: bool, norms: bool = False) -> float:
        """FLOPs of forward and backward for one token; recomputation never counts.

        6 N for the parameters that are multiplied (no input embedding) and, per layer, 6 * seq * (key width + value width) *
        heads for attention; half of that where ``causal`` and the attention is causal. A delta rule's state of K x V costs
        18 * K * V a head: what a token recalls, writes and reads. With ``norms`` their weights are among the N, as
        `titan_train.models.flops` counts those of a module.
        """
        idle = 0 if self.tied else self.head_parameters
        matrices = self.active_parameters() - idle - self.positions * self.dim + self.mtp * self.head_parameters
        attention = 0.0
        for count, b in self._all_blocks:
            if b.attention is not None:
                a = b.attention
                matrices -= 0 if norms else count * (b.norms * self.dim)
                seen = min(seq_len, 2 * a.window) if a.window else seq_len
                half = 0.5 if causal and a.causal else 1.0
                attention += count * 6.0 * half * seen * a.heads * (a.head_dim + a.v_dim)
                matrices -= count * b.modulation * (1 - 1 / max(1, seq_len))
            if b.delta is not None:
                matrices -= 0 if norms else count * (b.norms * self.dim)
                attention += count * 18.0 * b.delta.inner * b.delta.state
        return 6.0 * matrices + attention

    @property
    def _all_blocks(self) -> list[tuple[int, Block]]:
        """Blocks with their number: the model's, and those of the modules for further tokens."""
        return [(b.count, b) for b in self.blocks] + [(self.mtp, b) for b in self.mtp_blocks if self.mtp]
