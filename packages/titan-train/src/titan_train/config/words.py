"""Command-line settings as the tree of values that a TOML file gives.

``--section.key value`` and ``--section.key=value`` set what ``key = value`` sets under ``[section]``. The value is read
by the type of the setting, and nothing is validated here: the tree joins the file's, and one validation speaks for both.

    --train.steps 20                  --optimizer.lr 1e-3             a number
    --compile.enabled                 --metrics.report false          true or false; --metrics.no-report is false too
    --optimizer.name adamw            --run.name try                  text, as it stands
    --pipeline.cuts 2 4 6             --pipeline.cuts '[2, 4, 6]'     a list: words, or as in TOML
    --model.args.num-heads 8          --model.args '{num_heads = 8}'  one key of a table, or several as in TOML
    --data.sources.0.weight 2         --parallel "pp8 dp8 tp8"        one entry of a list; all degrees at once

``-`` and ``_`` in the name of a setting are the same.
"""

import dataclasses
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_mesh import MeshSpec

from titan_train.config.errors import ConfigError, describe_unknown_option
from titan_train.terminal import shortened
from titan_train.values import did_you_mean

_INT = re.compile(r"[+-]?\d+(_\d+)*")
_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the command line."""

    option: str
    """As it was typed, such as ``--model.args.num-heads``."""
    path: Path
    """Its keys, such as ``("model", "args", "num_heads")``."""
    value: Any
    """A plain value; it may be of the wrong type, which validation says."""

    @property
    def key(self) -> str:
        """The dotted name that errors use."""
        return ".".join(map(str, self.path))


def read_words(words: Sequence[str], schema: type, also: Sequence[str] = ()) -> list[Setting]:
    """Read the settings of a command line.

    Args:
        words: What follows the name of the configuration.
        schema: The dataclass of the whole configuration.
        also: Options that the command has besides settings, for the hint after a misspelt one.

    Raises:
        ConfigError: An option that does not exist, a value that is missing or left over, or that is not TOML.
    """
    found: list[Setting] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not _is_option(word):
            raise _error(f"unexpected {shortened(word)!r}: a setting is --section.key value, such as --train.steps 20.")
        option, equals, attached = word.partition("=")
        values = [attached] if equals else []
        while not equals and remaining and not _is_option(remaining[0]):
            values.append(remaining.pop(0))
        if option == "--parallel":
            found += _degrees(option, values)
            continue
        path, hint, negated = _find(option, schema, also)
        if negated:
            if values:
                raise _error(f"{option} takes no value; {shortened(values[0])!r} was given.")
            found.append(Setting(option, path, False))
            continue
        found.append(Setting(option, path, _value(option, values, hint)))
    return found


def read_keywords(settings: Mapping[str, Any], schema: type) -> list[Setting]:
    """Read settings that a program gives: ``{"train": {"steps": 20}}`` or ``{"train.steps": 20}``.

    Raises:
        ConfigError: A setting that does not exist.
    """
    found: list[Setting] = []
    for name, value in settings.items():
        path, hint = _resolve(name.split("."), schema)
        if hint is None:
            known = [
                *(f.name for f in dataclasses.fields(schema)),
                *(".".join(keys) for keys, _, _ in settings_of(schema)),
            ]
            raise ConfigError("keywords", [f"{name}: unknown setting. {did_you_mean(name, known)}".strip()])
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            inner = typing.cast("Mapping[str, Any]", value)
            found += [Setting(f"{name}.{key}", (*path, *key.split(".")), _plain(one)) for key, one in inner.items()]
        else:
            found.append(Setting(name, path, _plain(value)))
    return found


def _plain(value: Any) -> Any:
    """A program's value as TOML would give it."""
    if isinstance(value, os.PathLike):
        return os.fspath(typing.cast("os.PathLike[str]", value))
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in typing.cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in typing.cast("Sequence[Any]", value)]
    return value


