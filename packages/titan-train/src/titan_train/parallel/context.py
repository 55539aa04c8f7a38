"""Context parallelism: each rank computes on its share of every sequence; attention reaches the rest.

titan-cp decides which tokens a rank holds and how attention exchanges keys; here a model's attention inners are replaced
and each batch is cut accordingly. Positions and labels are computed before the cut, so neither the model nor the loss
notices.

Packed documents: the rows of a microbatch are laid one after the other into a single row whose document boundaries
include the ends of rows. Attention never crosses them, so that is the same computation, and every row may have its own
documents.

Dynamic (``context.dynamic``): that row holds the rows of all data-parallel ranks, and all of them share it. Each document lies on
as many ranks as its length asks for; each rank still holds as many tokens, in as many micro-batches, so that nothing else
changes: FSDP gathers and reduces as often, pipelines pass on the same shapes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import titan_cp
import torch
import torch.distributed as dist
from titan_mesh import Mesh
from torch import Tensor, nn

from titan_train.config import ContextConfig
from titan_train.data import Batch
from titan_train.models import CausalAttention, SequenceContext
from titan_train.models.common.delta import DeltaRule
from titan_train.models.common.loss import IGNORE_INDEX
from titan_train.models.common.mtp import AHEAD, look_ahead

EMPTY: Mapping[int, titan_cp.AttentionPlan] = {}
_WINDOWED_LAYOUTS = ("contiguous", "zigzag")
"""Layouts that put tokens in the same places for any window, and cut few documents: each cut piece sends a state."""


class RowsPlan:
    """The plan of one batch's rows, on its way through a model's ``forward``.

    Not a dataclass on purpose: FSDP2 and DistributedDataParallel rebuild dataclasses that they find in arguments.
    """

    __slots__ = ("group", "plan", "windows")

    def __init__(
        self,
        plan: titan_cp.AttentionPlan,
        windows: Mapping[int, titan_cp.AttentionPlan] = EMPTY,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.plan = plan
        self.windows = windows
        self.group = group
        """All ranks that share the rows, for layers with a state."""

    def within(self, window: int) -> "RowsPlan":
        """The plan of a layer whose tokens see ``window`` tokens, itself included; the ranks hold the same tokens."""
        return RowsPlan(self.windows[window], group=self.group) if window in self.windows else self


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """The part of a batch that this rank computes on: what a model and its loss read."""

    tokens: Tensor
    """``[B, S]`` int64."""
    labels: Tensor
    """``[B, S]`` int64."""
    positions: Tensor
    """``[B, S]`` int64."""
    cu_seqlens: Tensor | None
    """As in `titan_train.data.Batch`; None where the plan knows the documents."""
    attention_plan: RowsPlan
    """For `ContextAttention`."""
    samples_consumed: int = 0
    """As in `titan_train.data.Batch`."""
    ahead: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """``ahead_tokens`` and ``ahead_labels`` ``[B, S, D]``, for a model that predicts several tokens."""
    padding: Tensor | None = None
    """As in `titan_train.data.Batch`."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Positional arguments of the model."""
        return (self.tokens,)

    @property
    def keywords(self) -> Mapping[str, Any]:
        """What the model may accept by name."""
        return {
            "positions": self.positions,
            "cu_seqlens": self.cu_seqlens,
            "attention_plan": self.attention_plan,
            "padding": self.padding,
            **self.ahead,
        }

    @property
    def target(self) -> Tensor:
        """The labels."""
        return self.labels


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of one rank, after tensor parallelism."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Channels of a value head; None takes ``head_dim``."""

    @classmethod
    def of(cls, model: nn.Module, tp: int) -> "Heads":
        """Read them off the model's `CausalAttention`; fewer key-value heads than ``tp`` are replicated.

        Raises:
            ValueError: The model has none, or layers with other numbers of heads.
        """
        found = [m for m in model.modules() if isinstance(m, CausalAttention)]
        if not found:
            raise ValueError(
                f"parallel.cp: {type(model).__name__} has no titan_train.models.CausalAttention to replace. Use it in your "
                "model for the part that takes queries, keys and values, or set parallel.cp=1."
            )
        inner = found[0]
        for other in found:
            if (other.num_heads, other.num_kv_heads) != (inner.num_heads, inner.num_kv_heads):
                raise ValueError(
                    f"parallel.cp: {type(model).__name__} has layers of {inner.num_heads} query and {inner.num_kv_heads} "
                    f"key-value heads, and others of {other.num_heads} and {other.num_kv_heads}: ranks exchange the same "
                    "heads in every layer. Set parallel.cp=1."
                )
        return cls(max(1, inner.num_heads // tp), max(1, inner.num_kv_heads // tp), inner.head_dim, inner.value_dim)


class ContextParallelism:
    """Cuts batches over the ranks that share a sequence, and replaces a model's attention."""

    def __init__(
        self,
        config: ContextConfig,
        mesh: Mesh,
        heads: Heads,
        *,
        seq_len: int,
        dtype: torch.dtype,
        windows: Sequence[int] = (),
        states: bool = False,
        mtp_depth: int = 0,
    ) -> None:
        """Connect the ranks that share a sequence. Collective over them.

        Args:
            config: Method and layout.
            mesh: The ranks.
            heads: Of this rank.
            seq_len: Tokens of a row.
            dtype: Of the queries.
            windows: Sliding windows of the model's layers, in tokens.
            states: Some layers carry a state from token to token.
            mtp_depth: Tokens that the model predicts besides the next one.

        Raises:
            ValueError: Length, heads and method do not fit; the message names the nearest that do.
        """
        self._size, self._rank = mesh.size(config.axis), mesh.rank_in(config.axis)
        whole = seq_len
        if config.dynamic:  # lengths alone place the tokens, whether layers have windows or states
            config, states = dataclasses.replace(config, method="ring", layout="documents"), False
            whole = seq_len * self._size
        self._config = config
        self._heads = heads
        self._dtype = dtype
        self._windows = tuple(window for window in windows if window < seq_len)
        self._whole = plan_rows(
            config,
            self._size,
            self._rank,
            heads,
            seq_len=whole,
            dtype=dtype,
            windowed=bool(self._windows) and not config.dynamic,
            states=states,
        )
        self._states, self._seq_len = states, seq_len
        self._mtp_depth = mtp_depth
        self._group = mesh.group(config.axis)
        self._groups: dict[str, dist.ProcessGroup | None] = {"group": self._group}
        if self._whole.method == "usp":
            self._groups = _usp_groups(mesh, self._whole.ulysses_degree)
        titan_cp.connect(*dict.fromkeys((self._group, *self._groups.values())), device=mesh.device_type)

    def apply(self, model: nn.Module) -> None:
        """Replace every `CausalAttention` and `DeltaRule` of ``model``."""
        for name, module in list(model.named_modules(remove_duplicate=False)):  # blocks may share one
            if isinstance(module, CausalAttention):
                model.set_submodule(name, ContextAttention(self._groups))
            elif isinstance(module, DeltaRule):
                module.__class__ = ContextDelta
                cast(ContextDelta, module).group = self._group

    def cut(self, batch: Batch) -> LocalBatch:
        """Cut this rank's part from ``batch``, which is the same on all ranks of the group.

        Returns:
            Tensors of ``[B, S / cp]``, or ``[1, B * S / cp]`` where documents are kept apart.
        """
        tokens, labels, positions, padding = batch.tokens, batch.labels, batch.positions, batch.padding
        ahead = ()
        if self._mtp_depth:  # before the cut: what follows a token may be on another rank
            ahead = look_ahead(tokens, labels, positions, self._mtp_depth)
        plan = self._whole
        if batch.cu_seqlens is not None:
            tokens, labels, positions = (t.reshape(1, -1) for t in (tokens, labels, positions))
            padding = None if padding is None else padding.reshape(1, -1)
            ahead = tuple(t.flatten(0, 1).unsqueeze(0) for t in ahead)
            documents = _documents_of(batch)
            plan = self._plan(cu_seqlens=documents)
            windows = {window: self._plan(cu_seqlens=documents, window=window) for window in self._windows}
        else:
            windows = {window: self._plan(seq_len=self._seq_len, window=window) for window in self._windows}
        return LocalBatch(
            tokens=plan.shard(tokens),
            labels=plan.shard(labels, pad_value=-100),
            positions=plan.shard(positions.expand_as(tokens)),
            cu_seqlens=None,
            attention_plan=RowsPlan(plan, windows, self._group),
            samples_consumed=batch.samples_consumed,
            ahead={
                name: plan.shard(t, pad_value=pad)
                for name, t, pad in zip(AHEAD, ahead, (0, IGNORE_INDEX), strict=False)
            },
            padding=None if padding is None else plan.shard(padding, pad_value=True),
        )

    def dealt(self, batches: Sequence[Batch]) -> dict[str, float]:
        """How the documents of a step's micro-batches lie on the ranks that share them; empty without packed documents.

        Returns:
            ``documents``; ``split``, those of them on several ranks; ``largest_degree``, the most ranks that one lies on;
            ``imbalance``, the busiest rank's query-key pairs of each micro-batch over the mean of the ranks.
        """
        plans = [self._plan(cu_seqlens=_documents_of(batch)) for batch in batches if batch.cu_seqlens is not None]
        if not plans:
            return {}
        degrees = [plan.degrees for plan in plans]
        busiest, work = sum(max(plan.work) for plan in plans), sum(sum(plan.work) for plan in plans)
        return {
            "documents": float(sum(sum(one.values()) for one in degrees)),
            "split": float(sum(count for one in degrees for degree, count in one.items() if degree > 1)),
            "largest_degree": float(max(max(one) for one in degrees)),
            "imbalance": busiest * self._size / work,
        }

    def join(self, output: Tensor, rows: Any) -> Tensor:
        """All ranks' outputs of rows that `cut` made, in their order; ``rows`` is their ``attention_plan``. Collective."""
        return rows.plan.unshard(output, group=self._group)

    def _plan(self, **rows: Any) -> titan_cp.AttentionPlan:
        """The plan of other rows, or of a window, by the method of the whole rows; documents may choose the ring or Ulysses."""
        whole, fixed = self._whole, bool(self._windows) or self._states
        layout = whole.layout if self._windows or (self._states and self._config.layout == "auto") else ""
        anew = self._config.method == "auto" and "cu_seqlens" in rows and not fixed and whole.method != "usp"
        return plan_rows(
            self._config, self._size, self._rank, self._heads, dtype=self._dtype, method="auto" if anew else whole.method,
            ulysses_degree=0 if anew else whole.ulysses_degree, layout=layout, **rows,
        )  # fmt: skip


class ContextAttention(nn.Module):
    """Replaces `CausalAttention`: attention over the tokens of all ranks of the group."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup | None]) -> None:
        super().__init__()
        self._attention = titan_cp.CPAttention(
            dim_order="bthd",
            group=groups.get("group"),
            ring_group=groups.get("ring_group"),
            ulysses_group=groups.get("ulysses_group"),
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, sinks: Tensor | None = None
    ) -> Tensor:
        """As `CausalAttention`, on this rank's tokens.

        Args:
            q: ``[B, S, H, D]``.
            k: ``[B, S, K, D]``.
            v: ``[B, S, K, E]``, E at most D.
            context: With its ``attention_plan``.
            sinks: A logit for each head, ``[H]``; None for none.
        """
        return self._attention(q, k, v, plan=context.attention_plan.plan, sinks=sinks)


class ContextDelta(DeltaRule):
    """A delta rule whose documents go on from rank to rank: the state by one scan, the convolution by a few rows."""

    group: dist.ProcessGroup
    """The whole context-parallel group."""

    def convolve(self, rows: Tensor, taps: Tensor, context: SequenceContext) -> Tensor:
        """As `DeltaRule.convolve`, on this rank's tokens."""
        plan = context.attention_plan.plan
        out = titan_cp.causal_convolution(rows.transpose(1, 2), taps, plan=plan, group=self.group)
        return out.transpose(1, 2)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, context: SequenceContext) -> Tensor:
        """As `DeltaRule.scan`, on this rank's tokens."""
        return titan_cp.linear_attention(q, k, v, decay, beta, plan=context.attention_plan.plan, group=self.group)


def plan_rows(
    config: ContextConfig,
    size: int,
    rank: int,
    heads: Heads,
    *,
    dtype: torch.dtype,
    seq_len: int | None = None,
    cu_seqlens: list[int] | None = None,
    method: str | None = None,
    ulysses_degree: int = 0,
    layout: str = "",
    window: int | None = None,
    windowed: bool = False,
    states: bool = False,
) -> titan_cp.AttentionPlan:
    """titan-cp's plan for rows of ``seq_len`` tokens, or for one row of these documents. Needs no ranks.

    Args:
        config: Method and layout.
        size: Ranks of the group.
        rank: This one.
        heads: Of a rank.
        dtype: Of the queries.
        seq_len: Tokens of a row.
        cu_seqlens: Boundaries of documents.
        method: Instead of the configured one.
        ulysses_degree: Instead of the configured one.
        layout: Instead of the configured one.
        window: Tokens that a token sees, itself included.
        windowed: Other plans with windows are to put the tokens where this one does.
        states: Layers that carry a state read the tokens too: ``auto`` takes a layout that cuts few documents.

    Raises:
        ValueError: It cannot work; the message names the nearest length or degree that does.
    """
    if windowed and config.layout not in ("auto", *_WINDOWED_LAYOUTS):
        raise ValueError(
            f"context.layout={config.layout!r} places tokens by the work of one mask, and this model has layers with and "
            f"without a sliding window. Use 'auto', {' or '.join(map(repr, _WINDOWED_LAYOUTS))}."
        )
    method = method or config.method
    degree = (ulysses_degree or config.ulysses_degree or None) if method in ("usp", "auto") else None
    plan = titan_cp.plan(
        seq_len,
        cu_seqlens=cu_seqlens,
        size=size,
        rank=rank,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        value_dim=heads.value_dim,
        dtype=dtype,
        method=method,
        layout=layout or config.layout,
        ulysses_degree=degree,
        window=window,
    )
    if (windowed or (states and config.layout == "auto")) and plan.layout not in _WINDOWED_LAYOUTS:
        return plan_rows(
            config, size, rank, heads, dtype=dtype, seq_len=seq_len, cu_seqlens=cu_seqlens, method=plan.method,
            ulysses_degree=plan.ulysses_degree, layout="zigzag",
        )  # fmt: skip
    return plan


def _documents_of(batch: Batch) -> list[int]:
    """Boundaries of the row that all rows of a packed batch make, from host memory where it has them there."""
    assert batch.cu_seqlens is not None
    boundaries = batch.cu_seqlens if batch.boundaries is None else torch.from_numpy(batch.boundaries)
    return joined_documents(boundaries, batch.tokens.shape[1])


def joined_documents(cu_seqlens: Tensor, seq_len: int) -> list[int]:
    """Boundaries of the row that all rows make one after the other.

    Args:
        cu_seqlens: ``[B, N + 1]``, each row padded by repeating ``seq_len``.
        seq_len: Tokens of a row.
    """
    ends = cu_seqlens.long().cpu() + torch.arange(cu_seqlens.shape[0])[:, None] * seq_len
    return torch.unique(ends).tolist()


def _usp_groups(mesh: Mesh, ulysses_degree: int) -> dict[str, dist.ProcessGroup | None]:
    """The two groups of USP: rank ``ring * ulysses_degree + ulysses`` of the context group. Each is made by its ranks alone."""
    ranks, me = mesh.layout.group_of(mesh.global_rank, "cp"), mesh.rank_in("cp")
    first = me // ulysses_degree * ulysses_degree
    ring, heads = ranks[me % ulysses_degree :: ulysses_degree], ranks[first : first + ulysses_degree]
    mine: dict[str, Any] = {"group": None}
    for name, members in (("ring_group", ring), ("ulysses_group", heads)):
        mine[name] = dist.new_group(list(members), timeout=mesh.timeout, use_local_synchronization=True)
    return mine
