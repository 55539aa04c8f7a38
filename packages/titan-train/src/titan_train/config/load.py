"""From a TOML file and command-line words to one validated `Config`.

Order of precedence: command line, then the file, then what the file `extends`, then the defaults. Unknown keys are
errors everywhere. This module does not import torch.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from titan_train.config.elsewhere import here_it_is
from titan_train.config.errors import ConfigError, describe_unknown_key, describe_validation_error
from titan_train.config.patterns import with_orders
from titan_train.config.published import missing_repositories, with_published
from titan_train.config.schema import Config
from titan_train.config.words import Setting, in_list, merge_settings, merge_trees, read_keywords, read_words
from titan_train.files import read_toml
from titan_train.values import nearest_name


def load_config(
    name_or_path: str,
    overrides: Sequence[str] = (),
    *,
    also: Sequence[str] = (),
    note: Callable[[str], None] | None = None,
    fetch: Callable[[str, str], None] | None = None,
    **settings: Any,
) -> Config:
    """Load a configuration file and apply settings, as words of a command line or as keywords.

    >>> load_config("debug", ["--train.steps", "8"])
    >>> load_config("debug", train={"steps": 8}, optimizer={"lr": 1e-3})
    >>> load_config("debug", **{"train.steps": 8, "data.sources.0.weight": 2.0})

    Args:
        name_or_path: A path to a ``.toml`` file, or the name of a shipped configuration (`list_configs`).
        overrides: Words such as ``["--train.steps", "20", "--run.name", "try"]``; ``["--parallel", "pp8 dp8 tp8"]`` sets
            the parallel degrees at once. `titan_train.config.words` shows all forms.
        also: Options that the calling command has besides settings, for the hint after a misspelt one.
        note: Called with one line that says what `model.init` has set.
        fetch: Called with the key and ``hf:ORG/NAME`` for each model, tokenizer and data set of a hub that is not here yet, or
            not as a whole; it loads it into the folder ``ORG/NAME``.
        settings: A section as a table of its keys, or one setting by its dotted name; over ``overrides``. Paths may be
            `pathlib.Path`, lists may be tuples.

    Raises:
        ConfigError: The file is missing or malformed, a key is unknown, or a value cannot work.
    """
    path = _find(name_or_path)
    tree = _read(path, seen=())
    if isinstance(run := tree.setdefault("run", {}), dict):
        typing.cast("dict[str, Any]", run).setdefault("name", path.stem)
    given = [*read_words(overrides, Config, also), *read_keywords(settings, Config)]
    merged = merge_settings(tree, given, _defaults()) if given else tree
    if fetch is not None:
        for key, repository in missing_repositories(merged):
            fetch(key, repository)
    merged, taken = with_published(merged)
    if taken and note is not None:
        note(taken)
    try:
        return parse_config(merged, source=name_or_path)
    except ConfigError as err:
        raise _as_typed(err, given) from None


def parse_config(tree: dict[str, Any], source: str = "config") -> Config:
    """Validate a tree of plain values, as TOML gives it, into a `Config`.

    Raises:
        ConfigError: Names every unknown key and every value that cannot work.
    """
    problems = list(islice(chain(_unknown_keys(tree, Config, ""), _impossible_values(tree, "")), _MOST_PROBLEMS))
    if problems:
        raise ConfigError(source, problems)
    try:
        text = json.dumps(tree)
    except TypeError as err:
        raise ConfigError(source, [f"{err}: use strings, numbers, booleans, lists and tables only."]) from err
    try:
        return _ADAPTER.validate_json(text, strict=True)
    except ValidationError as err:
        raise ConfigError(source, describe_validation_error(err)) from None


def dump_config(config: Config) -> str:
    """The configuration as TOML, every field written out; `parse_config` of it gives an equal `Config`."""
    return tomli_w.dumps(_plain(dataclasses.asdict(config)))


def values_set(config: Config) -> dict[str, Any]:
    """The settings that are not at their default, as plain values by dotted name; without the run's name and folder."""
    default = _flat(_defaults())
    return {key: value for key, value in flat_values(config).items() if default.get(key) != value and key not in _PLACE}


def flat_values(config: Config) -> dict[str, Any]:
    """All settings as plain values by dotted name; lists stay whole, and tables of patterns have their order besides."""
    return with_orders(_flat(_plain(dataclasses.asdict(config))))


def list_configs() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(p.name.removesuffix(".toml") for p in _shipped().iterdir() if p.name.endswith(".toml"))


_ADAPTER = TypeAdapter(Config)
_MOST_PROBLEMS = 1000
_PLACE = ("run.name", "run.dir")


