"""What a decoder of transformers is given so that it looks like a model here.

The module stays transformers' own, with its names, its weights' initial values and its code. Only its class gets another
``forward``: tokens, positions and documents in, logits out. `HFDecoder` is for families with a plan, `UnplannedDecoder` for
all others.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from titan_train.models.common.attention import CausalAttention, document_positions, row_positions
from titan_train.models.common.loss import LogitsChange
from titan_train.models.common.mtp import MTPModules
from titan_train.models.common.packed import packed_boundaries
from titan_train.models.common.tensor_styles import Style, StyleTable
from titan_train.models.hf.ahead import LayerCall, styles_with_modules
from titan_train.models.hf.attention import CONTEXT, WindowedContext, window_mask
from titan_train.models.hf.configuration import short_ropes
from titan_train.models.hf.family import HFFamily, HFModelArgs, family_of_model
from titan_train.models.hf.lora import fill_adapter
from titan_train.models.hf.names import key_map_of
from titan_train.models.hf.plan import HFPlan, without_dense_region
from titan_train.models.hf.stage_layers import Gone, StageLayers
from titan_train.models.hf.state import StateRows, has_state, packed_rows
from titan_train.models.traits import traits_of

_LOGITS_CHANGED: Mapping[str, Callable[[float], LogitsChange]] = {
    "final_logit_softcapping": lambda cap: LogitsChange(cap=cap),
    "logit_scale": lambda scale: LogitsChange(scale=scale),
    "logits_scaling": lambda by: LogitsChange(scale=1 / by),
}
"""Fields of ``config.json`` by which a family changes each logit after the head. `probe` compares what they say."""


class HFModel(nn.Module):
    """What every model of this kind has, besides what its own class has."""

    config: Any
    published: dict[str, Any]
    """The content of ``config.json``, with the changes of ``model.args``."""

    lora: Any = None
    """peft's configuration of the adapters, where there are any."""

    def repeated_layers(self) -> list[nn.Module]:
        """The decoder's layers."""
        plan: HFPlan | None = traits_of(self).plan
        if plan is not None:
            return list(self.get_submodule(plan.layers).children())
        lists = [module for module in self.modules() if isinstance(module, nn.ModuleList)]
        return list(max(lists, key=lambda found: sum(p.numel() for p in found.parameters())).children())

    def init_parameter(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> bool:
        """Fill what transformers' own methods would fill wrongly; False for what they fill."""
        return self.lora is not None and fill_adapter(fqn, tensor, generator)

    @property
    def max_seq_len(self) -> int | None:
        """See `titan_train.models.traits`."""
        return learned_positions(self)

    @property
    def rope_limits(self) -> tuple[int, ...]:
        """See `titan_train.models.traits`."""
        return tuple(sorted(set(short_ropes(self.config))))

    def new_cache(self) -> Any:
        """An empty cache of transformers' for rows of one length; None where generation goes without, or with its own."""
        from titan_train.models.hf.cache import new_cache

        return new_cache(self) if self.needs_own_cache else None

    @property
    def needs_own_cache(self) -> bool:
        """Whether generation keeps transformers' cache rather than the keys and values of plain attention."""
        return False

    def own_code(self) -> AbstractContextManager[None]:
        """See `titan_train.models.hf.cache`."""
        from titan_train.models.hf.cache import own_code

        return own_code(self)

    def next_logits(self, tokens: Tensor, cache: Any) -> Tensor:
        """See `titan_train.models.hf.cache.forward_with`."""
        from titan_train.models.hf.cache import forward_with

        return forward_with(self, tokens, cache)

    @property
    def args(self) -> HFModelArgs:
        """What describes the model."""
        return HFModelArgs.of(self.published, type(self.config), len(getattr(self, "mtp", None) or ()))

    @property
    def own_family(self) -> HFFamily:
        """Its tensor-parallel styles, and its names and description in files."""
        key_map = key_map_of(self, self.published["model_type"], traits_of(self).plan)
        return family_of_model(self, key_map, getattr(self, "tensor_styles", {}))

    def _document_masks(self, positions: Tensor) -> Any:
        """The masks that transformers makes for rows of documents with such positions, one for each sort of layer."""
        from transformers.masking_utils import create_masks_for_generate

        shaped = positions.new_empty((*positions.shape, 0), dtype=torch.float32)  # stands for the embeddings
        return create_masks_for_generate(self.config, shaped, None, None, position_ids=positions)


class UnplannedDecoder(HFModel):
    """A model whose family has no plan: transformers computes masks and attention from positions."""

    takes_positions = True
    """Whether its own forward does."""
    takes_masks = False
    """Whether it is given masks of the documents, as its own code makes none from positions. See `probe`."""

    @property
    def needs_own_cache(self) -> bool:
        """Where layers keep a state: every token of the row would be computed again for the next one."""
        from titan_train.models.hf.cache import keeps_states

        return keeps_states(self.config)

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Logits of every next token; arguments as `titan_train.models.common.decoder.Decoder.forward`."""
        if positions is None and cu_seqlens is not None:
            positions = document_positions(cu_seqlens, tokens.shape[1])
        keywords: dict[str, Any] = {"position_ids": positions} if self.takes_positions else {}
        if self.takes_masks and cu_seqlens is not None:
            keywords["attention_mask"] = self._document_masks(document_positions(cu_seqlens, tokens.shape[1]))
        own = cast("Any", super())
        return own.forward(input_ids=tokens, **keywords, use_cache=False).logits


class HFDecoder(HFModel):
    """A model whose family has a plan."""

    plan: HFPlan
    windows: tuple[int, ...]
    """Sliding windows of its layers."""
    has_state = False
    """Whether some of its layers carry a state from token to token."""
    has_sinks = False
    """Whether heads have sinks."""
    holds_embedding = True
    holds_head = True
    mtp: MTPModules | None
    """Modules that predict tokens further ahead, which `titan_train.models.hf.ahead` adds."""
    mtp_embeddings: nn.Module | None
    changes_logits = False
    """Whether it does more to its logits than its head and `logits_change`, which `probe` finds out."""

    @property
    def streams(self) -> int:
        """See `titan_train.models.traits`."""
        return int(getattr(self.config, self.plan.streams)) if self.plan.streams else 1

    @property
    def stages_read_tokens(self) -> bool:
        """See `titan_train.models.traits`."""
        return bool(self.plan.token_ids)

    @property
    def pipeline_layers(self) -> str:
        """The list of layers that a pipeline cuts."""
        return self.plan.layers

    @property
    def tensor_styles(self) -> StyleTable:
        """How its modules take part in tensor parallelism: feed-forwards are regions where they are dense."""
        whole: dict[str, Style] = {}
        table = dict(without_dense_region(self.plan).styles)
        for name, layer in self.get_submodule(self.plan.layers).named_children():
            for key, module in layer.named_children():
                fqn = f"{self.plan.layers}.{name}.{key}"
                if has_state(module):
                    whole |= {fqn: "whole", f"{fqn}.**": "replicated"}
                elif key == self.plan.feed_forward and getattr(module, "experts", None) is None:
                    table[fqn] = "region"
        if self.mtp is not None:
            return styles_with_modules(whole | table, self.mtp, self.plan)
        return whole | table

    @property
    def token_wise(self) -> tuple[str, ...]:
        """Its dense feed-forwards, which map each token by itself."""
        regions = [name for name, style in self.tensor_styles.items() if style == "region" and "*" not in name]
        named = [name for name in regions if name.endswith(f".{self.plan.feed_forward}")]
        return tuple(name for name in named if not _mixes_tokens(self.get_submodule(name)))

    @property
    def supports_kv_cache(self) -> bool:
        """Generation's cache of keys and values sees all earlier positions and nothing else, so windows, states and sinks take
        transformers' instead.
        """
        return not (self.windows or self.has_state or self.has_sinks or self.plan.own_attention)

    @property
    def needs_own_cache(self) -> bool:
        """What the keys and values of plain attention are not enough for."""
        return not self.supports_kv_cache

    @property
    def loss_head(self) -> str | None:
        """See `titan_train.models.common.decoder.Decoder`; None where the family changes its logits in ways not known here."""
        return None if self.changes_logits or not self.holds_head else self.plan.head

    @property
    def logits_change(self) -> LogitsChange | None:
        """See `titan_train.models.traits`."""
        values = ((change, getattr(self.config, name, None)) for name, change in _LOGITS_CHANGED.items())
        found = [change(value) for change, value in values if isinstance(value, int | float) and value not in (0, 1)]
        return found[0] if len(found) == 1 else None  # of several, none: `probe` finds that logits are changed

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_plan: Any = None,
        token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        ahead_tokens: Tensor | None = None,
        ahead_labels: Tensor | None = None,
    ) -> Tensor:
        """Logits of every next token, or their loss; arguments and result as those of `Decoder.forward` in ``common``.

        A pipeline stage after the first is given hidden states, ``[B, S, d]`` or ``[B, S, streams, d]``; and ``token_ids``
        ``[B, S]``, where its layers read them.
        """
        length = tokens.shape[1] if positions is None else positions.shape[1]
        if positions is None:
            positions = row_positions(length, cu_seqlens, tokens.device)
        narrow = () if attention_plan is not None else (w for w in self.windows if w < length)
        make = functools.partial(window_mask, cu_seqlens, length, device=tokens.device)
        now = torch.compiler.is_compiling() or any(map(_is_compiled, self.repeated_layers()))
        context = WindowedContext(
            positions=positions,
            cu_seqlens=cu_seqlens,
            boundaries=None if cu_seqlens is None else packed_boundaries(cu_seqlens, length),
            attention_plan=attention_plan,
            state=self._state_rows(cu_seqlens, attention_plan),
            windows={w: make(w) if now else functools.cache(functools.partial(make, w)) for w in narrow},
        )
        given = {"input_ids": tokens}
        if not self.holds_embedding:  # transformers makes streams of one, which the first layer does not get
            given = {"inputs_embeds": tokens if tokens.ndim == 3 else tokens.new_zeros((*tokens.shape[:2], 1))}
        keywords: dict[str, Any] = {"position_ids": positions, "use_cache": False, CONTEXT: context}
        if self.plan.own_attention:  # its own would be as long as the hidden states that this rank holds
            keywords["attention_mask"] = self._document_masks(positions.expand(len(tokens), -1))
        layers = self.get_submodule(self.plan.layers)
        if not isinstance(layers, StageLayers):
            return self._outcome(labels, **given, **keywords)
        if self.mtp is not None:
            layers.calls = []
        states = None if self.holds_embedding else tokens
        further = {self.plan.token_ids: token_ids} if self.plan.token_ids and not self.holds_embedding else None
        with layers.between(states, taken=not self.holds_head, further=further) as taken:
            if labels is None or self.mtp is None or ahead_tokens is None or ahead_labels is None or not self.training:
                found = self._outcome(labels, **given, **keywords)
            else:
                found = self._with_ahead(labels, ahead_tokens, ahead_labels, **given, **keywords)
        if self.training:
            layers.calls = None  # what a layer was called with may hold on to activations
        return found if self.holds_head else taken[0]

    def _with_ahead(self, labels: Tensor, ahead_tokens: Tensor, ahead_labels: Tensor, **given: Any) -> Tensor:
        """The loss of labels, with the gradient of the modules' losses too."""
        assert self.mtp is not None
        assert self.mtp_embeddings is not None
        head = self.get_submodule(self.plan.head)
        hidden = self._body(**given).last_hidden_state
        context = self.ahead_context()
        return head(hidden, labels) + self.mtp.loss(
            hidden, ahead_tokens, ahead_labels, context, self.mtp_embeddings, head
        )

    def ahead_context(self, positions: Tensor | None = None) -> LayerCall:
        """What the modules' blocks take: what the last layer was called with in the forward before."""
        calls = cast("StageLayers", self.get_submodule(self.plan.layers)).calls
        assert calls
        return LayerCall(*calls[0])

    @property
    def fsdp_units(self) -> tuple[str, ...]:
        """The head is a unit of its own where it runs several times, unless it is part of another matrix."""
        if self.mtp is None or self.mtp_embeddings is None:
            return ()
        tied = self.get_submodule(self.plan.head).weight is self.mtp_embeddings.weight
        return () if tied else (self.plan.head,)

    def _state_rows(self, cu_seqlens: Tensor | None, attention_plan: Any) -> StateRows | None:
        if not self.has_state or (attention_plan is None and cu_seqlens is None):
            return None
        if attention_plan is not None:
            return StateRows(attention_plan.plan, attention_plan.group)
        return packed_rows(cast("Tensor", cu_seqlens))

    def _outcome(self, labels: Tensor | None, **given: Any) -> Tensor:
        if self.holds_head and labels is not None:
            return self.get_submodule(self.plan.head)(self._body(**given).last_hidden_state, labels)
        if self.holds_head:
            return cast("Any", super()).forward(**given).logits
        return self._body(**given).last_hidden_state

    @property
    def _body(self) -> nn.Module:
        """Everything but the head."""
        return self.get_submodule(self.plan.layers.rpartition(".")[0])

    def take_stage(self, layers: range, *, first: bool, last: bool) -> "HFDecoder":
        """A copy of what one pipeline stage holds; parameter names stay as they are, other parts do nothing.

        What has parameters and is neither a layer nor what follows the last one belongs to the first stage.
        """
        plan = self.plan
        after = (
            {plan.norm, plan.head}
            | ({plan.merge} if plan.merge else set())
            | ({"mtp", "mtp_embeddings"} if self.mtp is not None else set())
        )
        gone = [] if first else list(_apart_from(self, "", after | {plan.layers}))
        # what has no parameters is everywhere: nanochat's last norm also comes before its layers
        gone += (
            [] if last else [part for part in map(self.get_submodule, after) if any(True for _ in part.parameters())]
        )
        children = self.get_submodule(plan.layers)._modules
        gone += [layer for name, layer in children.items() if layer is not None and int(name) not in layers]
        stage = copy.deepcopy(self, {id(module): Gone() for module in gone})
        kept = StageLayers()
        for number in layers:
            kept.add_module(str(number), stage.get_submodule(f"{plan.layers}.{number}"))
        stage.set_submodule(plan.layers, kept)
        depth = len(children)
        changed: dict[str, Any] = {
            key: [value[number] for number in layers]
            for key, value in vars(stage.config).items()
            if isinstance(value, list) and len(cast("list[Any]", value)) == depth
        }
        changed["num_hidden_layers"] = len(layers)
        # of the modules that go through the layers; what is inside them keeps the numbers of the whole model
        own = copy.copy(stage.config)
        vars(own).update(changed)  # not by its setters: they compare the fields with each other
        stage.config = stage.get_submodule(plan.layers.rpartition(".")[0]).config = own
        stage.holds_embedding, stage.holds_head = first, last
        if not last:
            stage.mtp = stage.mtp_embeddings = None
        return stage


def learned_positions(model: Any) -> int | None:
    """Positions of a model of transformers that looks them up, in an embedding or a table; None for a rotary one."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    tokens = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not tokens and module.num_embeddings - longest in (0, 2):
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            return min(longest, module.num_embeddings - first)
        if isinstance(table := getattr(module, "embed_positions", None), Tensor) and len(table) == longest:
            return longest  # GPT-J
    return None


def _is_compiled(layer: nn.Module) -> bool:
    """Whether it runs in graphs of torch.compile, whose inputs are tensors; see `titan_train.parallel.compiled`."""
    return layer._compiled_call_impl is not None or hasattr(layer.forward, "compiled_by")


def _mixes_tokens(module: nn.Module) -> bool:
    """Whether a module is attention or carries a state: in some families they have the name of a feed-forward."""
    return has_state(module) or any(isinstance(inner, CausalAttention) for inner in module.modules())


def _apart_from(module: nn.Module, path: str, names: set[str]) -> Iterator[nn.Module]:
    """The largest modules with parameters that hold none of ``names``."""
    for key, child in module.named_children():
        inner = f"{path}{key}"
        if any(name.startswith(f"{inner}.") for name in names):
            yield from _apart_from(child, f"{inner}.", names)
        elif inner not in names and any(True for _ in child.parameters()):
            yield child


@functools.cache
def class_with(kind: type[nn.Module], forward_of: type[HFModel]) -> type[nn.Module]:
    """The class of transformers with the forward of one of the classes here; it keeps its name."""
    return type(kind.__name__, (forward_of, kind), {"__module__": kind.__module__})
