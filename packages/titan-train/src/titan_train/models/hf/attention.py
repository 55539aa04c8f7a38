"""Attention of transformers' modules through `titan_train.models.CausalAttention`.

transformers asks a registry for the function that computes attention. Ours hands queries, keys and values to a
`CausalAttention` that is a child of the attention module. So what replaces that child elsewhere (context parallelism, the
key-value cache) works here too, and FLOPs are counted. The context of the rows travels in the keyword arguments
that transformers passes from the model's forward down to the function.

Families whose masks are their own, added to scores, take `MASKED`: the same attention, with their masks.

Layers with a sliding window, where a row is longer, take a mask of their own and do without the child. Under context
parallelism they take a plan of their own instead.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from titan_train.models.common.attention import CausalAttention, SequenceContext, attend, document_mask
from titan_train.models.common.sinks import with_sink_key
from titan_train.models.common.windowed import Mask, windowed_attention

NAME = "titan_train"
"""In transformers' registry, and as ``attn_implementation``."""
MASKED = "titan_train_masked"
"""Likewise, for an `HFPlan.masked_attention`."""
CONTEXT = "titan_context"
"""The keyword argument that carries the context of the rows."""


@dataclass(frozen=True)
class WindowedContext(SequenceContext):
    """A context that also has the masks of sliding windows, and the documents for layers with a state."""

    windows: dict[int, Mask] = field(default_factory=dict[int, Mask])
    """Window to mask ``[B or 1, 1, S, S]``, or to what makes it; windows that no row exceeds are absent."""
    state: Any = None
    """Where documents are, for layers with a state: a `titan_train.models.hf.state.StateRows`; None: rows are documents."""


def window_mask(cu_seqlens: Tensor | None, seq_len: int, window: int, device: torch.device) -> Tensor:
    """True where a query may look that sees ``window`` tokens, itself included: ``[B or 1, 1, S, S]``."""
    places = torch.arange(seq_len, dtype=torch.int32, device=device)
    query = places[:, None]
    near = (query >= places) & (query - window < places)  # no distance for each pair, of 4 or 8 bytes
    return near[None, None] if cu_seqlens is None else document_mask(cu_seqlens, seq_len) & near


def attach(attention: nn.Module, *, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int) -> None:
    """Give an attention module the child that computes its attention."""
    attention.inner_attention = CausalAttention(num_heads, num_kv_heads, head_dim, value_dim=value_dim)


def bring_context(layer: Any, attention: Any) -> None:
    """Hand the context that a layer is called with to its attention, where the code of the layer drops it."""
    layer.__class__ = _keeping(type(layer))
    layer.carrier = carrier = _Carrier()
    attention.register_forward_pre_hook(carrier.hand_on, with_kwargs=True)


def without_weights(attention: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook that drops the weights of attention, which nobody reads and a tensor-parallel rank has of its own heads only."""
    return output[0], None, *output[2:]


class _Carrier:
    """Between a layer and its attention; a copy of the layer has one of its own."""

    context: Any = None

    def hand_on(self, attention: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        context, self.context = self.context, None
        return args, {**keywords, CONTEXT: context}


class _KeepsContext(nn.Module):
    """What the class of such a layer is given. Not a hook: recomputation calls ``forward`` alone."""

    carrier: _Carrier

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self.carrier.context = keywords[CONTEXT]
        return super().forward(*args, **keywords)


@functools.cache
def _keeping(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_KeepsContext, kind), {"__module__": kind.__module__})


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``[B, H, S, D]`` queries and ``[B, K, S, D]`` keys to ``[B, S, H, E]``, which some
    families take a view of; sinks are ``s_aux``.
    """
    context: WindowedContext = keywords[CONTEXT]
    own_scaling = query.shape[-1] ** -0.5
    if scaling is not None and scaling != own_scaling:
        query = query * (scaling / own_scaling)
    if sliding_window is not None and context.attention_plan is not None:
        context = replace(context, attention_plan=context.attention_plan.within(sliding_window))
    elif sliding_window is not None and sliding_window in context.windows:
        out = windowed_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), context.windows[sliding_window],
            boundaries=context.boundaries, window=sliding_window, sinks=s_aux,
        )  # fmt: skip
        return out.contiguous(), None
    inner: Any = module.inner_attention
    sinks = {} if s_aux is None else {"sinks": s_aux}
    out = inner(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), context, **sinks)
    return out.contiguous(), None


def _attend_masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    s_aux: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """As `_attend`, of ``[B, K, T, D]`` keys, with a mask ``[B, 1, S, T]`` that is zero where a query may look."""
    query = query * (scaling * query.shape[-1] ** 0.5)
    return attend(*with_sink_key(query, key, value, attention_mask >= 0, s_aux)).transpose(1, 2), None


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(MASKED, _attend_masked)
AttentionMaskInterface.register(MASKED, eager_mask)