def merge_settings(tree: dict[str, Any], settings: Sequence[Setting], defaults: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``tree`` with the settings put in, later ones over earlier ones. Tables merge, other values are replaced.

    Args:
        tree: Of the file.
        settings: Of the command line.
        defaults: The whole default configuration: one entry of a list is changed in the default list if the file has none.

    Raises:
        ConfigError: The list has no such entry.
    """
    for setting in settings:
        tree = _put(tree, setting.path, setting, defaults)
    return tree


def merge_trees(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; everything else, lists too, is replaced.

    The keys of ``over`` come first: of several patterns that fit a name, the first counts, and that is the one given last.
    """
    merged = over | {key: value for key, value in base.items() if key not in over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = merge_trees(base[key], typing.cast("dict[str, Any]", value))
    return merged


def settings_of(schema: type, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type, Any]]:
    """Every setting of a dataclass and of those in it: its keys, the dataclass that has it, and the type of its value."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        keys, hint = (*above, field.name), hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from settings_of(hint, keys)
        else:
            yield keys, schema, hint


def in_list(schema: type, key: str) -> str:
    """The setting of a list's first entry that has the name of a key, ``data.sources.0.packing`` for ``data.packing``, or ""."""
    section, _, name = key.rpartition(".")
    for keys, _, hint in settings_of(schema):
        entry = _entry_type(hint)
        fields = dataclasses.fields(entry) if dataclasses.is_dataclass(entry) else ()
        if ".".join(keys[:-1]) == section and name in [field.name for field in fields]:
            return f"{'.'.join(keys)}.0.{name}"
    return ""


def option_names(schema: type) -> list[str]:
    """Every setting as an option, such as ``--launch.ray.wait-s``."""
    return [f"--{'.'.join(keys).replace('_', '-')}" for keys, _, _ in settings_of(schema)]


def _is_option(word: str) -> bool:
    return word.startswith("--") and word[2:3].isalpha()


def _error(problem: str) -> ConfigError:
    return ConfigError("command line", [problem])


def _find(option: str, schema: type, also: Sequence[str]) -> tuple[Path, Any, bool]:
    """The keys of an option, the type of its value, and whether it is a ``no-`` form."""
    parts = option[2:].split(".")
    path, hint = _resolve(parts, schema)
    if hint is not None:
        return path, hint, False
    for positive in (option.replace("--no-", "--", 1), option.replace(".no-", ".", 1)):
        if positive != option:
            path, hint = _resolve(positive[2:].split("."), schema)
            if hint is bool:
                return path, hint, True
    inside = in_list(schema, option[2:].replace("-", "_"))
    raise _error(describe_unknown_option(option, option_names(schema), also, inside))


def _resolve(parts: Sequence[str], schema: type) -> tuple[Path, Any]:
    """Keys and type; the type is None if there is no such setting."""
    hint: Any = schema
    path: list[str | int] = []
    for i, part in enumerate(parts):
        entry = _entry_type(hint)
        if dataclasses.is_dataclass(hint):
            key = part.replace("-", "_")
            hint = typing.get_type_hints(hint).get(key)
            path.append(key)
        elif typing.get_origin(hint) is dict:
            rest = ".".join(parts[i:])
            plain = re.fullmatch(r"[\w-]+", rest) is not None  # a pattern of module names stays as it is
            return (*path, rest.replace("-", "_") if plain else rest), typing.get_args(hint)[1] if rest else None
        elif entry is not None and part.isascii() and part.isdecimal():
            hint = entry
            path.append(int(part))
        else:
            return (), None
        if hint is None:
            return (), None
    return tuple(path), hint


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _entry_type(hint: Any) -> Any:
    """The type of a list's entries; None for what is not a list."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def _value(option: str, values: list[str], hint: Any) -> Any:
    entry = _entry_type(hint)
    may_be_list = any(_entry_type(kind) is not None for kind in _kinds(hint))
    table = dataclasses.is_dataclass(hint) or typing.get_origin(hint) is dict
    if len(values) == 1 and ((may_be_list and values[0].startswith("[")) or (table and values[0].startswith("{"))):
        return _toml(option, values[0])
    if entry is not None:
        if dataclasses.is_dataclass(entry):
            raise _error(f"{option} is a list of tables: write it as in TOML, such as {option} '[{{name = \"a\"}}]'.")
        return [_scalar(value, entry) for value in values]
    if table:
        return _pairs(option, values, hint)
    if not values:
        if hint is bool:
            return True
        raise _error(f"{option} needs a value.")
    if len(values) > 1:
        hint_of_list = f" A list is one value: {option} '[1, 2]'." if may_be_list else ""
        raise _error(
            f"{option} takes one value; {shortened(values[1])!r} is left over. Quote a value that has spaces.{hint_of_list}"
        )
    return _scalar(values[0], hint)


def _pairs(option: str, values: list[str], hint: Any) -> dict[str, Any]:
    """``num_heads 3 dim 192``: keys and values in turn."""
    if dataclasses.is_dataclass(hint):
        raise _error(
            f"{option} is a section: set one of its keys, such as {option}.{dataclasses.fields(hint)[0].name}."
        )
    if not values or len(values) % 2:
        raise _error(f"{option} is a table: write {option}.key value, or {option} '{{key = value}}'.")
    kind = typing.get_args(hint)[1]
    return {key: _scalar(value, kind) for key, value in zip(values[::2], values[1::2], strict=True)}


def _scalar(word: str, hint: Any) -> Any:
    """The word as the setting's type, or as what it looks like: validation then says what is wrong with it."""
    kinds = _kinds(hint)
    if type(None) in kinds and word in ("none", "null"):
        return None
    if bool in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if not {int, float, bool}.isdisjoint(kinds):
        number = _number(word)
        if number is not None:
            return number
    if kinds[0] is not str and typing.get_origin(kinds[0]) is not Literal and word[:1] in ("'", '"'):
        return _toml(word, word)
    return word


def _number(word: str) -> int | float | None:
    if not word.isascii():  # Python also reads the digits of other scripts
        return None
    if _INT.fullmatch(word):
        # so many digits that Python refuses to read them are no number of a setting either
        return int(word) if len(word) <= 400 else float("inf")
    try:
        return float(word)
    except ValueError:
        return None


def _toml(option: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError as err:
        raise _error(f"{option}: {shortened(text)!r} is not a TOML value: {err}.") from None


def _degrees(option: str, values: list[str]) -> list[Setting]:
    """``--parallel "pp8 dp8 tp8"`` as the settings that it stands for."""
    text = " ".join(values)
    if not text.strip():
        raise _error(f'{option} needs degrees, such as {option} "dp8 tp4".')
    try:
        spec = MeshSpec.parse(text)
    except ValueError as err:
        raise _error(f"{option} {shortened(text)!r}: {err}") from None
    return [Setting(option, ("parallel", axis), getattr(spec, axis)) for axis in _DEGREES]


def _put(tree: Any, path: Path, setting: Setting, defaults: Any) -> Any:
    """``tree`` with the value at ``path``; what is not a table or a list on the way is replaced, as in a later file."""
    if not path:
        if isinstance(setting.value, dict) and isinstance(tree, dict):
            return merge_trees(typing.cast("dict[str, Any]", tree), typing.cast("dict[str, Any]", setting.value))
        return setting.value
    key, rest = path[0], path[1:]
    if isinstance(key, int):
        entries = list(typing.cast("list[Any]", tree if isinstance(tree, list) else defaults or []))
        if key >= len(entries):
            raise _error(f"{setting.option}: the list has {len(entries)} entries; the first is 0.")
        entries[key] = _put(entries[key], rest, setting, None)
        return entries
    table = dict(typing.cast("dict[str, Any]", tree)) if isinstance(tree, dict) else {}
    below = typing.cast("dict[str, Any]", defaults).get(key) if isinstance(defaults, dict) else None
    value = _put(table.pop(key, None), rest, setting, below)
    return {key: value} | table  # first, as in `merge_trees`
