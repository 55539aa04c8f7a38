"""A family's checkpoints on Hugging Face: how tensors are named, and what ``config.json`` says.

Each family has one such value in ``models/<family>/hf.py``; `Family.hf` names it. Import and export need nothing else.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt import KeyMap


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
        return self.key_map if isinstance(self.key_map, KeyMap) else self.key_map(args)


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
