"""Find, check and import the callable that ``model.name = "package.module:callable"`` names."""

import errno
import importlib
import importlib.util
import inspect
import os
import sys
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

from titan_train.trust.owner import SOURCE_ONLY, below_code, describe_error, listed
from titan_train.values import did_you_mean

if TYPE_CHECKING:
    from torch import nn


# They hold functions that are declared to build a module and that run what their arguments name: a folder's own Python, a
# pickle, a repository on a hub. A configuration chooses the arguments.
_NEVER = ("torch", "transformers", "diffusers", "peft", "titan_train")


def names_code(model_name: str) -> bool:
    """Whether a model's name leads to code that is not one of the shipped models."""
    module, colon, _ = model_name.partition(":")
    return bool(colon) and module != "hf"


def use_code(names: Sequence[str]) -> tuple[str, ...]:
    """Let a model be built by code of these folders and packages, in this process and in those that it starts.

    Args:
        names: Of ``--code``: folders; files, which stand for their folder; or top-level names of installed packages. A
            package's folder stands for the package if it is installed from there, and for both if from elsewhere.

    Returns:
        The same as absolute paths and names.

    Raises:
        ValueError: Something is neither a path nor an installed package.
    """
    found: list[str] = []
    for name in names:
        path = Path(name)
        if not path.exists():
            if not name.isidentifier() or _find(name) is None:
                raise ValueError(
                    f"--code {name}: no such folder or file, and no package of this name is installed. Name the folder that "
                    "holds the model's module, or its package."
                )
            _add_to(SOURCE_ONLY, name)
            found.append(name)
            continue
        folder = str((path if path.is_dir() else path.parent).resolve())
        if name.isidentifier() and (path / "__init__.py").is_file() and (spec := _find(name)) is not None:
            _add_to(SOURCE_ONLY, name)
            found.append(name)
            if folder in (str(Path(place).resolve()) for place in spec.submodule_search_locations or ()):
                continue  # its modules are the package's, none a top-level one that could hide Python's own
        if folder not in sys.path:
            sys.path.append(folder)
        for variable in ("PYTHONPATH", SOURCE_ONLY):  # for ranks, which are new interpreters
            _add_to(variable, folder)
        found.append(folder)
    return tuple(found)


def use_package_of(model_name: str) -> tuple[str, ...]:
    """Trust the installed package that a model's name leads to, as `use_code` of its name; nothing if none is installed."""
    top = top_package(model_name)
    if _find(top) is None:
        return ()
    _add_to(SOURCE_ONLY, top)
    return (top,)


def top_package(name: str) -> str:
    """The package that must be trusted: ``my_package`` of ``"my_package.my_model:build"`` or of a module's name."""
    return name.partition(":")[0].partition(".")[0]


def find_code(model_name: str) -> list[Path]:
    """Where the top-level module that a model's name leads to lies. Nothing is imported.

    Returns:
        Its file, or the folder of its package; several folders, if it is a namespace package.

    Raises:
        ValueError: It was not named to `use_code`, or is not found, or it is part of Python itself, of titan_train or of a
            library whose functions load other code, or it lies in an archive.
    """
    top = top_package(model_name)
    if top in _NEVER:
        raise ValueError(
            f"model.name={model_name!r} names {top!r}, whose functions can load and run other code. For a folder of Hugging "
            "Face write model.name = 'hf:FOLDER', for a shipped model its name. Anything else: call it in a module of your "
            "own, and name that with --code."
        )
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
    if not _is_trusted(top, spec):
        raise ValueError(
            f"model.name={model_name!r}: {top!r} is installed, but you have not named it. A configuration alone runs no code: "
            f"read what {model_name!r} does, then add --code {top} (in a program: titan_train.use_code([{top!r}]))."
        )
    if spec.submodule_search_locations:
        found = [Path(place).resolve() for place in spec.submodule_search_locations]
    else:
        found = [Path(spec.origin or "nowhere").resolve()]
    for place in found:
        if not place.exists():
            raise ValueError(
                f"model.name={model_name!r}: {top!r} is not a file or folder ({spec.origin or place}). Unpack its archive and "
                "name the folder with --code DIR: its source must be there to be read."
            )
    return found


def import_factory(model_name: str) -> "Callable[..., nn.Module]":
    """Import the class or function that a model's name leads to.

    Args:
        model_name: ``"package.module:callable"``.

    Returns:
        A subclass of `nn.Module`, or a function whose return annotation is one; defined in the module's own package.

    Raises:
        ValueError: The module is not one that may be imported, its import fails, or what it holds under the name is not
            declared to build a module, or was imported from another package.
    """
    module_name, _, attribute = model_name.partition(":")
    if not attribute.isidentifier():
        raise ValueError(
            f"model.name={model_name!r}: one name must follow the colon. Name a class or a function at the top level of its "
            "module, not an attribute of one."
        )
    find_code(model_name)
    _ignore_bytecode()
    module = _import(model_name, module_name)
    found = vars(module).get(attribute)
    if found is None or inspect.ismodule(found):
        raise ValueError(
            f"model.name={model_name!r}: {module_name} has no {attribute!r}. {did_you_mean(attribute, vars(module))}".strip()
        )
    _check_declared(model_name, found)
    return found


class _FromSource(SourceFileLoader):
    """Compiles the source and ignores bytecode beside it, which somebody else may have made from another source."""

    def path_stats(self, path: str) -> NoReturn:
        """There is no bytecode."""
        raise OSError(errno.ENOENT, "bytecode is not used", path)


def _ignore_bytecode() -> None:
    """Have Python read modules below the folders of ``--code`` from what was there to be read: their source."""
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)
    for path in list(sys.path_importer_cache):
        if below_code(path):
            del sys.path_importer_cache[path]


def _finder(path: str) -> FileFinder:
    if not below_code(path):
        raise ImportError(f"{path} was not named with --code")
    return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_FromSource, SOURCE_SUFFIXES))


def _is_trusted(top: str, spec: ModuleSpec) -> bool:
    """Whether the package or its folder was named to `use_code`, or it lies directly in a folder that was."""
    named = listed(SOURCE_ONLY)
    if top in named:
        return True
    places = [Path(place) for place in spec.submodule_search_locations or [spec.origin or "nowhere"]]
    return all(str(place.resolve()) in named or str(place.parent.resolve()) in named for place in places)


def _add_to(variable: str, word: str) -> None:
    if word not in (known := listed(variable)):
        os.environ[variable] = os.pathsep.join([*known, word])


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


def _check_declared(model_name: str, found: Any) -> None:
    """Refuse what does not say that it builds an `nn.Module`: importing a name must not be enough to call anything."""
    from torch import nn

    home = getattr(found, "__module__", None)
    if callable(found) and isinstance(home, str) and top_package(home) != top_package(model_name):
        raise ValueError(
            f"model.name={model_name!r} is defined in {home}: {top_package(model_name)} only imports it. Write a function in "
            f"{top_package(model_name)} that calls it and is annotated to return a torch.nn.Module."
        )
    if inspect.isclass(found):
        if issubclass(found, nn.Module):
            return
        raise ValueError(
            f"model.name={model_name!r} is a class, but not a subclass of torch.nn.Module. Name one that is."
        )
    if not inspect.isfunction(found):
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
