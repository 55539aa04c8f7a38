"""A family's checkpoints on Hugging Face: how tensors are named, and what ``config.json`` says.

Each family has one `HuggingFace` value in ``models/<family>/hf.py``; `Family.hf` names it. Import and export need nothing else.

Names and shapes of weights say little about what a model computes with them: a rotary base, an epsilon, a routing rule or a tie
that differs gives other logits from the same tensors, and no error. So each family translates the file into its own arguments by
`HFConfig`: every field is read, refused or known not to change the logits, and the result is compared with the model's
arguments, setting by setting.

Both spellings of rotary settings are read: ``rope_theta`` beside ``rope_scaling``, and ``rope_parameters``.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt import KeyMap, Pair

# What transformers writes for every model and what only training or generation reads.
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "aux_loss_alpha", "auto_map",
        "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "ep_size", "id2label", "initializer_range",
        "is_encoder_decoder", "label2id", "max_position_embeddings", "model_type", "num_nextn_predict_layers",
        "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
        "problem_type", "quantization_config", "return_dict", "router_aux_loss_coef", "seq_aux", "torch_dtype",
        "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """How models of a family are written to Hugging Face folders and read from them."""

    key_map: KeyMap | Callable[[Any], KeyMap]
    """Names of the tensors, and how their values differ; a function of the arguments where widths decide how tensors join."""
    config_of: Callable[[Any], dict[str, Any]]
    """From a model's arguments to the fields of ``config.json`` that describe the model.

    Raises ValueError where Hugging Face has no class that computes the same.
    """
    args_from: Callable[[Mapping[str, Any]], Any]
    """From ``config.json`` to the arguments; the reverse. Raises ValueError for a model that cannot be built here."""
    kinds: tuple[str, ...] = ()
    """Values of ``model_type`` (of diffusers, ``_class_name``) that `args_from` reads."""
    settings_of: Callable[[Any], dict[str, Any]] = dataclasses.asdict
    """The arguments that decide the logits, in one spelling."""

    def names(self, args: Any) -> KeyMap:
        """The key map of a model with these arguments."""
        names = self.key_map if isinstance(self.key_map, KeyMap) else self.key_map(args)
        return names_with_mtp(names, args) if hasattr(args, "mtp_depth") else names


def names_with_mtp(names: KeyMap, args: Any) -> KeyMap:
    """The key map with modules for tokens further ahead. A model without takes no notice of those of a folder."""
    if not args.mtp_depth:
        apart, further = names.family in MTP_APART, rf"model\.layers\.{args.num_layers}\..*"
        return names.ignoring(r"mtp\..*" if apart else further) if apart or names.family == "deepseek" else names
    head = "model.embed_tokens.weight" if args.tied_embeddings else "lm_head.weight"
    pairs: list[Pair] = []
    copies: list[tuple[str, str]] = []
    for k in range(args.mtp_depth):
        there = published_mtp(names.family, k, layers=args.num_layers, depth=args.mtp_depth)
        for pair in names.pairs:
            if pair.native.startswith("layers.{i}."):
                native = pair.native.replace("layers.{i}", f"mtp.{k}.block", 1)
                hf = pair.hf.replace("model.layers.{i}", there.block, 1)
                pairs.append(dataclasses.replace(pair, native=native, hf=hf))
        pairs += [Pair(f"mtp.{k}.{native}.weight", f"{hf}.weight") for native, hf in there.own.items()]
        copies += there.copies("model.embed_tokens.weight", head)
    return dataclasses.replace(names, pairs=(*pairs, *names.pairs), copies=tuple(copies))


@dataclass(frozen=True)
class PublishedMTP:
    """What files call one module that predicts a further token."""

    block: str
    """Its layer."""
    own: Mapping[str, str]
    """What it has beside the layer: a module's name here to the name in files."""
    layer: str | None
    """The further layer that also holds copies of embedding and head; None: files have none."""

    def copies(self, embedding: str, head: str) -> list[tuple[str, str]]:
        """Tensors that files have once more, each with the name of the other."""
        if self.layer is None:
            return []
        return [(f"{self.layer}.embed_tokens.weight", embedding), (f"{self.layer}.shared_head.head.weight", head)]


