"""The help page of the settings: each with the type of its value, what it is now, and its docstring."""

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from typing import Any, Literal

from titan_train.config.schema import Config
from titan_train.config.words import settings_of
from titan_train.terminal import shortened

_WIDTH = 100
_NAMES: dict[Any, str] = {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT"}


def settings_help(config: Config) -> str:
    """Every setting with its value in ``config``, section by section."""
    lines = [
        "settings:  --section.key value on the command line is key = value under [section] in TOML.",
        "           Lists are words or '[1, 2]'; tables are --section.table.key value or '{key = value}'.",
    ]
    section: tuple[str, ...] = ()
    docs: dict[str, str] = {}
    for keys, cls, hint in settings_of(type(config)):
        if keys[:-1] != section:
            section, docs = keys[:-1], field_docs(cls)
            lines += ["", f"[{'.'.join(section)}]  {inspect.getdoc(cls)}"]
        value = functools.reduce(getattr, keys, config)
        lines.append(f"  --{'.'.join(keys).replace('_', '-')} {_kind(hint)}   ({_shown(value)})")
        lines += textwrap.wrap(docs.get(keys[-1], ""), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, in one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def _kind(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return "|".join(_kind(argument) for argument in arguments)
    if origin is tuple:
        return "TABLES" if dataclasses.is_dataclass(arguments[0]) else "LIST"
    return "TABLE" if origin is dict else _NAMES.get(hint, "VALUE")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = [getattr(entry, "name", entry) for entry in typing.cast("tuple[Any, ...]", value)]
    return shortened(repr(value) if value == "" else str(value))
