"""The names that a package hands on from its modules, each imported when it is first used.

An ``__init__`` states them once, where type checkers and readers look, and leaves the importing to `first_use`::

    if TYPE_CHECKING:
        from titan_train.optim.build import build_optimizer

    __all__ = ["build_optimizer"]
    __getattr__ = first_use(__name__)

So `import titan_train.optim.schedule` loads that module alone, not everything that the package shows.

`require` imports a library that an extra installs, or says which extra that is.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def first_use(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: imports a name from the module that its ``if TYPE_CHECKING:`` block names."""

    @cache
    def homes() -> dict[str, str]:
        tree = ast.parse(inspect.getsource(sys.modules[package]))
        blocks = [block for block in tree.body if isinstance(block, ast.If)]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}

    def imported(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return imported


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
