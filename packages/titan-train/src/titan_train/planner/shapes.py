"""Shapes by name: of shipped and registered models, of Hugging Face folders, and of other published models (`shapes.toml`)."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from titan_train.config import Config
from titan_train.models.arguments import model_args
from titan_train.models.family import Family
from titan_train.models.hf.folder import PREFIX, of_text, read_published, split_depth, with_changes
from titan_train.models.hf.plans import hf_plans
from titan_train.models.hf.shape import shape_of_published
from titan_train.models.registry import families, find_model, list_models
from titan_train.models.shape import (
    AttentionWidths,
    Block,
    DeltaShape,
    ExpertsShape,
    FeedForwardShape,
    ModelShape,
    StateSpaceShape,
)
from titan_train.task import load_task, task_name
from titan_train.values import did_you_mean

_PLANNED = ("text", "diffusion")
_PARTS = {
    "attention": AttentionWidths, "ffn": FeedForwardShape, "experts": ExpertsShape, "ssm": StateSpaceShape, "delta": DeltaShape,
}  # fmt: skip


def find_shape(name: str) -> ModelShape:
    """The shape of a shipped or registered model, of a folder ("hf:DIR"), or of another published model.

    Dashes, a point release ("llama3.1-8b") and a size after the name ("kimi_k2_1t") are accepted.

    Raises:
        ValueError: No such shape; the message names the nearest. Or the planner does not know such models.
    """
    if name.startswith(PREFIX):
        return shape_of_published(name, read_published(name, key="MODEL"))
    known = [*list_models(), *_published()]
    key = name
    if name not in known:
        key = name.lower().replace("-", "_").replace("llama3.1", "llama3").replace("llama3.2", "llama3")
    if key not in known:
        joined = key.replace("_", "")  # glm-4.5, qwen-3.5-9b
        key = next((other for other in known if other.replace("_", "") == joined), key)
    if key not in known:
        key = next((other for other in known if key.startswith(other + "_")), key)
    if key in list_models():
        family, args = find_model(key)
        return _check_task(family, key).shape(args, key)
    if key not in known:
        planned = [n for family in families().values() if family.task in _PLANNED for n in family.configs]
        names = sorted([*planned, *_published()])
        raise ValueError(
            f"no shape is known for model {name!r}. {did_you_mean(key, names)}Known: {', '.join(names)}. "
            "For another model give a configuration file."
        )
    return _published()[key]


def vocabulary_of(config: Config) -> int | None:
    """The vocabulary of a run's tokenizer; None where it is not known yet, and of a task that is not text."""
    return load_task(config).vocab_size(config) if task_name(config) == "text" else None


def shape_of_config(config: Config, *, vocab_size: int | None = None) -> ModelShape:
    """The shape of a configuration's model.

    Args:
        config: The model, with its changed arguments.
        vocab_size: Of the run's tokenizer, as for `titan_train.models.build.build_model`.

    Raises:
        ValueError: The model is a dotted path, whose inside cannot be seen without building it.
    """
    name = config.model.name
    if name.startswith(PREFIX):
        published = read_published(name)
        mtp, changes = split_depth(name, of_text(published, config.model.args))
        known = published | {key.partition(".")[0]: published.get(key.partition(".")[0]) for key in changes}
        return shape_of_published(name, with_changes(published, changes, known=known), mtp=mtp)
    if ":" in name:
        raise ValueError(
            f"model.name={name!r} is a callable, and the planner needs a shape. Register a model family whose arguments have "
            "a method shape(name), or estimate a shipped model of similar shape."
        )
    return _check_task(find_model(name)[0], name).shape(model_args(config.model, vocab_size=vocab_size), name)


def uncut_axes(name: str) -> tuple[str, ...]:
    """Axes over which no plan may cut a model: those that a folder's family lacks, and without a plan of the family all but data
    parallelism. Tensor parallelism is planned together with sequence parallelism, so tp is one where a model has only the first.
    """
    if is_diffusion(name):
        return ("tp",)
    if not name.startswith(PREFIX):
        return ()
    published = read_published(name, key="MODEL")
    plan = hf_plans().get(str(published.get("model_type")))
    lacking = ("tp", "cp", "pp", "ep") if plan is None else plan.lacking(published)
    return tuple("tp" if axis == "sp" else axis for axis in lacking)


def returns_logits(name: str) -> bool:
    """Whether the loss is computed from whole logits whatever ``train.fused_loss`` says: a folder's whose family has no plan."""
    return name.startswith(PREFIX) and read_published(name, key="MODEL").get("model_type") not in hf_plans()


def is_diffusion(name: str) -> bool:
    """Whether a shipped or registered configuration is a diffusion transformer."""
    return name in list_models() and find_model(name)[0].task == "diffusion"


def _check_task(family: Family, name: str) -> Family:
    if family.task not in _PLANNED:
        raise ValueError(
            f"model.name={name!r} is trained on {family.task!r}, and the planner knows decoders of text and FLUX only. "
            "`titan-train check` measures this model's memory under a layout."
        )
    return family


@cache
def _published() -> dict[str, ModelShape]:
    """The shapes of `shapes.toml`."""
    text = resources.files("titan_train.planner").joinpath("shapes.toml").read_text(encoding="utf-8")
    return {
        name: ModelShape(name, blocks=tuple(_block(block) for block in table.pop("blocks")), **table)
        for name, table in tomllib.loads(text).items()
    }


def _block(table: Mapping[str, Any]) -> Block:
    parts: dict[str, Any] = {
        "ffn" if key == "experts" else key: _PARTS[key](**value) if key in _PARTS else value
        for key, value in table.items()
    }
    return Block(**parts)
