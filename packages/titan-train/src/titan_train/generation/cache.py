"""A static key-value cache, put into a model from outside.

While generating, every layer's `CausalAttention` is replaced by a `CachedAttention` that keeps the keys and values of
all positions so far, so that a new token costs one row of attention instead of the whole sequence. The model's own
code does not know of it: it computes queries, keys and values of the tokens it is given at the positions it is given.

Rows of different lengths need no left padding. A prompt shorter than the longest is padded on the right; what the
padding leaves in the cache lies behind the row's last position, where no query may look, and the row's own next
tokens overwrite it before any query can.

A layer that carries a state instead (`DeltaRule`) keeps it, and the last tokens that its convolution saw. What pads a prompt
changes neither, so the generating loop says how long each row's prompt is. Of a forward that verifies drafts it keeps both after
each token, and goes on from the last one that was accepted.

A layer that a model calls several times in a forward, such as a block that it runs through again, has a cache for each call
(`CacheOfCalls`).

Memory: 2 x layers x B x K x T x D elements, allocated once; a layer counts as often as it is called. A new token reads only the
positions in use, where the caller knows their number without asking the device (`CacheLength`); the query heads that share a
key head are laid side by side as if they were tokens, so that no key is read twice.

Shapes: B batch, S new tokens, T positions of the cache, H query heads, K key-value heads, D head width.
"""

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import titan_cp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.models import CausalAttention, SequenceContext, accepted_inputs, unwrap
from titan_train.models.common.attention import attend
from titan_train.models.common.delta import DeltaInputs, DeltaRule, convolve_rows
from titan_train.models.traits import traits_of


@dataclass(slots=True)
class CacheLength:
    """How much of the caches is in use; one for all layers, set by the generating loop."""

    used: int | None = None
    """Positions in use after the coming forward, at least those of every row; None reads the whole cache, as a compiled
    forward must, whose shapes are fixed."""
    even: bool = False
    """Every row has just these positions, so that a single new token sees all of them."""
    prompts: Tensor | None = None
    """Tokens of each row's prompt, ``[B]``; None: the rows are not padded."""
    accepted: int = 0
    """Tokens of the forward before that stay, where forwards verify several; 0: a forward has one token, or copies of it."""


