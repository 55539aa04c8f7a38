"""What parallelism must know about a family of transformers: a table of module patterns, and a few names.

A family without a plan trains under DDP, FSDP and HSDP, with checkpoints, float8, activation checkpointing and compilation.
Its plan adds tensor and sequence parallelism (`HFPlan.styles`), context parallelism (its attention is known to be causal,
perhaps within a window), pipeline parallelism (the names of its parts) and expert parallelism (`HFPlan.experts`). What a family
lacks of these is in `HFPlan.lacks`, with the reason. Layers with a state are found by their code (`titan_train.models.hf.state`),
and take part in tensor parallelism as ``whole``.

The words of the styles are those of `titan_train.models.common.tensor_styles`; each family's plan stands in
`titan_train.models.hf.plans`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from titan_train.models.common.tensor_styles import StyleTable

Count = Literal["query", "key_value", "ffn"]
Axis = Literal["tp", "sp", "cp", "pp", "ep"]
STACKED = "stacked"


@dataclass(frozen=True, kw_only=True)
class HFPlan:
    """One family of decoders. Names are those of transformers' modules."""

    styles: StyleTable
    """How modules take part in tensor parallelism."""
    layers: str = "model.layers"
    """The list of decoder layers."""
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    """The last norm."""
    merge: str = ""
    """What makes one stream of several before that norm, with parameters of its own."""
    head: str = "lm_head"
    attention: str = "self_attn"
    """The attention of a layer: calls transformers' registry of attention functions with all keywords it was given. Layers may
    do without."""
    drops_keywords: bool = False
    """The code of a layer does not hand its keywords on to its attention, so the context of the rows is brought there."""
    own_attention: bool = False
    """Attention and its masks are left to transformers: tokens see others than those of a window. Rules ``cp`` out."""
    masked_attention: bool = False
    """Such an attention calls transformers' registry with a mask of numbers that are added to scores, and with sinks."""
    counts: tuple[str, ...] = ()
    """What counts query heads, or groups of them, besides the attention's ``num_heads``: attributes of it or of its ``config``,
    which become a rank's own under tensor parallelism."""
    feed_forward: str = "mlp"
    """The feed-forward of a layer, a tensor-parallel region where it is dense."""
    experts: Mapping[str, str] | Literal["stacked"] = field(default_factory=dict[str, str])
    """Where layers have routed experts in ``FEED_FORWARD.experts``: the file's names of each expert's gate, down and up
    projection (``w1``, ``w2``, ``w3``), from the layer's name on; those of the stacks that the module has, where it has no gate;
    or `STACKED`, where files have the stacks too. Empty for a family without experts to spread."""
    fused: Mapping[str, Mapping[str, Count]] = field(default_factory=dict[str, Mapping[str, Count]])
    """Linears that a layer may have and that are several in one, to their parts in order and how wide each is."""
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """What files call a part of a tensor's name, where it differs from the module's; ``{i}`` is a layer's number."""
    resaved: Mapping[str, str] = field(default_factory=dict[str, str])
    """The same of files that transformers wrote, where those are not the names that the family is published with. Such files
    are read, and none is written."""
    streams: str = ""
    """The field of ``config.json`` that counts residual streams, where layers hand on ``[B, S, streams, d]``."""
    token_ids: str = ""
    """The keyword by which layers are given the ids of their tokens."""
    token_experts: str = ""
    """The buffer ``[V, K]`` of routers that look up a token's experts by its id. With drawn weights, ids take experts in turn."""
    convolution: Mapping[str, str] = field(default_factory=dict[str, str])
    """Parts of the convolution of a layer with a state, where files have them apart, to the attribute that says how wide each
    is."""
    lacks: Mapping[Axis, str] = field(default_factory=dict[Axis, str])
    """Parallelisms that this family cannot take part in, and why, for a message."""
    lacks_with: Mapping[str, Mapping[Axis, str]] = field(default_factory=dict[str, Mapping[Axis, str]])
    """The same of models in whose ``config.json`` a field is set."""
    shorter_than: tuple[str, ...] = ()
    """Fields of ``config.json`` that a row must be shorter than, because its attention changes there in a way that is not known
    here (chunks)."""

    def lacking(self, published: Mapping[str, Any]) -> Mapping[Axis, str]:
        """Parallelisms that the model of a ``config.json`` cannot take part in, and why."""
        with_fields = [more for name, more in self.lacks_with.items() if published.get(name)]
        return {axis: reason for found in (self.lacks, *with_fields) for axis, reason in found.items()}

    def is_table(self, name: str) -> bool:
        """Whether a buffer of this name is one of `token_experts`."""
        return bool(self.token_experts) and name.rpartition(".")[2] == self.token_experts


def without_dense_region(plan: HFPlan) -> HFPlan:
    """The plan whose feed-forwards are no regions by themselves: layers with experts are not."""
    region = f"{plan.layers}.*.{plan.feed_forward}"
    return replace(plan, styles={name: style for name, style in plan.styles.items() if name != region})
