"""A static key-value cache, put into a model from outside.

While generating, every layer's `CausalAttention` is replaced by a `CachedAttention` that keeps the keys and values of
all positions so far, so that a new token costs one row of attention instead of the whole sequence. The model's own
code does not know of it: it computes queries, keys and values of the tokens it is given at the positions it is given.

Rows of different lengths need no left padding. A prompt shorter than the longest is padded on the right; what the
padding leaves in the cache lies behind the row's last position, where no query may look, and the row's own next
tokens overwrite it before any query can.

Memory: 2 x layers x B x K x T x D elements, allocated once.

Shapes: B batch, S new tokens, T positions of the cache, H query heads, K key-value heads, D head width.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_train.models import CausalAttention, SequenceContext, accepted_inputs, unwrap
from titan_train.models.common.attention import attend


class CachedAttention(nn.Module):
    """Attention of new tokens to everything at or before their positions, through a cache."""

    def __init__(self, length: int) -> None:
        """Prepare a cache of ``length`` positions; it is allocated by the first forward, which knows the batch."""
        super().__init__()
        self.length = length
        self.keys: Tensor | None = None
        """``[B, K, T, D]``; unused positions are zero."""
        self.values: Tensor | None = None
        """``[B, K, T, E]``; E is at most D."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Store the new keys and values, then attend; shapes as in `CausalAttention.forward`."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_zeros((*x.shape[:2], self.length, x.shape[3])) for x in (k, v))
        positions = context.positions.expand(k.shape[0], -1)
        for into, x in ((self.keys, k), (self.values, v)):
            into.scatter_(2, positions[:, None, :, None].expand_as(x), x)
        visible = torch.arange(self.length, device=positions.device) <= positions[:, None, :, None]
        return attend(q, self.keys, self.values, visible).transpose(1, 2)


def supports_cache(model: nn.Module) -> bool:
    """Whether tokens meet only in `CausalAttention`, as ``supports_kv_cache = True`` says, and positions are taken."""
    return getattr(unwrap(model), "supports_kv_cache", False) is True and "positions" in accepted_inputs(model)


@contextmanager
def kv_cache(model: nn.Module, length: int) -> Generator[None, None, None]:
    """Inside, every forward of ``model`` continues the sequences of the forwards before it.

    The caller passes ``positions`` with each forward, and does not train the model until the block ends.

    Args:
        model: One for which `supports_cache` is true.
        length: Positions of the cache: no forward may reach position ``length``.
    """
    owners = [
        (parent, name, child)
        for parent in unwrap(model).modules()
        for name, child in parent.named_children()
        if isinstance(child, CausalAttention)
    ]
    try:
        for parent, name, _ in owners:
            setattr(parent, name, CachedAttention(length))
        yield
    finally:
        for parent, name, child in owners:
            setattr(parent, name, child)
