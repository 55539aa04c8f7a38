"""Generation with a cache that a model keeps by itself, for models with more than plain causal attention.

A model of transformers with windows, sinks or layers with a state brings three methods (`OwnCache`). Such a cache has no
positions of its own for each row, and a state takes in whatever it is given, padding too. So the rows whose prompts are
equally long share a cache and a forward, and no row is padded: a batch of n different lengths takes n forwards for each
token.

A row that becomes longer than one of the model's ``rope_limits`` is computed anew, whole, as transformers does.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titan_train.models import unwrap
from titan_train.models.traits import traits_of


class OwnCache(Protocol):
    """What a model brings that keeps a cache by itself."""

    def new_cache(self) -> Any:
        """An empty cache for some rows of one length; None: this model goes without."""
        ...

    def own_code(self) -> AbstractContextManager[None]:
        """What to be inside of while caches are used."""
        ...

    def next_logits(self, tokens: Tensor, cache: Any) -> Tensor:
        """Logits after the last of some new tokens ``[B, S]``, which the cache takes in: ``[B, 1, V]``."""
        ...


def keeps_own_cache(model: nn.Module) -> bool:
    """Whether a model keeps a cache by itself."""
    begin = getattr(unwrap(model), "new_cache", None)
    return begin is not None and begin() is not None


@contextmanager
def own_cache_logits(model: Any, prompts: Sequence[Sequence[int]]) -> Generator["OwnCacheLogits"]:
    """Inside, what it yields gives logits of every next token; ``model`` is one that `keeps_own_cache`, unwrapped."""
    with model.own_code():
        yield OwnCacheLogits(model, [len(prompt) for prompt in prompts])


class OwnCacheLogits:
    """Logits after each row's last token, ``[B, V]``: the prompts at step 0, afterwards only the newest token."""

    def __init__(self, model: Any, lengths: Sequence[int]) -> None:
        self._model: OwnCache = model
        self._limits = traits_of(model).rope_limits
        rows: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            rows.setdefault(length, []).append(row)
        self._groups = [(length, torch.tensor(of)) for length, of in rows.items()]
        self._caches = [model.new_cache() for _ in self._groups]

    def __call__(self, model: nn.Module, tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
        """As `titan_train.generation.decode` calls it: ``tokens [B, T]`` have the newest ones in their places."""
        del model, lengths
        found: list[Tensor] = []
        for number, (length, rows) in enumerate(self._groups):
            given = tokens[rows.to(tokens.device), : length + step]
            if step and length + step - 1 in self._limits:
                self._caches[number] = self._model.new_cache()
            elif step:
                given = given[:, -1:]
            found.append(self._model.next_logits(given, self._caches[number])[:, -1])
        order = torch.cat([rows for _, rows in self._groups]).argsort()
        return torch.cat(found)[order.to(tokens.device)]
