"""Errors of a configuration: which key, which value, why it cannot work, and the nearest thing that would."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from titan_train.config.elsewhere import here_it_is
from titan_train.terminal import shortened
from titan_train.values import nearest_name

_SHOWN = 20
_LINE = 1000


class ConfigError(ValueError):
    """The problems of a configuration, one line per problem; the message has the first twenty."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [line if len(line) <= _LINE else f"{line[:_LINE]} ..." for line in self.problems[:_SHOWN]]
        more = [f"and {len(self.problems) - _SHOWN} more"] if len(self.problems) > _SHOWN else []
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  {line}" for line in lines + more))


def describe_unknown_key(path: str, key: str, known: Iterable[str], inside: str = "") -> str:
    """One line for a key that does not exist, with the nearest that does, or what another trainer's is called here.

    Args:
        path: The section.
        key: The key in it.
        known: The keys that the section has.
        inside: The setting of a list's entries that has this name.
    """
    known = list(known)
    prefix = f"{path}." if path else ""
    nearest = nearest_name(key, known)
    hint = f"did you mean {prefix}{nearest}?" if nearest else f"{path or 'the top level'} has {', '.join(known)}."
    hint = (f"it is of each entry: {inside}." if inside else here_it_is(f"{prefix}{key}")) or hint
    return f"{prefix}{key}: unknown key; {hint}"


def describe_unknown_option(option: str, settings: Sequence[str], also: Sequence[str] = (), inside: str = "") -> str:
    """One line for an option that does not exist, with the nearest that does.

    Args:
        option: As it was typed.
        settings: Every setting, such as ``--train.steps``.
        also: The command's other options.
        inside: The setting of a list's entries that has this name.
    """
    if inside:
        return f"{option}: unknown option; it is of each entry: --{inside.replace('_', '-')}."
    if elsewhere := here_it_is(option):
        return f"{option}: unknown option; {elsewhere}"
    section, dot, key = option.rpartition(".")
    siblings = [name for name in settings if dot and name.startswith(f"{section.replace('_', '-')}.")]
    by_key = {name.rpartition(".")[2]: name for name in reversed(settings)}
    last = nearest_name(key if dot else option[2:], by_key)  # a key without its section, or with another
    others = [name for name in also if name != "--help"]
    nearest = nearest_name(option, siblings or others) or (by_key[last] if last else nearest_name(option, settings))
    hint = f"did you mean {nearest}?" if nearest else "`--help` after the name of a configuration lists all."
    return f"{option}: unknown option; {hint}"


def describe_validation_error(error: ValidationError) -> list[str]:
    """One line for each of pydantic's findings."""
    lines: list[str] = []
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        if item["type"] == "json_invalid":  # what TOML takes and JSON does not: more than 200 levels
            lines.append("it is nested too deeply. Flatten its tables and lists.")
            continue
        location = [part for part in item["loc"] if not _is_union_tag(part)]
        key = ".".join(str(part) for part in location)
        if item["type"] == "value_error":  # raised by one of our own __post_init__: the message says it all
            problems = str(item.get("ctx", {})["error"]).split("\n")
            lines += [p if not key or p.startswith(key.split(".")[0]) else f"{key}: {p}" for p in problems]
            continue
        if key in seen:  # another branch of a union that did not match either
            continue
        line = f"{key} = {_show(item['input'])}: {_reason(item)}"
        seen.add(key)
        lines.append(line)
    return lines


_TYPES = {
    "int_type": "an integer, such as 4",
    "int_from_float": "an integer, such as 4",
    "float_type": "a number, such as 0.1",
    "string_type": 'a string, such as "name"',
    "bool_type": "true or false",
    "tuple_type": "a list, such as [1, 2]",
    "dict_type": "a table of keys and values",
    "dataclass_type": "a table of keys and values",
}


_GRAPHS_OF_BLOCKS = (
    "replays a CUDA graph for each block, which validation and gradient accumulation overwrite before its results are read. "
    "Use compile.cudagraphs=true, one graph for the whole step, and compile.mode = "
)
_INSTEAD = {
    ("launch.launcher", "torchrun"): "is now 'machines' on several machines and 'local' on one. "
    "Under a torchrun of your own, `torchrun ... -m titan_train run CONFIG`, leave it out.",
    ("compile.mode", "reduce-overhead"): f'{_GRAPHS_OF_BLOCKS}"default".',
    ("compile.mode", "max-autotune"): f'{_GRAPHS_OF_BLOCKS}"max-autotune-no-cudagraphs".',
}
"""What to use instead of values that an earlier version or torch has."""


def _reason(item: Any) -> str:
    kind, given = item["type"], item["input"]
    if kind == "literal_error" and (instead := _INSTEAD.get((".".join(map(str, item["loc"])), str(given)))):
        return instead
    if kind == "literal_error":
        choices = [c.strip("'") for c in item["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        nearest = nearest_name(given, choices)
        return f"must be one of {', '.join(choices)}; " + (
            f'did you mean "{nearest}"?' if nearest else f'try "{choices[0]}".'
        )
    if kind in _TYPES:
        reason = f"must be {_TYPES[kind]}, not {_type_name(given)}"
        if isinstance(given, str) and _reads_as(given, kind):
            reason += "; write it without quotes"
        elif kind.startswith("int") and isinstance(given, float):
            reason += f"; the nearest is {round(given)}" if abs(given) < 2**63 else ""
        section = str(item["loc"][0]) if kind == "dataclass_type" and len(item["loc"]) == 1 else ""
        elsewhere = here_it_is(section)  # another trainer's setting has the name of a section here
        return f"{reason}; {elsewhere}" if elsewhere else f"{reason}."
    if kind == "missing":
        return "is required and missing."
    return item["msg"][0].lower() + item["msg"][1:] + "."


def _reads_as(text: str, kind: str) -> bool:
    """Whether text would be a value of the wanted type if it were not text."""
    if kind.startswith("bool"):
        return text in ("true", "false")
    try:
        return kind.startswith(("int", "float")) and math.isfinite(float(text))
    except ValueError:
        return False


def _is_union_tag(part: object) -> bool:
    """Pydantic names the branch of a union in the location, such as ``int`` or ``literal['a','b']``."""
    return isinstance(part, str) and (
        part in ("int", "float", "str", "bool") or part.startswith(("literal[", "constrained-"))
    )


def _type_name(value: object) -> str:
    names: dict[type, str] = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "a boolean",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), type(value).__name__)


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(f'"{value}"' if isinstance(value, str) else str(value))
