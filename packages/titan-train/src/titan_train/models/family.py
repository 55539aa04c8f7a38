"""What a model family is: one value that names its arguments, its module and how others read it."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from titan_train.models.common.tensor_styles import StyleTable
from titan_train.models.shape import ModelShape

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Only names and plain data are here, so that a family can be listed and its configurations be checked without
    importing torch. What needs torch is named as ``"module:attribute"`` and imported on first use.
    """

    name: str
    """Its name, such as llama."""
    args: type[Any]
    """The arguments of its models: a dataclass (for text, with ``vocab_size``). Its ``max_seq_len`` limits ``model.seq_len``,
    and its method ``shape(name)`` is what `Family.shape` returns."""
    configs: Mapping[str, Any]
    """The shipped configurations: ``model.name`` to arguments."""
    model: str
    """The module class, called with the arguments: ``"package.module:Class"``, where the class is defined."""
    tensor_styles: StyleTable
    """How each module takes part in tensor parallelism."""
    task: str = "text"
    """What its models are trained on: the name of a `titan_train.Task`."""
    hf: str | None = None
    """Its `titan_train.models.common.hf.HuggingFace` value, as ``"package.module:NAME"``. None: no import or export."""

    def __post_init__(self) -> None:
        if self.task == "text" and "vocab_size" not in {field.name for field in fields(self.args)}:
            raise ValueError(
                f"family {self.name!r}: {self.args.__name__} has no field vocab_size, which the tokenizer sets. Add it."
            )
        for name, args in self.configs.items():
            if type(args) is not self.args:
                raise ValueError(
                    f"family {self.name!r}: configuration {name!r} is of type {type(args).__name__}, not "
                    f"{self.args.__name__}. Give all configurations the family's type."
                )

    def build(self, args: Any) -> "nn.Module":
        """The module with these arguments, on torch's current default device.

        Raises:
            ValueError: ``model`` does not name the class where it is defined.
        """
        kind = _load(self.name, "model", self.model)
        if class_path(kind) != self.model:
            raise ValueError(
                f"family {self.name!r}: model={self.model!r} is defined as {class_path(kind)!r}. Name it by that path, so "
                "that a model's family is known by its class."
            )
        return kind(args)

    def shape(self, args: Any, name: str = "") -> ModelShape:
        """What the planner, `check` and tables know of the model that ``args`` describe; ``name`` is the shape's.

        Raises:
            ValueError: The arguments have no method ``shape(name)``.
        """
        state: Callable[[str], ModelShape] | None = getattr(args, "shape", None)
        if state is None:
            raise ValueError(
                f"family {self.name!r}: {self.args.__name__} has no method shape(name), which the planner reads. Add one that "
                "returns a titan_train.models.shape.ModelShape, or estimate a shipped model of similar shape."
            )
        return state(name or self.name)

    def settings(self, args: Any) -> dict[str, Any]:
        """The arguments that decide the logits, in one spelling; all of them, where the family has no Hugging Face format."""
        return asdict(args) if self.hf is None else self.load_hf().settings_of(args)

    def load_hf(self) -> Any:
        """The family's Hugging Face format.

        Raises:
            ValueError: The family has none.
        """
        if self.hf is None:
            raise ValueError(
                f"family {self.name!r} has no Hugging Face key map, so it can be neither imported nor exported. Give its "
                "Family value an `hf`."
            )
        return _load(self.name, "hf", self.hf)


def class_path(kind: type[Any]) -> str:
    """Where a class is defined, as ``"package.module:Class"``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _load(family: str, field: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as err:
        raise ValueError(f"family {family!r}: {field}={path!r} could not be loaded: {err}") from err