class CachedAttention(nn.Module):
    """Attention of new tokens to everything at or before their positions, through a cache."""

    def __init__(self, length: int, in_use: CacheLength | None = None) -> None:
        """Set the number of positions; the first forward, which knows the batch, allocates the cache."""
        super().__init__()
        self.length = length
        self.in_use = CacheLength() if in_use is None else in_use
        self.keys: Tensor | None = None
        """``[B, K, T, D]``; unused positions are zero."""
        self.values: Tensor | None = None
        """``[B, K, T, E]``; E is at most D."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Store the new keys and values, then attend; shapes as in `CausalAttention.forward`."""
        if self.in_use.even and q.shape[1] == 1:
            return self._next_of_even_rows(q, k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        empty = self.keys is None
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_zeros((*x.shape[:2], self.length, x.shape[3])) for x in (k, v))
        positions = context.positions.expand(k.shape[0], -1)
        used = self.length if self.in_use.used is None else self.in_use.used
        for into, x in ((self.keys, k), (self.values, v)):
            into.scatter_(2, positions[:, None, :, None].expand_as(x), x)
        keys, values = self.keys[:, :, :used], self.values[:, :, :used]
        if empty and torch.equal(positions, torch.arange(k.shape[2], device=positions.device).expand_as(positions)):
            return attend(q, k, v, None).transpose(1, 2)  # a prompt: nothing else is in the cache, so no mask of S x T
        visible = torch.arange(used, device=positions.device) <= positions[:, None, :, None]
        if q.shape[2] == 1:
            return _one_token(q.transpose(1, 2), keys, values, visible)
        return attend(q, keys, values, visible).transpose(1, 2)

    def _next_of_even_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token, the last position in use of every row, so that it sees all of them: nothing to look up or to mask."""
        assert self.keys is not None, "a row has a prompt"
        assert self.values is not None
        assert self.in_use.used is not None
        keys, values = (x.narrow(2, 0, self.in_use.used) for x in (self.keys, self.values))
        for into, x in ((keys, k), (values, v)):
            into.narrow(2, self.in_use.used - 1, 1).copy_(x.transpose(1, 2))
        return _one_token(q, keys, values, None)


def _one_token(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """``[B, 1, H, D]`` to ``[B, 1, H, E]``."""
    width = values.shape[-1]
    if width < q.shape[-1] and not q.is_cuda:  # the CPU's kernel needs values as wide as keys
        values = F.pad(values, (0, q.shape[-1] - width))
    rows = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    return out.reshape(*q.shape[:3], -1)[..., :width]


class CachedDelta(DeltaRule):
    """A delta rule that goes on from the tokens of the forwards before."""

    in_use: CacheLength
    tail: Tensor | None
    """The last rows that the convolution saw, ``[B, taps - 1, C]``."""
    state: Tensor | None
    """``[B, H, K, V]`` float32."""
    verified: list[tuple[Tensor, Tensor]]
    """Tail and state after each token of the forward before, where it verified several."""

    @classmethod
    def of(cls, rule: DeltaRule, in_use: CacheLength) -> "CachedDelta":
        """One with the shape of ``rule``, which stays as it is."""
        cached = copy.copy(rule)
        cached.__class__ = cls
        found = cast(CachedDelta, cached)
        found.in_use, found.tail, found.state, found.verified = in_use, None, None, []
        return found

    def forward(self, inputs: DeltaInputs, context: SequenceContext) -> Tensor:
        """As `DeltaRule.forward`; after the prompt, one token, several times the same one, or several to verify."""
        if self.state is None:
            return self.compute(context, *inputs)
        count = inputs.q.shape[1]
        if not self.in_use.accepted:
            return self.compute(context, *_of_token(inputs, 0)).expand(-1, count, -1, -1)
        if self.verified:
            self.tail, self.state = self.verified[self.in_use.accepted - 1]
        out: list[Tensor] = []
        self.verified = []
        for number in range(count):
            assert self.tail is not None
            self.tail, self.state = self.tail.clone(), self.state.clone()
            out.append(self.compute(context, *_of_token(inputs, number)))
            self.verified.append((self.tail, self.state))
        return torch.cat(out, dim=1)

    def convolve(self, rows: Tensor, taps: Tensor, context: SequenceContext) -> Tensor:
        """As `DeltaRule.convolve`, with the rows of the forwards before in front."""
        before = taps.shape[1] - 1
        if self.tail is None:
            out = convolve_rows(rows, taps, context.positions)
            padded = F.pad(rows, (0, 0, before, 0))
            last = self._lengths(rows)[:, None] + torch.arange(before, device=rows.device)
            self.tail = padded.gather(1, last.unsqueeze(-1).expand(-1, -1, rows.shape[2]))
            return out
        seen = torch.cat([self.tail, rows], dim=1)
        self.tail.copy_(seen[:, 1:])
        return (seen * taps.t()).sum(1, keepdim=True)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, context: SequenceContext) -> Tensor:
        """As `DeltaRule.scan`, from the state of the forwards before."""
        if self.state is None:
            padding = torch.arange(v.shape[2], device=v.device) >= self._lengths(v)[:, None, None]
            decay, beta = decay.masked_fill(padding, 0.0), beta.masked_fill(padding, 0.0)  # the state stays
            out, self.state = titan_cp.local_linear_attention(q, k, v, decay, beta)
            return out
        out, state = titan_cp.local_linear_attention(q, k, v, decay, beta, state=self.state)
        self.state.copy_(state)
        return out

    def _lengths(self, rows: Tensor) -> Tensor:
        """Tokens of each row that are no padding, of ``[B, S, C]`` or ``[B, H, S, V]``."""
        if self.in_use.prompts is not None:
            return self.in_use.prompts
        return torch.full((rows.shape[0],), rows.shape[-2], device=rows.device)


def _of_token(inputs: DeltaInputs, number: int) -> DeltaInputs:
    """The inputs of one of the tokens of a forward."""
    named = ("q", "k", "v", "strength", "rate")
    return inputs._replace(**{name: getattr(inputs, name)[:, number : number + 1] for name in named})


class CacheOfCalls(nn.Module):
    """In the place of a layer: a cache for each time that the model calls it in a forward."""

    def __init__(self, name: str, new_cache: Callable[[], nn.Module]) -> None:
        """Take the layer's name, and what makes a `CachedAttention` or a `CachedDelta`."""
        super().__init__()
        self._name, self._new_cache = name, new_cache
        self.caches = nn.ModuleList()
        self._calls = 0
        """In this forward."""
        self._whole = 0
        """How many first caches have seen every forward."""
        self._growing = True

    def begin(self) -> None:
        """Before every forward of the model."""
        self._growing = len(self.caches) == 0
        self._whole = min(self._whole, self._calls)
        self._calls = 0

    def forward(self, *inputs: Any) -> Tensor:
        """As the layer in whose place it is."""
        if self._calls == self._whole:
            if not self._growing:
                raise ValueError(
                    f"{self._name!r} is called more than {self._whole} times in a forward, and was not in every forward before: "
                    "a cache of its keys and values lacks tokens. Generate with use_cache=False, or call it equally often."
                )
            self.caches.append(self._new_cache())
            self._whole += 1
        self._calls += 1
        return self.caches[self._calls - 1](*inputs)


def supports_cache(model: nn.Module) -> bool:
    """Whether tokens meet only in `CausalAttention` and `DeltaRule`, as ``supports_kv_cache = True`` says, and positions are
    taken.
    """
    return traits_of(model).supports_kv_cache and "positions" in accepted_inputs(model)


@contextmanager
def kv_cache(model: nn.Module, length: int) -> Generator[CacheLength, None, None]:
    """Inside, every forward of ``model`` continues the sequences of the forwards before it.

    Yields how much of the caches is in use, which the caller may set before each forward.

    The caller passes ``positions`` with each forward, and does not train the model until the block ends.

    Args:
        model: One for which `supports_cache` is true.
        length: Positions of the cache: no forward may reach position ``length``.
    """
    whole = unwrap(model)
    # not named_children: a layer that has two names in its parent is called by both
    owners = [
        (path, parent, name, child)
        for path, parent in whole.named_modules()
        for name, child in list(parent._modules.items())
        if isinstance(child, CausalAttention | DeltaRule)
    ]
    in_use = CacheLength()
    placed: list[CacheOfCalls] = []

    def begin(_model: nn.Module, _inputs: object) -> None:
        for cache in placed:
            cache.begin()

    handle = whole.register_forward_pre_hook(begin)
    try:
        for path, parent, name, child in owners:
            is_delta = isinstance(child, DeltaRule)
            new = partial(CachedDelta.of, child, in_use) if is_delta else partial(CachedAttention, length, in_use)
            placed.append(CacheOfCalls(f"{path}.{name}" if path else name, new))
            setattr(parent, name, placed[-1])
        yield in_use
    finally:
        handle.remove()
        for _, parent, name, child in owners:
            setattr(parent, name, child)