def _shipped() -> Path:
    return Path(str(resources.files("titan_train") / "configs"))


def _find(name_or_path: str, base: Path | None = None) -> Path:
    path = Path(name_or_path)
    candidates = [path] if base is None else [base / path]
    if path.suffix == "" and len(path.parts) == 1:
        candidates.append(_shipped() / f"{name_or_path}.toml")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    nearest = nearest_name(path.stem, list_configs())
    hint = f"did you mean {nearest!r}? " if nearest else ""
    raise ConfigError(
        name_or_path,
        [f"no such file or shipped configuration; {hint}The shipped ones are {', '.join(list_configs())}."],
    )


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """One file's tree, merged over the tree of the file it extends."""
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError(str(path), [f"extends goes in a circle: {chain}. Remove one `extends`."])
    try:
        tree = read_toml(path)
    except ValueError as err:
        raise ConfigError(str(path), [f"not TOML: {err}."]) from None
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(str(path), [f'extends = {base}: must be a string, such as extends = "quickstart".'])
    return merge_trees(_read(_find(base, path.parent), (*seen, path.resolve())), tree)


def _unknown_keys(tree: Any, cls: type, path: str) -> typing.Iterator[str]:
    """Problems for keys that a dataclass does not have, found before pydantic so that the nearest key can be named."""
    if not isinstance(tree, dict):
        return
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key, value in typing.cast("dict[str, Any]", tree).items():
        if key not in names:
            inside = [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else []
            of_another = [name for name in inside if here_it_is(name)]  # a section of another trainer
            entry = in_list(Config, f"{path}.{key}")
            yield from (describe_unknown_key(path, name, names, entry) for name in of_another or [key])
            continue
        here = f"{path}.{key}" if path else key
        for inner in _dataclasses_in(hints[key]):
            items = enumerate(value) if isinstance(value, list) else [(None, value)]
            for i, item in items:
                yield from _unknown_keys(item, inner, here if i is None else f"{here}.{i}")


def _impossible_values(tree: Any, path: str) -> typing.Iterator[str]:
    """Problems for values that no setting can use: NaN, infinity, integers beyond 64 bits, text that no file name holds."""
    if isinstance(tree, dict):
        for key, value in typing.cast("dict[str, Any]", tree).items():
            yield from _impossible_values(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(typing.cast("Sequence[Any]", tree)):
            yield from _impossible_values(value, f"{path}.{i}")
    elif isinstance(tree, str):
        if "\0" in tree:
            yield f"{path} = {tree[:40]!r}: must not hold the character NUL."
        elif any("\ud800" <= character <= "\udfff" for character in tree):
            yield f"{path} = {tree[:40]!r}: must be UTF-8 text."
    elif isinstance(tree, float) and not math.isfinite(tree):
        yield f"{path} = {tree}: must be a finite number."
    elif isinstance(tree, int) and not -(2**63) <= tree < 2**63:
        yield f"{path} = {_short_int(tree)}: must fit into 64 bits."


def _short_int(value: int) -> str:
    return f"{value:.3g}" if abs(value) < 10**300 else "an integer of more than 300 digits"


def _dataclasses_in(hint: Any) -> list[type]:
    """The dataclass in a field's type: itself, in a tuple, or in a union."""
    if dataclasses.is_dataclass(hint):
        return [typing.cast("type", hint)]
    if typing.get_origin(hint) in (tuple, typing.Union, types.UnionType):
        return [found for argument in typing.get_args(hint) for found in _dataclasses_in(argument)]
    return []


def _as_typed(err: ConfigError, settings: Sequence[Setting]) -> ConfigError:
    """The error with each problem of the command line under the option as it was typed."""
    typed = {setting.key: setting.option for setting in settings}
    problems: list[str] = []
    for problem in err.problems:
        key = next((key for key in typed if problem.startswith((f"{key} ", f"{key}="))), None)
        problems.append(f"{typed[key]}{problem.removeprefix(key)}" if key else problem)
    return ConfigError("command line" if problems != err.problems else err.source, problems)


@functools.cache
def _defaults() -> dict[str, Any]:
    return _plain(dataclasses.asdict(Config()))


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        flat.update(_flat(typing.cast("dict[str, Any]", value), name) if isinstance(value, dict) else {name: value})
    return flat


def _plain(tree: Any) -> Any:
    """TOML has no null and no tuple: drop None, make lists."""
    if isinstance(tree, dict):
        items = typing.cast("dict[str, Any]", tree).items()
        return {key: _plain(value) for key, value in items if value is not None}
    if isinstance(tree, (list, tuple)):
        return [_plain(value) for value in typing.cast("list[Any]", tree)]
    return tree
