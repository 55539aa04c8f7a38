"""A model as one function of its inputs: new tokens and the cache in, logits and the cache out.

Exporters trace functions; the key-value cache that generation puts into a model is state. Here every layer's cache is an
argument, and what the layer wrote is a result. One function serves the prompt (many tokens) and decoding (one token).

A mixture of experts sorts tokens into groups whose sizes depend on the data, which a traced graph cannot have. Here every
expert computes every token, and the router's weights, zero where an expert was not chosen, pick the sum. That costs experts
over experts per token times the products; a step of one token reads every expert's weights.

`SteppedModel` runs such a function with any executor. Its folder holds ``export.json``, which says what the caches look
like, and the tokenizer.

Shapes: B rows, S new tokens, T positions of the cache, K key-value heads, D head width, E value width, V vocabulary.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.export.gate import check_positions
from titan_train.export.tokenizer_json import folder_ids
from titan_train.files import read_text, write_atomic
from titan_train.generation import supports_cache
from titan_train.models import CausalAttention, SequenceContext
from titan_train.models.common.delta import DeltaRule
from titan_train.models.common.moe.experts import Experts
from titan_train.models.common.moe.routed import expert_stacks

DESCRIPTION = "export.json"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the caches of a model look like."""

    layers: int
    """0: it has none, and is called with all tokens again."""
    kv_heads: int
    key_dim: int
    value_dim: int

    def empty(self, rows: int, length: int) -> list[Tensor]:
        """Caches without content: keys ``[B, K, T, D]`` and values ``[B, K, T, E]`` of each layer in turn, float32."""
        return [
            torch.zeros(rows, self.kv_heads, length, width)
            for _ in range(self.layers)
            for width in (self.key_dim, self.value_dim)
        ]


