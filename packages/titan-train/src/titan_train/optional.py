"""Libraries that extras install."""

import importlib
from typing import Any


def require(module: str, *, extra: str, purpose: str, otherwise: str = "") -> Any:
    """Import a library that an extra of titan-train installs.

    Args:
        module: The module.
        extra: Name of the extra.
        purpose: What needs the library, as the subject of the message.
        otherwise: A way to go on without it, such as "pass --no-gate".

    Raises:
        ValueError: The library, or one that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as err:
        way = f", or {otherwise}" if otherwise else ""
        raise ValueError(
            f"{purpose} needs {err.name or module}, which is not installed. Install titan-train[{extra}]{way}."
        ) from err
