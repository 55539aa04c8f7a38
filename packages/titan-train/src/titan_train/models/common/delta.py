"""Gated delta net (arXiv:2412.06464): a layer that carries a state from token to token instead of keys and values.

A value head has a state ``h``, ``[K, V]``. Each token forgets part of it, takes out what its key recalls, puts its own value
there, and its query reads the result::

    q, k, v ← silu(short causal convolution of each)     q, k of length one
    h ← exp(decay) h,   decay = -exp(A) softplus(rate + bias)
    h ← h + k (β (v - kᵀ h))ᵀ,   out = qᵀ h / √K

Convolution and state stay inside documents. `DeltaRule` has no parameters: context parallelism and the state cache of generation
replace its two steps, as they replace `CausalAttention`.

What lies between the projections and the result is computed again in backward: a chunk's products and states would be tens of
times as large as the queries, keys and values, which alone are kept. A compiled block is cut in two around it: a graph would
unroll the chunks, take over a second a chunk to compile, keep their products, and could not use other packages' kernels.

Shapes: B rows, S tokens, d width, G key heads, H value heads (H / G in turn share a key head), K key and V value channels.
"""

from typing import NamedTuple

import titan_cp
import torch
import torch.nn.functional as F
from titan_cp.methods.compiling import graph_break
from torch import Tensor, nn

from titan_train.models.common.attention import SequenceContext, document_numbers
from titan_train.models.common.norm import RMSNorm
from titan_train.models.common.recomputed import recomputed
from titan_train.models.common.shared_input import SharedInput
from titan_train.models.shape import DeltaShape

_L2_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """What the state layer reads of its projections and parameters."""

    q: Tensor
    """``[B, S, G, K]``, before the convolution, like the next two."""
    k: Tensor
    """``[B, S, G, K]``."""
    v: Tensor
    """``[B, S, G, H / G * V]``."""
    strength: Tensor
    """Logit of β, ``[B, S, H]``."""
    rate: Tensor
    """Of the decay, before its bias, ``[B, S, H]``."""
    q_taps: Tensor
    """``[G * K, 1, taps]``, the last tap for the token itself."""
    k_taps: Tensor
    v_taps: Tensor
    log_decay: Tensor
    """A, ``[H]``."""
    rate_bias: Tensor
    """``[H]``."""


class DeltaRule(nn.Module):
    """Convolution, gates and the gated delta rule over rows of packed documents."""

    def __init__(self, shape: DeltaShape) -> None:
        """Record the shape, which FLOP counting reads."""
        super().__init__()
        self.num_heads = shape.key_heads
        """Key heads; tensor parallelism makes them a rank's."""
        self.values_per_key = shape.heads // shape.key_heads
        self.key_dim = shape.state
        self.value_dim = shape.head_dim

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward besides the projections: what a token recalls, writes and reads of each head's state."""
        return 18.0 * self.num_heads * self.values_per_key * self.key_dim * self.value_dim

    def forward(self, inputs: DeltaInputs, context: SequenceContext) -> Tensor:
        """``[B, S, H, V]``, in the dtype of ``v``."""
        return _attend(self, inputs, context)

    def compute(self, context: SequenceContext, *given: Tensor) -> Tensor:
        """The same, keeping for backward what autograd keeps."""
        x = DeltaInputs(*given)
        rows = torch.cat([part.flatten(-2) for part in (x.q, x.k, x.v)], dim=-1)
        taps = torch.cat([part.squeeze(1) for part in (x.q_taps, x.k_taps, x.v_taps)])
        widths = [part.shape[-2] * part.shape[-1] for part in (x.q, x.k, x.v)]
        q, k, v = F.silu(self.convolve(rows, taps, context)).split(widths, dim=-1)
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k = (_unit(y.unflatten(-1, (-1, self.key_dim)).to(wide)) for y in (q, k))
        decay = -x.log_decay.to(wide).exp() * F.softplus(x.rate.to(wide) + x.rate_bias.to(wide))
        v = v.unflatten(-1, (-1, self.value_dim))
        heads_first = (y.transpose(1, 2) for y in (q, k, v, decay, x.strength.sigmoid()))
        return self.scan(*heads_first, context=context).transpose(1, 2)

    def convolve(self, rows: Tensor, taps: Tensor, context: SequenceContext) -> Tensor:
        """A depthwise causal convolution that stays inside documents: ``[B, S, C]`` by ``[C, taps]``."""
        return convolve_rows(rows, taps, context.positions)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, context: SequenceContext) -> Tensor:
        """The delta rule, heads first: ``[B, H, S, V]``."""
        documents = None
        if context.cu_seqlens is not None:
            places = torch.arange(v.shape[2], device=v.device)
            documents = document_numbers(context.cu_seqlens, places)
        boundaries = None if documents is None else context.boundaries
        return titan_cp.local_linear_attention(q, k, v, decay, beta, documents=documents, boundaries=boundaries)[0]