class StepModel(nn.Module):
    """A model whose forward takes the caches and returns them.

    The model's attention modules are replaced: use it for nothing else afterwards.
    """

    def __init__(self, model: nn.Module, *, growing: bool = False) -> None:
        """Take over a model; ``growing`` as in `GrowingModel`.

        Raises:
            ValueError: It has no support for a key-value cache, or layers that keep a state.
        """
        super().__init__()
        if not supports_cache(model):
            raise ValueError(
                f"{type(model).__name__} does not support a key-value cache, so it cannot be exported with one. Export it with "
                "--to onnx or --to dcp."
            )
        if any(isinstance(module, DeltaRule) for module in model.modules()):
            raise ValueError(
                f"{type(model).__name__} has layers that carry a state, and this export knows the cache of attention alone. "
                "Export it with --to hf or --to dcp."
            )
        self.model = model
        self._caches = _Caches([])
        attention = _GrowingAttention if growing else _StepAttention
        found = [module for module in model.modules() if isinstance(module, CausalAttention)]
        first = found[0]
        self.shape = CacheShape(len(found), first.num_kv_heads, first.head_dim, first.value_dim)
        number = 0
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, CausalAttention):
                    setattr(parent, name, attention(number, self._caches))
                    number += 1
        for stack in expert_stacks(model):
            assert isinstance(stack.experts, Experts)  # a model of transformers has none of the attention above
            stack.holder.dispatch = _EveryExpert(stack.experts)

    def forward(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Continue the sequences.

        Args:
            tokens: New tokens ``[B, S]`` int64.
            positions: Where they stand, ``[B, S]`` int64, below T.
            caches: As `CacheShape.empty` makes them, or as the call before returned them.

        Returns:
            Logits ``[B, S, V]`` and the caches with the new tokens' keys and values.
        """
        self._caches.tensors[:] = caches
        try:
            logits = self.model(tokens, positions=positions)
            return logits, list(self._caches.tensors)
        finally:
            self._caches.tensors.clear()


class GrowingModel(StepModel):
    """The same with caches that grow: T positions go in, T + S come out, as decoders that Optimum exports have them."""

    def __init__(self, model: nn.Module) -> None:
        """Take over a model.

        Raises:
            ValueError: It has no support for a key-value cache, or layers that keep a state.
        """
        super().__init__(model, growing=True)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: Tensor, mask: Tensor, positions: Tensor, caches: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Continue the sequences.

        Args:
            tokens: New tokens ``[B, S]`` int64.
            mask: ``[B, T + S]`` int64: 0 for what is padding, before or among the new tokens, else 1.
            positions: Where the new tokens stand, ``[B, S]`` int64; padding does not count.
            caches: Keys ``[B, K, T, D]`` and values ``[B, K, T, E]`` of each layer in turn; T may be 0.

        Returns:
            Logits ``[B, S, V]`` and the caches with the new tokens' keys and values behind them.
        """
        seen, new = caches[0].shape[2], tokens.shape[1]
        at = torch.arange(seen + new, device=tokens.device)
        own = at[seen:, None]
        # padding sees itself: softmax over nothing would be NaN, and that times 0 too
        self._caches.visible = ((at <= own) & (mask[:, None, None] > 0)) | (at == own)
        try:
            return super().forward(tokens, positions, caches)
        finally:
            self._caches.visible = None


@dataclass(slots=True)
class _Caches:
    """Hands the caches of one forward to the attention modules, outside of their attributes."""

    tensors: list[Tensor]
    visible: Tensor | None = None
    """``[B, 1, S, T + S]``, of a `GrowingModel`."""


class _StepAttention(nn.Module):
    def __init__(self, number: int, caches: _Caches) -> None:
        super().__init__()
        self.number = number
        self.caches = caches

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        at = context.positions[:, None, :, None]
        places = (2 * self.number, 2 * self.number + 1)
        new: list[Tensor] = []
        for place, x in zip(places, (k, v), strict=True):
            x = x.transpose(1, 2)
            new.append(self.caches.tensors[place].scatter(2, at.expand_as(x), x))
            self.caches.tensors[place] = new[-1]
        keys, values = new
        visible = torch.arange(keys.shape[2], device=at.device) <= at
        return _attend(q.transpose(1, 2), keys, values, visible).transpose(1, 2)


class _GrowingAttention(_StepAttention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        places = (2 * self.number, 2 * self.number + 1)
        for place, x in zip(places, (k, v), strict=True):
            self.caches.tensors[place] = torch.cat([self.caches.tensors[place], x.transpose(1, 2)], 2)
        keys, values = (self.caches.tensors[place] for place in places)
        assert self.caches.visible is not None
        return _attend(q.transpose(1, 2), keys, values, self.caches.visible).transpose(1, 2)


class _EveryExpert(nn.Module):
    """Takes the place of a dispatch; arguments as in `LocalDispatch.forward`; the counts are not used."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self._held = (experts,)  # not a submodule: the weights keep their one name

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor, experts: Any, beside: Any = None
    ) -> Tensor:
        (held,) = self._held
        of_all = weights.new_zeros(x.shape[0], held.w1.shape[0]).scatter(1, chosen, weights)
        hidden = held.gated(x @ held.w1.transpose(-2, -1), x @ held.w3.transpose(-2, -1))
        out = (hidden @ held.w2.transpose(-2, -1)) * of_all.t()[..., None]
        return out.sum(0) if beside is None else out.sum(0) + beside()


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention; shapes as in `models.common.attention.attend`."""
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    # Repeated key heads would do too, but torch 2.11 then finds that the caches' length is not free.
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)[..., :width]


class SteppedModel(ABC):
    """A step function with its caches."""

    def __init__(self, folder: Path) -> None:
        self.description: dict[str, Any] = json.loads(read_text(folder / DESCRIPTION))
        self.shape = CacheShape(**self.description["cache"])
        self._ids = folder_ids(folder)

    def ids(self, text: str) -> list[int] | None:
        return self._ids(text)

    @abstractmethod
    def step(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """As `StepModel.forward`."""

    def begin(self, rows: int, length: int) -> list[Tensor]:
        """The caches of ``length`` positions before the first step."""
        return self.shape.empty(rows, length)

    def logits(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        self._check(length)
        positions = torch.arange(length).expand(rows, -1).contiguous()
        return self.step(tokens.contiguous(), positions, self.begin(rows, length))[0]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        total = len(prompt) + count
        self._check(total - 1)  # the last token is not read
        logits, caches = self.step(torch.tensor([list(prompt)]), torch.arange(len(prompt))[None], self.begin(1, total))
        found = [int(logits[0, -1].argmax())]
        while len(found) < count:
            at = torch.tensor([[len(prompt) + len(found) - 1]])
            logits, caches = self.step(torch.tensor([[found[-1]]]), at, caches)
            found.append(int(logits[0, -1].argmax()))
        return found

    def _check(self, length: int) -> None:
        check_positions(length, self.description["max_positions"])


def write_description(folder: Path, shape: CacheShape, *, max_positions: int | None, step: int, **more: Any) -> None:
    """Write ``export.json``."""
    content = {"step": step, "cache": asdict(shape), "max_positions": max_positions, **more}
    write_atomic(folder / DESCRIPTION, json.dumps(content, indent=2) + "\n")
