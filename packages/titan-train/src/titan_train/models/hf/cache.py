"""Generation with transformers' own cache: keys and values of windows, sinks and own attention, states and convolutions.

`titan_train.generation.cache` keeps keys and values of plain causal attention. A family that has more than that keeps what
its own code needs, each layer its sort, in the cache that transformers makes for the configuration. So within `own_code` the
model computes by transformers' code alone: its attention and masks, and the layers' own forwards, which read and write that
cache. What is generated is what transformers' ``generate`` gives.

Where no layer has keys, transformers does not know how many tokens a cache has seen. It is counted here.
"""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from titan_train.models.hf.attention import MASKED, NAME
from titan_train.models.hf.plan import HFPlan
from titan_train.models.hf.state import has_state
from titan_train.models.traits import traits_of

NAMES = ("cache", "past_key_values", "cache_params")
"""What families call the argument for their cache: all "cache" since transformers 5.24."""


class CountedCache(DynamicCache):
    """transformers' cache of a model, and the tokens that it has seen."""

    def __init__(self, config: Any) -> None:
        """Of the configuration of a model; empty."""
        super().__init__(config=config)
        self.seen = 0
        self.counts = not any(isinstance(layer, CacheLayerMixin) for layer in self.layers)
        """Whether none of its layers knows the number of tokens."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those of the coming forward."""
        return self.seen if self.counts else super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a mask is for, and the first of them."""
        return (self.seen + query_length, 0) if self.counts else super().get_mask_sizes(query_length, layer_idx)


def new_cache(model: Any) -> CountedCache | None:
    """An empty cache for transformers' own forward of a model; None where that forward takes none, or not here.

    A model whose parameters are sharded computes by the code that shards it. A few families have a cache of another kind.
    """
    taken = inspect.signature(_own_forward(model)).parameters
    takes_one = any(name in taken for name in NAMES) and model._supports_default_dynamic_cache()
    if not takes_one or _is_cut(model):
        return None
    return CountedCache(model.config)


def _is_cut(model: Any) -> bool:
    """Whether this process has only parts of the parameters: sharded, or some rows of the head (tensor parallelism)."""
    plan: HFPlan | None = traits_of(model).plan
    head = None if plan is None else getattr(model.get_submodule(plan.head), "weight", None)
    rows = model.config.get_text_config().vocab_size
    return (head is not None and head.shape[0] != rows) or any(isinstance(p, DTensor) for p in model.parameters())


def keeps_states(config: Any) -> bool:
    """Whether some layer of such a model keeps a state, or the last tokens of a convolution."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in CountedCache(config).layers)


def forward_with(model: Any, tokens: Tensor, cache: CountedCache) -> Tensor:
    """Logits after the last of some new tokens.

    Args:
        model: Within `own_code`.
        tokens: ``[B, S]``: those of a prompt at first, then one.
        cache: Of these rows; it takes the tokens in.

    Returns:
        ``[B, 1, V]``.
    """
    forward = _own_forward(model)
    taken = inspect.signature(forward).parameters
    places = torch.arange(cache.seen, cache.seen + tokens.shape[1], device=tokens.device)
    offered: dict[str, Any] = {
        **dict.fromkeys(NAMES, cache), "position_ids": places.expand(tokens.shape[0], -1), "logits_to_keep": 1
    }  # fmt: skip
    keywords = {name: value for name, value in offered.items() if name in taken}
    logits: Tensor = forward(model, input_ids=tokens, use_cache=True, **keywords).logits
    cache.seen += tokens.shape[1]
    return logits[:, -1:]


@contextmanager
def own_code(model: nn.Module) -> Generator[None]:
    """Inside, a model of transformers computes by transformers' code, wherever it was given functions from here."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): cast("Any", config) for config in found if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    own = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    taken_over = [module for module in model.modules() if "forward" in vars(module) and has_state(module)]
    forwards = [vars(module).pop("forward") for module in taken_over]
    try:
        for config in configs.values():
            if config._attn_implementation in (MASKED, NAME):
                config._attn_implementation = own
        yield
    finally:
        for module, forward in zip(taken_over, forwards, strict=True):
            vars(module)["forward"] = forward
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _own_forward(model: Any) -> Any:
    """The forward of transformers' class, below those of the classes here."""
    kinds = cast("tuple[Any, ...]", type(model).__mro__)
    return next(
        kind.forward for kind in kinds if "forward" in vars(kind) and kind.__module__.startswith("transformers.")
    )
