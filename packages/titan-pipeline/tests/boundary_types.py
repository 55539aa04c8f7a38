"""A structure that stages hand over, in a module that every process can import."""

from dataclasses import dataclass
from typing import Any


@dataclass
class State:
    hidden: Any
    mask: Any
    names: Any = None
