"""A model of transformers as a `Family` of its own, so that import and export treat it as any other."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt import KeyMap

from titan_train.models.common.hf import HuggingFace, rope_fields
from titan_train.models.common.tensor_styles import StyleTable
from titan_train.models.family import Family, class_path
from titan_train.models.hf.folder import with_floats
from titan_train.models.hf.shape import shape_of_published
from titan_train.models.shape import ModelShape

_NOT_COMPARED = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "quantization_config", "id2label", "label2id",
        "output_router_logits", "router_aux_loss_coef", "return_dict", "output_hidden_states",
        "output_attentions", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder",
        "num_nextn_predict_layers",
    }
)  # fmt: skip
_DRAWN = ("dropout", "dropout_prob", "pdrop", "layerdrop", "jitter_noise")
"""Ends of names of fields by which only training draws numbers."""


@dataclass(frozen=True)
class HFModelArgs:
    """What describes a model of transformers."""

    vocab_size: int
    published: Mapping[str, Any]
    """The content of ``config.json``."""
    kind: type[Any]
    """transformers' class of configuration."""
    ahead: int = 0
    """Modules that predict one token further ahead each."""

    @property
    def tied_embeddings(self) -> bool:
        """The head is the embedding's matrix: config.json asks for it, and the class can (that of bigbird_pegasus cannot)."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        asked = getattr(self.kind.from_dict(dict(self.published)), "tie_word_embeddings", False)
        return bool(asked and getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(self.kind, None), "_tied_weights_keys", True))

    def shape(self, name: str) -> ModelShape:
        """What `Family.shape` returns."""
        return shape_of_published(name, self.published, mtp=self.ahead)

    @classmethod
    def of(cls, published: Mapping[str, Any], kind: type[Any], ahead: int = 0) -> "HFModelArgs":
        """The arguments that a ``config.json`` means.

        Raises:
            ValueError: It is of another family.
        """
        published = with_floats(dict(published))
        if published.get("model_type") != kind.model_type:
            raise ValueError(
                f"config.json has model_type={published.get('model_type')!r}, but the model is a {kind.model_type!r}. Name "
                "the same folder in both."
            )
        return cls(kind.from_dict(dict(published)).get_text_config().vocab_size, published, kind, ahead)


@dataclass(frozen=True, kw_only=True)
class HFFamily(Family):
    """The family of one model, made from the model itself."""

    format: HuggingFace

    def settings(self, args: HFModelArgs) -> dict[str, Any]:
        """The fields that decide the logits, with every default filled in."""
        return self.format.settings_of(args)

    def load_hf(self) -> HuggingFace:
        """Its format: names come from the model, everything else from ``config.json``."""
        return self.format


def family_of_model(model: Any, key_map: KeyMap, styles: StyleTable) -> HFFamily:
    """The family of ``model``, which `titan_train.models.hf.build` built."""
    kind = type(model.config)
    found = HuggingFace(
        key_map=key_map,
        config_of=_config_of,
        args_from=lambda published: HFModelArgs.of(published, kind),
        settings_of=_settings_of,
    )
    return HFFamily(
        name=kind.model_type,
        args=HFModelArgs,
        configs={},
        model=class_path(type(model)),
        tensor_styles=styles,
        format=found,
    )


def _config_of(args: HFModelArgs) -> dict[str, Any]:
    """``config.json``, with the spellings of transformers 4 beside those of 5, and without Python files of its folder."""
    config = copy.deepcopy(dict(args.published))
    config.pop("auto_map", None)
    read = args.kind.from_dict(copy.deepcopy(config)) if config.get("rope_parameters") else None
    rope = getattr(read, "rope_parameters", None)  # of several spellings, the one that the model has
    if isinstance(rope, dict) and "rope_theta" in rope:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        config |= rope_fields(rope["rope_theta"], None if scaling.get("rope_type") == "default" else scaling)
        config["rope_parameters"].update(rope)  # also other settings, such as the share of channels that is rotated
        if "partial_rotary_factor" in rope:
            share = "rotary_pct" if config["model_type"] == "gpt_neox" else "partial_rotary_factor"
            config.setdefault(share, rope["partial_rotary_factor"])
    if "num_experts" in config or config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        count = config.get("num_experts", config.get("num_local_experts"))
        config |= {"num_experts": count, "num_local_experts": count}
    if args.ahead or "num_nextn_predict_layers" in config:  # a folder's own may be left out
        config["num_nextn_predict_layers"] = args.ahead
    return config


def _settings_of(args: HFModelArgs) -> dict[str, Any]:
    """What decides the logits, with every default filled in; None for what only training draws by."""
    filled = args.kind.from_dict(dict(args.published)).to_dict()
    chooses = filled["model_type"] == "phimoe"  # its jitter also decides which experts are near enough to the best
    drawn = {name for name in filled if name.endswith(_DRAWN) and not (chooses and name == "router_jitter_noise")}
    return {name: None if name in drawn else value for name, value in filled.items() if name not in _NOT_COMPARED}
