"""What a model may tell the trainer: attributes or methods of its class or of the module. None is needed.

    class MyModel(nn.Module):
        loss_head = "lm_head"                  # `forward` takes labels, and hands them to this linear
        fsdp_units = ("vision",)

`traits_of(model).loss_head` reads one, with the default where the model does not have it. An attribute of another type than
the declared one is not a trait, and the default holds. The table in the guide on your own model is made from `Traits`.
"""

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from titan_fsdp import unwrap
from torch import Tensor, nn

from titan_train.models.common.loss import LogitsChange
from titan_train.models.parametrization import Parametrization


class Traits:
    """Every trait with its type and its default."""

    max_seq_len: int | None = None
    """The longest sequence, of a model with learned positions."""
    rope_limits: Sequence[int] = ()
    """Lengths above which all positions of a row are rotated otherwise (LongRoPE): generation computes its keys anew there."""
    supports_kv_cache: bool = False
    """Tokens meet only in `CausalAttention`, and `forward` takes `positions`: generation may keep keys and values."""
    loss_head: str | None = None
    """The linear to the vocabulary. `forward` takes `labels`, hands them to it as second argument and returns what comes back,
    so that the loss can be computed without whole logits."""
    logits_change: LogitsChange | None = None
    """What `forward` does to each of the head's logits, where it returns them; the loss without whole logits does it too."""
    token_wise: Sequence[str] = ()
    """Patterns of modules that map each token by itself: `activations.mlp_tiles` runs them a part of the sequence at a time."""
    windows: Sequence[int] = ()
    """Sliding windows of its attention, in tokens; context parallelism prepares a plan for each."""
    init_weights: Callable[[str, Tensor, torch.Generator], None] | None = None
    """`init_weights(fqn, tensor, generator)` fills one full parameter in place, and draws from the generator only."""
    init_parameter: Callable[[str, Tensor, torch.Generator], bool] | None = None
    """The same for some parameters, which it fills otherwise than their modules do: it returns False for the others. One that no
    module's method fills needs `init_weights` or a `reset_parameters`."""
    flops_per_token: Callable[[int], float] | None = None
    """`flops_per_token(seq_len)`, forward and backward, of a model or a block that knows better than 6 per parameter."""
    encoder_flops_per_token: Callable[[int], float] | None = None
    """`encoder_flops_per_token(seq_len)`: the part of `flops_per_token` that only the first pipeline stage computes."""
    fsdp_units: Sequence[str] = ()
    """Modules that FSDP gathers as one unit each, by name or pattern, besides the repeated blocks that it finds."""
    float8_skip: Sequence[str] | None = None
    """Patterns of linears that stay in high precision where `float8.skip` is empty; None skips what titan-fp8 skips."""
    norm_readers: Sequence[tuple[str, str]] = ()
    """Of a block's own class: each norm, and a module that reads it through `self.linears` alone; float8 casts in the norm."""
    head_counts: Sequence[tuple[Any, str]] = ()
    """Of a module with projections: (object, attribute) of what else counts heads, which tensor parallelism divides."""
    pipeline_layers: str | Sequence[str] = "layers"
    """Where the repeated blocks are, for pipeline parallelism: one container, or several in order; others than `layers` need
    `take_stage`."""
    first_stage_parts: Sequence[str] = ("tok_embeddings", "pos_embeddings")
    """Modules that only the first pipeline stage holds; they are None in the others."""
    last_stage_parts: Sequence[str] = ("norm", "lm_head")
    """Modules that only the last pipeline stage holds."""
    first_stage_layers: int = 1
    """Fewest blocks of the first pipeline stage: those that only it can feed."""
    streams: int = 1
    """Residual streams: several are sent between pipeline stages as hidden states `[B, S, streams, d]`."""
    stages_read_tokens: bool = False
    """Pipeline stages after the first take `token_ids` `[B, S]` by name."""
    take_stage: Callable[..., nn.Module] | None = None
    """`take_stage(layers, first=, last=)` returns a copy of what one pipeline stage holds, for a model that is cut in a way
    of its own."""
    holds_embedding: bool | None = None
    """Whether this stage takes tokens; None means that it does unless its `first_stage_parts` are None."""
    published: Mapping[str, Any] | None = None
    """Of a model of transformers: the content of its `config.json`. Set by titan-train, like the next three."""
    plan: Any = None
    """Of a model of transformers: its family's `titan_train.models.hf.plan.HFPlan`."""
    lora: Any = None
    """Of a model of transformers: peft's configuration of its adapters."""
    own_family: Any = None
    """Of a model of transformers: the `titan_train.models.family.Family` made from the model itself."""
    parametrization: Parametrization | None = None
    """How initial weights and learning rates scale with width and depth (muP); set by titan-train."""


def traits_of(model: nn.Module) -> Traits:
    """The traits of a model, of a pipeline stage or of a block, inside any wrappers; each is read when it is asked for."""
    return cast("Traits", _Reader(unwrap(model)))


class _Reader:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        default = getattr(Traits, name)
        value = getattr(self._module, name, None)
        return value if isinstance(value, _declared()[name]) else default


@functools.cache
def _declared() -> dict[str, tuple[type, ...]]:
    return {name: tuple(_kinds(hint)) for name, hint in typing.get_type_hints(Traits).items()}


def _kinds(hint: Any) -> list[type]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for inner in typing.get_args(hint) if inner is not type(None) for kind in _kinds(inner)]
    if origin is Sequence:  # a text is one too, but not a list of names
        return [list, tuple]
    return [object if hint is Any else origin or hint]