MTP_APART = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families that are published with one module, under names of its own."""


def published_mtp(family: str, number: int, *, layers: int, depth: int, prefix: str = "model.layers.") -> PublishedMTP:
    """The names of one module: a further layer, as DeepSeek-V3 and GLM-4.5 are published, or as Qwen3-Next is.

    Args:
        family: Or ``model_type``.
        number: From 0.
        layers: Of the model.
        depth: Modules of the model.
        prefix: Of a layer's number in files.

    Raises:
        ValueError: The family's files hold one module, and the model has more.
    """
    if family in MTP_APART and depth > 1:
        raise ValueError(
            f"model.args.mtp_depth={depth}: a folder of {family} holds one module that predicts a further token. Its weights can "
            "be read and written with mtp_depth=1; keep a deeper model as a checkpoint of its run."
        )
    if family in MTP_APART:
        own = {name: f"mtp.{hf}" for name, hf in _MTP_APART}
        return PublishedMTP(f"mtp.layers.{number}", own, None)
    layer = f"{prefix}{layers + number}"
    return PublishedMTP(layer, {name: f"{layer}.{hf}" for name, hf in _MTP}, layer)


def rope_fields(theta: float, scaling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The rotary settings in the spellings of transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``).

    transformers 4 reads a file with the second spelling alone as one with the default base, without a warning.

    Args:
        theta: Base of the frequencies.
        scaling: With its ``rope_type``; None for plain RoPE.
    """
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else dict(scaling),
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
    }


def refuse_export(reasons: Mapping[str, bool], *, architecture: str) -> None:
    """Refuse to describe a model that the architecture does not compute.

    Args:
        reasons: The setting, to whether it prevents the export.
        architecture: The class of transformers.

    Raises:
        ValueError: Names every setting that prevents it.
    """
    found = [reason for reason, prevents in reasons.items() if prevents]
    if found:
        raise ValueError(
            f"this model cannot be written for Hugging Face: {architecture} does not compute {', '.join(found)}. Train with "
            "settings that it has."
        )


