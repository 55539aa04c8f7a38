"""Find, check and import the callable that ``model.name = "package.module:callable"`` names."""

import errno
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titan_train.nearest import did_you_mean

if TYPE_CHECKING:
    from torch import nn


SOURCE_ONLY = "TITAN_TRAIN_CODE"
"""The environment variable that tells ranks the folders of ``--code``."""


def names_code(model_name: str) -> bool:
    """Whether a model's name leads to code from outside titan_train."""
    module, colon, _ = model_name.partition(":")
    return bool(colon) and module != "hf" and _top(module) != "titan_train"


def use_code(paths: Sequence[str]) -> None:
    """Let modules be imported from these folders, in this process and in those that it starts.

    Args:
        paths: Of ``--code``: folders, or files, which stand for their folder.

    Raises:
        ValueError: A path does not exist.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"--code {path}: no such file or folder. Name the folder that holds the model's module.")
        folder = str((path if path.is_dir() else path.parent).resolve())
        if folder not in sys.path:
            sys.path.append(folder)
        for name in ("PYTHONPATH", SOURCE_ONLY):  # for ranks, which are new interpreters
            known = list(filter(None, os.environ.get(name, "").split(os.pathsep)))
            if folder not in known:
                os.environ[name] = os.pathsep.join([*known, folder])


def find_code(model_name: str) -> list[Path]:
    """Where the top-level module that a model's name leads to lies. Nothing is imported.

    Returns:
        Its file, or the folder of its package; several folders, if it is a namespace package.

    Raises:
        ValueError: It is neither installed nor below a path of `use_code`, or it is part of Python itself, or it lies in an
            archive.
    """
    module = model_name.partition(":")[0]
    top = _top(module)
    if top in sys.stdlib_module_names or top == "__main__":
        raise ValueError(
            f"model.name={model_name!r} names {top!r}, which is part of Python and holds no model. Name a class or a function "
            "that builds an nn.Module, such as 'my_package.my_model:build'."
        )
    spec = _find(top)
    if spec is None:
        cwd = Path.cwd()
        here = (cwd / f"{top}.py").is_file() or (cwd / top).is_dir()
        advice = "add `--code .` to import it from this folder" if here else "or name its folder with --code DIR"
        raise ValueError(
            f"model.name={model_name!r}: module {top!r} is neither installed nor in a folder given with --code. Install it, "
            f"{advice}."
        )
    if spec.submodule_search_locations:
        found = [Path(place).resolve() for place in spec.submodule_search_locations]
    else:
        found = [Path(spec.origin or "nowhere").resolve()]
    for place in found:
        if not place.exists():
            raise ValueError(
                f"model.name={model_name!r}: {top!r} is no file or folder ({spec.origin or place}). Unpack its archive and "
                "name the folder with --code DIR: its source must be there to be read."
            )
    return found


def import_factory(model_name: str) -> "Callable[..., nn.Module]":
    """Import the class or function that a model's name leads to.

    Args:
        model_name: ``"package.module:callable"``.

    Returns:
        A subclass of `nn.Module`, or a function whose return annotation is one.

    Raises:
        ValueError: The module is not one that may be imported, its import fails, or what it holds under the name is not
            declared to build a module.
    """
    find_code(model_name)
    _ignore_bytecode()
    module_name, _, attribute = model_name.partition(":")
    found = _import(model_name, module_name)
    for part in attribute.split("."):
        if not hasattr(found, part) or inspect.ismodule(getattr(found, part)):
            raise ValueError(
                f"model.name={model_name!r}: {module_name} has no {attribute!r}. {did_you_mean(part, vars(found))}".strip()
            )
        found = getattr(found, part)
    _check_declared(model_name, found)
    return found


class _FromSource(SourceFileLoader):
    """Compiles the source whatever bytecode lies beside it, which somebody else may have made from another source."""

    def path_stats(self, path: str) -> NoReturn:
        """Say that there is no bytecode."""
        raise OSError(errno.ENOENT, "bytecode is not used", path)


def _ignore_bytecode() -> None:
    """Have Python read modules below the folders of ``--code`` from what was there to be read: their source."""
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)
    for path in list(sys.path_importer_cache):
        if _below_code(path):
            del sys.path_importer_cache[path]


def _finder(path: str) -> FileFinder:
    if not _below_code(path):
        raise ImportError(f"{path} was not named with --code")
    return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_FromSource, SOURCE_SUFFIXES))


def _below_code(path: str) -> bool:
    folders = filter(None, os.environ.get(SOURCE_ONLY, "").split(os.pathsep))
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _find(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def _import(model_name: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        if err.name is not None and f"{module_name}.".startswith(f"{err.name}."):
            raise ValueError(f"model.name={model_name!r}: there is no module {err.name!r}. Correct its name.") from None
        raise ValueError(
            f"model.name={model_name!r}: {module_name} imports {err.name!r}, which is not installed. Install it."
        ) from err
    except Exception as err:
        raise ValueError(f"model.name={model_name!r}: importing {module_name} failed: {describe_error(err)}") from err


def describe_error(err: BaseException) -> str:
    """``TypeError: unsupported operand (my_model.py, line 12)``: an error of somebody else's code, in one line."""
    frames = traceback.extract_tb(err.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(err).__name__}: {' '.join(str(err).split())[:300]}{where}"


def _check_declared(model_name: str, found: Any) -> None:
    """Refuse what does not say that it builds an `nn.Module`: importing a name must not be enough to call anything."""
    from torch import nn

    if inspect.isclass(found):
        if issubclass(found, nn.Module):
            return
        raise ValueError(f"model.name={model_name!r} is a class, but no subclass of torch.nn.Module. Name one that is.")
    if not inspect.isroutine(found) or inspect.isbuiltin(found):
        raise ValueError(
            f"model.name={model_name!r} is a {type(found).__name__}; it must be a class or a function that returns a "
            "torch.nn.Module."
        )
    try:
        returned = typing.get_type_hints(found).get("return")
    except Exception as err:  # an annotation may be any expression
        raise ValueError(
            f"model.name={model_name!r}: its annotations cannot be read ({type(err).__name__}: {err}). Import the names that "
            "they use."
        ) from err
    if not (inspect.isclass(returned) and issubclass(returned, nn.Module)):
        raise ValueError(
            f"model.name={model_name!r} is a function that does not declare to return a model. Annotate it: "
            "`def build(...) -> torch.nn.Module`."
        )
