"""``config.json`` of a Hugging Face folder: read it, and change it by ``model.args``. No torch, no transformers."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from titan_train.files import download_hint, local_path, read_text, refuse_link_out
from titan_train.values import did_you_mean

PREFIX = "hf:"
GENERATION = "generation_config.json"
"""The file of a folder that says how its model generates."""
DEPTH = "mtp_depth"
"""The setting of ``model.args`` that is none of ``config.json``."""
DROPOUTS = (
    "attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop",
    "router_jitter_noise",
)  # fmt: skip
"""Fields by which training would draw numbers: families with a plan run without."""
_ROPE = "rope_parameters"
_IN_ROPE = ("rope_theta", "partial_rotary_factor")
"""Fields that transformers takes from ``rope_parameters`` or ``rope_scaling`` where they are there."""
_COUNTS = ("num_experts", "num_local_experts")
"""Two names of one number, of which an export writes both."""
TEXT_ALONE = ("dots3_note", "emu3", "llama4", "mllama", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
"""Values of ``model_type`` of models that also see or hear, whose decoder in transformers is that of ``text_config`` alone."""
_SHARED = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Fields of the whole model that are its decoder's too."""
_NOT_IN_JSON = ("Infinity", "-Infinity", "NaN")


def folder_of(name: str) -> Path:
    """The folder that ``"hf:DIR"`` names."""
    return local_path(name)


def stop_ids_of(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text, as a folder of the hub says: often several, such as one that ends a turn of a conversation.

    Raises:
        ValueError: A file that may say so is a link out of the folder, no JSON object, or names no ids.
    """
    for file in (folder / GENERATION, folder / "config.json"):
        found: Any = _text_alone(_content(file)).get("eos_token_id") if file.is_file() else None
        ids = cast("list[Any]", found if isinstance(found, list) else [found])
        if found is not None and not all(type(token) is int for token in ids):
            raise ValueError(f"{file}: eos_token_id={found!r} must be the id of a token, or a list of ids. Correct it.")
        if found is not None:
            return tuple(ids)
    return ()


def read_published(name: str, *, key: str = "model.name") -> dict[str, Any]:
    """The content of the folder's ``config.json``; for one of `TEXT_ALONE`, that of its ``text_config``.

    Args:
        name: ``"hf:DIR"``.
        key: The setting that it is the value of, for the message.

    Raises:
        ValueError: There is none, it is a link out of the folder, or it is not a JSON object.
    """
    file = folder_of(name) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{key}={name!r}: {file} does not exist. Name a complete folder of Hugging Face.{download_hint(name)}"
        )
    return _text_alone(with_floats(_content(file, f"{key}={name!r}: ")))


def _text_alone(published: dict[str, Any]) -> dict[str, Any]:
    """The same; of a model that also sees, whose decoder transformers builds without, as if it were the decoder's own file."""
    kind, inner = published.get("model_type"), published.get("text_config")
    if kind not in TEXT_ALONE or not isinstance(inner, dict):
        return published
    shared = {key: published[key] for key in _SHARED if key in published}
    return {"model_type": f"{kind}_text", **shared, **cast("dict[str, Any]", inner)}


def of_text(published: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """``model.args`` for what `read_published` gave. For one of `TEXT_ALONE`, ``text_config.`` is taken off the names: earlier
    versions read the whole file, and their runs go on.
    """
    alone = str(published.get("model_type")).removesuffix("_text") in TEXT_ALONE
    return {key.removeprefix("text_config.") if alone else key: value for key, value in args.items()}


def _content(file: Path, asked: str = "") -> dict[str, Any]:
    refuse_link_out(file)
    try:
        content: Any = json.loads(read_text(file))
    except ValueError as err:
        raise ValueError(f"{asked}{file} is not valid JSON ({err}). Fetch the folder again.") from err
    if not isinstance(content, dict):
        raise ValueError(f"{asked}{file} is not a JSON object. Fetch the folder again.")
    return cast("dict[str, Any]", content)


def split_depth(name: str, args: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """How many modules ``model.args`` asks for, and its other settings, which are those of ``config.json``.

    Raises:
        ValueError: The number is none.
    """
    rest = dict(args)
    depth = rest.pop(DEPTH, 0)
    if type(depth) is not int or not 0 <= depth <= 100:
        raise ValueError(
            f"model.args.{DEPTH}={depth!r} of {name!r} must be a whole number from 0 to 100: modules that predict one token "
            "further ahead each. 0 is none."
        )
    return depth, rest


def with_floats(value: Any) -> Any:
    """The value, with the numbers that JSON lacks and transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        held = cast("dict[str, Any]", value)
        if held.keys() == {"__float__"} and held["__float__"] in _NOT_IN_JSON:
            return float(held["__float__"])
        return {key: with_floats(inner) for key, inner in held.items()}
    return [with_floats(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


def with_changes(
    published: Mapping[str, Any], changes: Mapping[str, Any], *, known: Mapping[str, Any]
) -> dict[str, Any]:
    """``config.json`` with the fields of ``model.args`` changed; a dot leads into an object, as in ``rope_parameters.factor``.

    A value that the file has in several spellings is changed in all of them, whichever of them transformers reads.

    Args:
        published: The file's content.
        changes: Field to value.
        known: All fields of this ``model_type``, with their values.

    Raises:
        ValueError: A field that the family does not have, or a value of another type.
    """
    changed = copy.deepcopy(dict(published))
    changes = of_text(published, changes)
    if any(key.partition(".")[0] == _ROPE for key in changes):
        changed.pop("rope_scaling", None)  # transformers would read it instead
        if isinstance(known.get(_ROPE), dict):
            changed[_ROPE] = copy.deepcopy(known[_ROPE])
    for key, given in changes.items():
        value = list(given) if isinstance(given, tuple) else given
        first, *inner = key.split(".")
        if first not in known and first not in published:
            raise ValueError(
                f"model.args.{key}={value!r}: this model's config.json has no such field. {did_you_mean(first, known)}"
                f"It has {', '.join(sorted(known))}."
            )
        current = known.get(first) if not inner else None
        numbers = isinstance(current, int | float) and isinstance(value, int | float)
        if (
            type(current) in (bool, int, float, str)
            and type(value) is not type(current)
            and (not numbers or isinstance(current, bool) or isinstance(value, bool))
        ):
            raise ValueError(
                f"model.args.{key}={value!r} must be of type {type(current).__name__}, not {type(value).__name__}; the "
                f"folder has {current!r}."
            )
        if not inner:
            changed[first] = value
            holders = [held for name in (_ROPE, "rope_scaling") if isinstance(held := changed.get(name), dict)]
            for held in holders if first in _IN_ROPE else []:
                if first in held:
                    held[first] = value
            for other in _COUNTS if first in _COUNTS else ():
                if other in changed:
                    changed[other] = value
            continue
        holder = changed.setdefault(first, copy.deepcopy(known.get(first)) or {})
        for part in inner[:-1]:
            holder = holder.setdefault(part, {})
        if not isinstance(holder, dict):
            raise ValueError(f"model.args.{key}={value!r}: {first} is not an object in config.json. Leave the dot out.")
        holder[inner[-1]] = value
    return changed
