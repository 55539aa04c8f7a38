"""Layers of transformers that carry a state: gated delta rule, KDA and Mamba-2, over packed documents and over ranks.

The code of these layers (Qwen3-Next, Kimi Linear, Granite 4, Nemotron-H, OLMo hybrid, ...) calls two functions of its module by
their names: one for the short convolution, one for the state. Both run over the ends of documents. So each such layer's own
``forward`` is taken with these names bound to the functions here; no layer of transformers is patched, and projections, gates
and norms stay its code. The functions compute by `titan_cp.linear_attention` and `titan_cp.causal_convolution`, whose plan
knows where documents end and which tokens other ranks hold. Rows of one document on one process go to transformers' own
functions, and so to its kernels on a GPU (`titan_train.models.hf.device`).
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import titan_cp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.models.hf.attention import CONTEXT


class StateRows:
    """Where the documents of a batch are, for layers with a state.

    Not a dataclass on purpose: FSDP2 and DistributedDataParallel rebuild dataclasses that they find in arguments.
    """

    def __init__(self, plan: titan_cp.AttentionPlan, group: dist.ProcessGroup | None = None) -> None:
        """Of a plan; ``group`` are the ranks that share a sequence."""
        self.plan, self.group = plan, group

    def joined(self, x: Tensor, dim: int) -> Tensor:
        """Rows one after the other along ``dim``, where the plan is of all rows: ``[B, ...]`` to ``[1, ...]``."""
        return x if x.shape[dim] == self.plan.local_len else torch.cat(x.split(1), dim=dim)

    def apart(self, x: Tensor, rows: int, dim: int) -> Tensor:
        """Undo `joined`."""
        return x if x.shape[0] == rows else torch.cat(x.chunk(rows, dim=dim))


def packed_rows(cu_seqlens: Tensor) -> StateRows:
    """The rows of a batch on one process, from the boundaries of each ``[B, N + 1]``; one read by the host."""
    ends = cu_seqlens.long().cpu()
    ends = ends + torch.arange(ends.shape[0])[:, None] * int(ends[0, -1])
    bounds: list[int] = torch.unique(ends).tolist()
    plan = titan_cp.plan(cu_seqlens=bounds, size=1, rank=0, num_heads=1, method="ring", layout="contiguous")
    return StateRows(plan)


def has_state(layer: nn.Module) -> bool:
    """Whether this module carries a state from token to token by functions that are known here."""
    return _names(type(layer)) != ()


def take_over(layer: Any) -> None:
    """Let a layer with a state keep documents apart."""
    layer.forward = types.MethodType(_forward_of(type(layer)), layer)


def _names(kind: type[nn.Module]) -> tuple[str, ...]:
    """The functions here that the code of a layer calls by their names."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return () if code is None else tuple(name for name in _FUNCTIONS if name in code.co_names)


@functools.cache
def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a class of layers, with the functions here in the place of those of its module."""
    own = cast("types.FunctionType", inspect.unwrap(kind.forward))
    found = {
        name: functools.partial(_FUNCTIONS[name], own.__globals__[name])
        for name in _names(kind)
        if name in own.__globals__
    }
    return types.FunctionType(
        own.__code__, {**own.__globals__, **found}, own.__name__, own.__defaults__, own.__closure__
    )


def _convolution(
    own: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **keywords: Any,
) -> Tensor:
    """``[B, C, S]``, causal in each document, then the activation."""
    from transformers.activations import ACT2FN

    rows: StateRows | None = keywords[CONTEXT].state
    if rows is None:
        return own(hidden_states, weight, bias, activation=activation)
    out = titan_cp.causal_convolution(rows.joined(hidden_states, 2), weight, bias, plan=rows.plan, group=rows.group)
    out = rows.apart(out, hidden_states.shape[0], 2)
    return out if activation is None else ACT2FN[activation](out)


def _delta_rule(
    own: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """Tokens before heads, as transformers has them: ``[B, S, H, D]``, decay ``[B, S, H]`` or per channel."""
    rows: StateRows | None = keywords.pop(CONTEXT).state
    if rows is None:
        return own(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **keywords)
    if use_qk_l2norm_in_kernel:
        query, key = (_normed(x.float()) for x in (query, key))
    return _linear(rows, query, key, value, g.float(), beta, scale=None), None


def _mamba(
    own: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = (0.0, float("inf")),
    **keywords: Any,
) -> Any:
    """Tokens before heads: ``[B, S, H, P]``, ``B`` and ``C`` per group, ``dt`` ``[B, S, H]``."""
    rows: StateRows | None = keywords.pop(CONTEXT).state
    if rows is None:
        return own(
            hidden_states, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, **keywords
        )
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = (F.softplus(step) if dt_softplus else step).clamp(min=dt_limit[0], max=dt_limit[1]).float()
    wide = hidden_states.float()
    out = _linear(rows, C.float(), B.float(), wide * step[..., None], A.float() * step, None, scale=1.0)
    return out if D is None else out + D.float()[..., None] * wide


def _fused_mamba(own: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """The whole layer in one kernel, where there is one; None: the layer calls its parts."""
    rows: StateRows | None = keywords.pop(CONTEXT).state
    return own(*args, **keywords) if rows is None else None


def _linear(
    rows: StateRows, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, *, scale: float | None
) -> Tensor:
    """`titan_cp.linear_attention` of tensors that have tokens before heads."""
    batch = q.shape[0]
    q, k, v, decay = (rows.joined(x, 1).transpose(1, 2) for x in (q, k, v, decay))
    beta = None if beta is None else rows.joined(beta, 1).transpose(1, 2)
    out = titan_cp.linear_attention(q, k, v, decay, beta, plan=rows.plan, group=rows.group, scale=scale)
    return rows.apart(out.transpose(1, 2), batch, 1)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba,
    "mamba2_split_conv1d_scan_combined": _fused_mamba,
}
"""What layers call by these names, given transformers' own function first."""
