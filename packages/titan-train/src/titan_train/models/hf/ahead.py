"""Modules that predict tokens further ahead for a decoder of transformers, as DeepSeek-V3 has them.

Each is built around one more layer of the model: a copy of its last one, with weights of its own. What such a layer is called
with (rotary angles, masks, the context of the rows) is not known here: it is what the last layer itself was called with in the
same forward. So a family needs no code for it. Norms are copies of the model's last one; embedding and head are its own.

What the copy must do is tried on a tiny model (`titan_train.models.hf.probe`).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from titan_train.models.common.attention import CausalAttention
from titan_train.models.common.mtp import MTPModule, MTPModules
from titan_train.models.common.tensor_styles import Style, StyleTable, with_mtp
from titan_train.models.hf.folder import DEPTH
from titan_train.models.hf.plan import HFPlan
from titan_train.models.hf.stage_layers import StageLayers
from titan_train.models.hf.state import has_state
from titan_train.models.traits import traits_of


class LayerCall:
    """What the last layer was called with, besides hidden states.

    Not a dataclass on purpose: FSDP2 and DistributedDataParallel rebuild dataclasses that they find in arguments.
    """

    def __init__(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Of a call with all its arguments."""
        self.args = tuple(args[1:])
        self.keywords = {name: value for name, value in keywords.items() if name != "hidden_states"}


class LayerModule(MTPModule):
    """A module around a layer of transformers; its context is a `LayerCall`."""

    def through_block(self, x: Tensor, context: Any) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        out = self.block(x, *context.args, **context.keywords)
        return out if isinstance(out, Tensor) else out[0]


def add_modules(model: Any, depth: int, name: str) -> None:
    """Give a model its modules, in place, on its device; weights of new layers are to be filled afterwards.

    Args:
        model: Built by `titan_train.models.hf.build`.
        depth: Tokens that it predicts besides the next one.
        name: ``model.name``, for messages.

    Raises:
        ValueError: The family has no plan, its last layer is none that can be had once more, or its head cannot be shared.
    """
    plan: HFPlan | None = traits_of(model).plan
    kind = model.published["model_type"]
    asked = f"model.args.{DEPTH}={depth} of {name!r}"
    if plan is None:
        raise ValueError(
            f"{asked}: the family {kind!r} of transformers has no plan, so where its layers, norm and head are is not known. Set "
            f"{DEPTH}=0, or add a plan (titan_train.models.hf.plans)."
        )
    layers = model.get_submodule(plan.layers)
    last = layers[len(layers) - 1]
    if any(has_state(module) for module in last.modules()):
        raise ValueError(
            f"{asked}: the last layer of this {kind} carries a state from token to token, and a module is one more such layer. "
            f"Set {DEPTH}=0, or end the model with a layer of attention."
        )
    attends = any(isinstance(module, CausalAttention) for module in last.modules())
    if not attends or plan.attention == plan.feed_forward:
        raise ValueError(
            f"{asked}: the last layer of this {kind} is not attention with a feed-forward, and a module is one more such layer. "
            f"Set {DEPTH}=0."
        )
    if model.loss_head is None or model.logits_change is not None:
        raise ValueError(
            f"{asked}: a {kind} changes its logits after the head, and the modules' losses are computed in the head, which they "
            f"share. Set {DEPTH}=0, or use a model whose config.json does not scale or cap logits."
        )
    shared = {id(model.config): model.config}
    norm, embedding = model.get_submodule(plan.norm), model.get_submodule(plan.embedding)
    dim = model.get_submodule(plan.head).in_features
    modules = [LayerModule(dim, lambda: copy.deepcopy(norm), copy.deepcopy(last, dict(shared))) for _ in range(depth)]
    if isinstance(layers, nn.ModuleList) and not isinstance(layers, StageLayers):
        seen = StageLayers()
        for number, layer in layers.named_children():
            seen.add_module(number, layer)
        model.set_submodule(plan.layers, seen)
    # the same matrix under a name of its own: the last pipeline stage has no other
    model.mtp_embeddings = copy.deepcopy(embedding, {id(embedding.weight): embedding.weight})
    model.mtp = MTPModules(modules)


def styles_with_modules(styles: StyleTable, modules: MTPModules, plan: HFPlan) -> StyleTable:
    """The table with the modules, whose blocks are cut as the layers are."""
    prefix = f"{plan.layers}.*."
    table: dict[str, Style] = {
        pattern.replace(prefix, "layers.*.", 1) if pattern.startswith(prefix) else pattern: style
        for pattern, style in styles.items()
    }
    found: dict[str, Style] = {name: style for name, style in with_mtp(table).items() if name.startswith("mtp")}
    for name, module in modules.named_modules():
        if name.endswith(f".block.{plan.feed_forward}") and getattr(module, "experts", None) is None:
            found[f"mtp.{name}"] = "region"
    return {**styles, **found}