class HFConfig:
    """Reads a ``config.json`` field by field and remembers what was read and what the model here cannot do."""

    def __init__(self, config: Mapping[str, Any], *, kinds: tuple[str, ...]) -> None:
        """Start with a file's content; ``kinds`` are the values of ``model_type`` that the family reads."""
        self._config = config
        self._read: set[str] = set()
        self._problems: list[str] = []
        self.kind: str = config.get("model_type") or kinds[0]
        if self.kind not in kinds:
            raise ValueError(
                f"config.json has model_type={self.kind!r}; this model takes weights of {' or '.join(map(repr, kinds))}. "
                "Build a model of the published family."
            )

    def take(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that is there and not null; it counts as read."""
        self._read.update(names)
        return next((self._config[name] for name in names if self._config.get(name) is not None), default)

    def need(self, *names: str) -> Any:
        """As `take`, but it must be there."""
        value = self.take(*names)
        if value is None:
            self._problems.append(f"{names[0]} is missing")
            return 0
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """The model here has no such setting: the file must have one of these values, the first if it has none."""
        value = self.take(name, default=allowed[0])
        if value not in allowed:
            self._problems.append(f"{name}={value!r}, but this model can only do {' or '.join(map(repr, allowed))}")

    def problem(self, text: str) -> None:
        """Note a value that the model here cannot do."""
        self._problems.append(text)

    def rope(self, *kinds: str, default_theta: float = 10_000.0, default_share: float | None = None) -> dict[str, Any]:
        """The rotary settings, as ``rope_parameters`` has them; ``rope_type`` is one of ``kinds``.

        ``default_share`` is for models that rotate part of a head: ``partial_rotary_factor`` where the file has none.
        """
        settings: dict[str, Any] = dict(self.take("rope_parameters", default={}))
        settings |= self.take("rope_scaling", default={})
        settings["rope_theta"] = float(self.take("rope_theta", default=settings.get("rope_theta", default_theta)))
        settings["rope_type"] = settings.pop("type", settings.get("rope_type")) or "default"
        settings.setdefault("original_max_position_embeddings", self._config.get("max_position_embeddings"))
        if settings["rope_type"] not in kinds:
            self.problem(
                f"rope_type={settings['rope_type']!r}, but this model can only do {' or '.join(map(repr, kinds))}"
            )
        given = self.take("partial_rotary_factor", default=default_share or 1.0)
        share = settings.setdefault("partial_rotary_factor", given)
        if share != 1.0 and default_share is None:
            self.problem(f"partial_rotary_factor={share}, but this model rotates all channels it can")
        return settings

    def finish(self) -> None:
        """Refuse what was noted, and every field with a value that nobody read.

        Raises:
            ValueError: Names them all.
        """
        unknown = [
            f"{name}={value!r} is not a field that this family reads"
            for name, value in self._config.items()
            if name not in self._read and name not in _WITHOUT_EFFECT and value not in (None, False, [], {})
        ]
        if self._problems or unknown:
            raise ValueError(
                "config.json describes a model that cannot be built here: "
                f"{'; '.join([*self._problems, *unknown])}. If a field does not change the logits, remove it from the file."
            )


def compare_settings(published: Mapping[str, Any], model: Mapping[str, Any], *, name: str) -> None:
    """Refuse weights whose ``config.json`` means other settings than the model's.

    Args:
        published: What the file means, by the model's own argument names.
        model: The model's.
        name: Of the model, for the message.

    Raises:
        ValueError: Names every argument that differs, with both values.
    """
    differing = {key: (published.get(key), model.get(key)) for key in {**published, **model}}
    lines = [f"{key}={ours!r} should be {theirs!r}" for key, (theirs, ours) in differing.items() if theirs != ours]
    if lines:
        raise ValueError(
            f"config.json describes another model than this {name}: {'; '.join(lines)}. The weights would give other logits. "
            "Build the model with the values of config.json, under [model.args]."
        )


def read_decoder(read: HFConfig) -> dict[str, Any]:
    """The arguments that Llama, Qwen3 and DeepSeek describe by the same fields."""
    read.only("attention_bias", False)
    read.only("hidden_act", "silu")
    return {
        "dim": read.need("hidden_size"),
        "num_layers": read.need("num_hidden_layers"),
        "num_heads": read.need("num_attention_heads"),
        "vocab_size": read.need("vocab_size"),
        "norm_eps": read.take("rms_norm_eps", default=1e-6),
        "tied_embeddings": read.take("tie_word_embeddings", default=False),
    }


def describe_decoder(args: Any) -> dict[str, Any]:
    """The reverse: those fields of ``config.json``."""
    return {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": args.tied_embeddings,
        **({"num_nextn_predict_layers": args.mtp_depth} if getattr(args, "mtp_depth", 0) else {}),
    }


# Names that Llama, Qwen3 and DeepSeek share.

IGNORED = (r".*rotary_emb\.inv_freq",)
"""Tables in old checkpoints that models here compute."""

NATIVE_ONLY = (r"(?:.*\.)?(?:freqs_cis|rope_cache)", r".*\.moe\.tokens_per_expert")
"""Rotary tables of Meta's code and torchtitan, and torchtitan's counter: with the other names they share, in no checkpoint."""

DECODER = (
    Pair("tok_embeddings.weight", "model.embed_tokens.weight"),
    Pair("norm.weight", "model.norm.weight"),
    Pair("lm_head.weight", "lm_head.weight"),
    Pair("output.weight", "lm_head.weight"),  # the head's name in Meta's code and torchtitan
    Pair("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    Pair("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
)

ATTENTION = tuple(
    Pair(f"layers.{{i}}.attention.w{x}.{kind}", f"model.layers.{{i}}.self_attn.{x}_proj.{kind}", rotary=x in "qk")
    for x in "qkvo"
    for kind in ("weight", "bias")
)

PROJECTIONS = (("w1", "gate"), ("w2", "down"), ("w3", "up"))
"""The projections of `SwiGLU`, and their names."""

DENSE = tuple(
    Pair(f"layers.{{i}}.feed_forward.{native}.weight", f"model.layers.{{i}}.mlp.{hf}_proj.weight")
    for native, hf in PROJECTIONS
)

_MTP = (("embedding_norm", "enorm"), ("hidden_norm", "hnorm"), ("proj", "eh_proj"), ("norm", "shared_head.norm"))
"""What a module for a token further ahead has beside its block."""

_MTP_APART = (
    ("embedding_norm", "pre_fc_norm_embedding"),
    ("hidden_norm", "pre_fc_norm_hidden"),
    ("proj", "fc"),
    ("norm", "norm"),
)
"""The same of Qwen3-Next."""

_EXPERTS = "model.layers.{i}.mlp.experts"

EXPERTS = (
    # stacked here: w1, w3 [E, F, D] and w2 [E, D, F]; there one tensor per expert, or gate and up in one
    *(Pair(f"layers.{{i}}.moe.experts.{w}", f"{_EXPERTS}.{{j}}.{x}_proj.weight") for w, x in PROJECTIONS),
    Pair("layers.{i}.moe.experts.w1", f"{_EXPERTS}.gate_up_proj", part=(0, 2, 1)),
    Pair("layers.{i}.moe.experts.w3", f"{_EXPERTS}.gate_up_proj", part=(1, 2, 1)),
    Pair("layers.{i}.moe.experts.w2", f"{_EXPERTS}.down_proj"),
    *(Pair(f"layers.{{i}}.moe.experts.{{j}}.{w}.weight", f"{_EXPERTS}.{{j}}.{x}_proj.weight") for w, x in PROJECTIONS),
    Pair("layers.{i}.moe.router.gate.weight", "model.layers.{i}.mlp.gate.weight"),
)
