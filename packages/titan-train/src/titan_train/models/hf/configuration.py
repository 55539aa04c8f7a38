"""The configuration of transformers from a folder's ``config.json`` and ``model.args``, and what a run asks of it."""

import copy
import importlib.metadata
from collections.abc import Iterator
from typing import Any, cast

from titan_train.models.hf.folder import folder_of, of_text, read_published, with_changes
from titan_train.models.hf.plans import hf_plans
from titan_train.trust import refuse_foreign_code
from titan_train.values import did_you_mean

_BALANCE = ("output_router_logits", "router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha", "moe_loss_weight")
"""What families call the loss that spreads tokens over experts: whether it is computed, and its coefficient."""
_NO_BALANCE = (
    "a model of transformers trains here without a loss that spreads tokens over its experts. The families of titan-train have "
    "one (model.args.balance_loss of Qwen3-MoE, Qwen3-Next and DeepSeek)"
)


def read_configuration(name: str, args: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration of transformers, and the content of ``config.json`` that it comes from.

    Args:
        name: ``"hf:DIR"``.
        args: Changes to the file, as in ``model.args``.

    Raises:
        ValueError: The installed transformers does not know the family or does not take the values, or a change has no effect.
    """
    published = read_published(name)
    args = of_text(published, args)
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as err:
        raise ValueError(
            f"model.name={name!r} needs the transformers library. Install titan-train[hf], or use a shipped model."
        ) from err
    version = importlib.metadata.version("transformers")
    if int(version.partition(".")[0]) < 5:
        raise ValueError(
            f"model.name={name!r} needs transformers 5 or newer, and {version} is installed: its attention and experts look "
            "different. Update transformers."
        )
    kind = str(published.get("model_type"))
    if kind not in CONFIG_MAPPING:
        own = (
            " Its code is in the folder (auto_map), and code of a folder is never executed."
            if "auto_map" in published
            else ""
        )
        raise ValueError(
            f"model.name={name!r}: the installed transformers has no model_type {kind!r}.{own} "
            f"{did_you_mean(kind, list(hf_plans()))}Use a folder whose architecture is part of transformers."
        )
    for key, asked in args.items():
        if asked and key.rpartition(".")[2] in _BALANCE:
            raise ValueError(f"model.args.{key}={asked!r}: {_NO_BALANCE}. Leave it out, or train one of those.")
    published.pop("quantization_config", None)  # weights are read into full precision
    refuse_foreign_code(published, f"model.name={name!r}: config.json", of_folder=False)
    cls: Any = CONFIG_MAPPING[kind]
    known = _read_as(name, cls, copy.deepcopy(published)).to_dict()  # reading fills objects in place
    changed = with_changes(published, args, known=known)
    refuse_foreign_code(changed, "model.args", of_folder=False)
    config = _read_as(name, cls, changed)
    _refuse_idle(name, cls, published, args, known, config.to_dict())
    config.use_cache = False
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    return config, changed


def balance_ignored(name: str) -> list[str]:
    """A line for the log if the ``config.json`` of ``"hf:DIR"`` asks for a loss of routing, which has no effect."""
    published = read_published(name)
    parts = (published, published.get("text_config"))
    if not any(isinstance(part, dict) and cast("dict[str, Any]", part).get("output_router_logits") for part in parts):
        return []
    return [f"output_router_logits=true in config.json of {name} has no effect: {_NO_BALANCE}"]


def _refuse_idle(
    name: str, cls: Any, published: dict[str, Any], args: dict[str, Any], known: dict[str, Any], got: dict[str, Any]
) -> None:
    """Refuse a change without which the configuration is the same: another field of the file decides."""
    for key, asked in args.items():
        value = list(asked) if isinstance(asked, tuple) else asked
        was = _lookup(known, key, default=_lookup(published, key))
        if value in (was, _lookup(got, key)):
            continue
        rest = with_changes(published, {other: args[other] for other in args if other != key}, known=known)
        try:
            idle = cls.from_dict(rest).to_dict() == got
        except Exception:  # without it, transformers takes none of this
            idle = False
        if idle:
            raise ValueError(
                f"model.args.{key}={value!r} changes nothing: transformers takes it from another field of {name!r}, "
                f"and it is still {was!r}. Change the field that decides. config.json has {', '.join(sorted(published))}."
            )


def _lookup(fields: Any, key: str, default: Any = None) -> Any:
    """The value of a field; a dot leads into an object."""
    for part in key.split("."):
        if not isinstance(fields, dict) or part not in fields:
            return default
        fields = cast("dict[str, Any]", fields)[part]
    return fields


def _read_as(name: str, cls: Any, fields: dict[str, Any]) -> Any:
    """The configuration of transformers with these fields, which it checks in ways and errors of its own."""
    try:
        return cls.from_dict(fields)
    except Exception as err:
        reason = " ".join(str(err).split())[:300]
        raise ValueError(
            f"model.name={name!r}: {cls.__name__} does not take config.json and model.args: {reason}"
        ) from err


def check_configuration(name: str, config: Any, vocab_size: int | None, seq_len: int) -> None:
    """Whether a model with this configuration of transformers can be given the run's tokens.

    Args:
        name: ``"hf:DIR"``.
        config: Of transformers.
        vocab_size: The tokenizer's.
        seq_len: Tokens of a row.

    Raises:
        ValueError: A token would have no embedding, or rows have positions that the model does not have or rotates otherwise.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and rows is not None and rows < vocab_size:
        raise ValueError(
            f"model.name={name!r} has a vocabulary of {rows}, less than the tokenizer's {vocab_size}: some tokens would have "
            f"no embedding. Use the folder's tokenizer, or extend the vocabulary with model.args.vocab_size={vocab_size}."
        )
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and 0 < longest < seq_len:
        raise ValueError(
            f"model.seq_len={seq_len} is longer than the {longest} positions of {folder_of(name)}: the nearest valid choice is "
            f"{longest}. To extend it, set model.args.max_position_embeddings={seq_len}, and a larger rotary base or a scaling."
        )
    short = min(short_ropes(config), default=seq_len)
    if short < seq_len:
        raise ValueError(
            f"model.seq_len={seq_len} is longer than the {short} positions of the short factors of {folder_of(name)} "
            "(rope_type longrope, original_max_position_embeddings): transformers chooses factors by the largest position of a "
            "call, so documents of one row, and ranks that share a row, would change each other's rotation. Set model.seq_len to "
            f"at most {short}, or use a folder with another scaling (yarn, llama3)."
        )


def short_ropes(config: Any) -> Iterator[int]:
    """Positions up to which rotations of LongRoPE have their short factors: one number, or one for each sort of layer."""
    ropes: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            yield int(cast("dict[str, Any]", rope)["original_max_position_embeddings"])
