"""A published model's ``config.json`` against the arguments of the model that its weights go into.

Names and shapes of weights say little about what a model computes with them: a rotary base, an epsilon, a routing rule or
a tie that differs gives other logits from the same tensors, and no error. So each family translates the file into its own
arguments (``models/<family>/hf.py``): every field is read, refused or known not to change the logits, and what it yields
is compared with the model's arguments, setting by setting.

Both spellings of rotary settings are read: ``rope_theta`` beside ``rope_scaling``, and ``rope_parameters``.
"""

from collections.abc import Mapping
from typing import Any

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

    def rope(self, *kinds: str, default_theta: float = 10_000.0) -> dict[str, Any]:
        """The rotary settings, as ``rope_parameters`` has them; ``rope_type`` is one of ``kinds``."""
        settings: dict[str, Any] = dict(self.take("rope_parameters", default={}))
        settings |= self.take("rope_scaling", default={})
        settings["rope_theta"] = float(self.take("rope_theta", default=settings.get("rope_theta", default_theta)))
        settings["rope_type"] = settings.pop("type", settings.get("rope_type")) or "default"
        settings.setdefault("original_max_position_embeddings", self._config.get("max_position_embeddings"))
        if settings["rope_type"] not in kinds:
            self.problem(
                f"rope_type={settings['rope_type']!r}, but this model can only do {' or '.join(map(repr, kinds))}"
            )
        share = settings.pop("partial_rotary_factor", self.take("partial_rotary_factor", default=1.0))
        if share != 1.0:
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