@graph_break
def _attend(rule: DeltaRule, inputs: DeltaInputs, context: SequenceContext) -> Tensor:
    if not torch.is_grad_enabled():
        return rule.compute(context, *inputs)
    return recomputed(lambda *given: rule.compute(context, *given), *inputs)


class GatedDeltaNet(nn.Module):
    """The layer in the place of attention, without biases; its projections are packed key head by key head, as published."""

    def __init__(self, dim: int, shape: DeltaShape, norm_eps: float) -> None:
        """Build the projections, convolutions and gates."""
        super().__init__()
        values = shape.heads // shape.key_heads
        self.num_heads = shape.key_heads
        self.values_per_key = values
        self.widths = [shape.state, shape.state, values * shape.head_dim, values * shape.head_dim]
        self.value_dim = shape.head_dim
        self.wqkvz = nn.Linear(dim, shape.key_heads * sum(self.widths), bias=False)
        self.wba = nn.Linear(dim, 2 * shape.heads, bias=False)
        self.q_conv, self.k_conv, self.v_conv = (
            nn.Conv1d(channels, channels, shape.taps, groups=channels, bias=False)
            for channels in (shape.key_heads * width for width in self.widths[:3])
        )
        self.decay = HeadDecay(shape.heads)
        self.gated_norm = RMSNorm(shape.head_dim, eps=norm_eps)
        self.wo = nn.Linear(shape.inner, dim, bias=False)
        self.linears = SharedInput()
        self.inner = DeltaRule(shape)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        qkvz, ba = self.linears(x, self.wqkvz, self.wba)
        # -1 heads: a module whose projections were cut over ranks holds only its own
        q, k, v, z = qkvz.unflatten(-1, (-1, sum(self.widths))).split(self.widths, dim=-1)
        strength, rate = ba.unflatten(-1, (-1, 2 * self.values_per_key)).chunk(2, dim=-1)
        inputs = DeltaInputs(
            q, k, v, strength.flatten(-2), rate.flatten(-2),
            self.q_conv.weight, self.k_conv.weight, self.v_conv.weight, self.decay.weight, self.decay.bias,
        )  # fmt: skip
        out = self.gated_norm(self.inner(inputs, context))
        gate = F.silu(z.unflatten(-1, (-1, self.value_dim)).flatten(-3, -2).to(_wide(z)))
        return self.wo((out * gate).to(z.dtype).flatten(-2))  # x may be a norm that float8 has yet to apply


def has_states(model: nn.Module) -> bool:
    """Whether layers of a model carry a state from token to token."""
    of_transformers = getattr(model, "has_state", False) is True
    return of_transformers or any(isinstance(module, DeltaRule) for module in model.modules())


class HeadDecay(nn.Module):
    """What each value head forgets: ``A`` (``weight``) and the bias of its rate, as Mamba's ``A_log`` and ``dt_bias``."""

    def __init__(self, heads: int) -> None:
        """Build both, ``[H]``."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rates from 0.01 to 16, as published."""
        nn.init.uniform_(self.weight, 0.01, 16.0)
        with torch.no_grad():
            self.weight.log_()
        nn.init.ones_(self.bias)


def convolve_rows(rows: Tensor, taps: Tensor, positions: Tensor) -> Tensor:
    """A depthwise causal convolution within documents.

    Args:
        rows: ``[B, S, C]``.
        taps: ``[C, w]``, the last one for the token itself.
        positions: Of each token in its document, ``[B or 1, S]``.

    Returns:
        ``[B, S, C]``.
    """
    out = rows * taps[:, -1]
    for back in range(1, min(taps.shape[1], rows.shape[1])):
        earlier = F.pad(rows[:, :-back], (0, 0, back, 0)) * (positions >= back).unsqueeze(-1)
        out = out + earlier * taps[:, -1 - back]
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
