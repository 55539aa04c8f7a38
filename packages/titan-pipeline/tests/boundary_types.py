"""A structure that stages hand over, in a module that every process can import."""

from dataclasses import dataclass
from typing import Any

from titan_pipeline.runtime import register_structure


@register_structure
@dataclass
class State:
    hidden: Any
    mask: Any
    names: Any = None
