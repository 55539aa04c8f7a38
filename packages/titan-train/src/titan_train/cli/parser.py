"""The words of a command: its own options by argparse, settings by `titan_train.config.words`, errors in one language.

An error is a ValueError with one message, which the boundary prints; argparse would print its usage before it.
"""

import argparse
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from titan_train.terminal import shortened
from titan_train.values import did_you_mean

if TYPE_CHECKING:
    from titan_train.config import Config
    from titan_train.hub.choose import Part

_RENAMED = dict.fromkeys(("--gpus", "--gpu", "--world", "--nproc"), "--devices")


class CommandParser(argparse.ArgumentParser):
    """argparse, without abbreviations and with errors that name the nearest option or choice."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, formatter_class=_Formatter, allow_abbrev=False)
        self._download = False

    def add_config(self) -> None:
        """Add what every command on a configuration takes: its name, and ``--download``."""
        self.add_argument("config", metavar="CONFIG", help="TOML file, or name of a shipped configuration")
        loads = "load each hf:ORG/NAME that it names and that is not here from the Hugging Face hub, into ORG/NAME"
        self.add_argument("--download", action="store_true", help=loads)

    def add_code(self, help: str = "folder or package that holds the model's own module; may be repeated") -> None:
        """Add ``--code``."""
        self.add_argument("--code", metavar="DIR|PACKAGE", action="append", default=[], help=help)

    def add_trust(self) -> None:
        """Add what every command that loads a run takes: ``--trust-code`` and ``--code``."""
        self.add_argument(
            "--trust-code",
            action="store_true",
            help="run the model code that a folder made elsewhere names; read it first",
        )
        self.add_code("folder or installed package that holds that code; may be repeated")

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{_in_our_words(message)} See `{self.prog} --help`.")

    def options(self) -> list[str]:
        """The command's own options, and those that are short for a setting."""
        own = [option for option in self._option_string_actions if option.startswith("--")]
        return [*own, *re.findall(r"^(--[\w.-]+) ", self.description or "", re.MULTILINE)]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse; a misspelt option is named before a missing one.

        Raises:
            ValueError: An option does not exist.
        """
        for word in itertools.takewhile(lambda word: word != "--", args or ()):
            if word.startswith("--") and (option := word.partition("=")[0]) not in self._option_string_actions:
                hint = did_you_mean(_RENAMED.get(option, option), self.options())
                raise ValueError(f"unknown option {shortened(option)!r}. {hint}See `{self.prog} --help`.")
        return super().parse_known_args(args, namespace)

    def parse_with_settings(
        self, words: Sequence[str], written_out: Callable[[str], str] = str
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the command's own options and hand back the words of the settings.

        A word that begins with ``--`` and is not an option of the command begins a setting. ``CONFIG --help`` prints the
        command's help and every setting with its value, and exits.

        Args:
            words: The command line after the command.
            written_out: Turns a short option into the setting that it stands for.

        Returns:
            The arguments, and the settings for `read_config`.

        Raises:
            ValueError: As `error`.
        """
        own: list[str] = []
        settings: list[str] = []
        target = own
        for word in words:
            if word.startswith("--"):
                option = word.partition("=")[0]
                target = own if option in self._option_string_actions or option in _RENAMED else settings
            elif word == "-h":
                target = own
            target.append(written_out(word) if target is settings else word)
        if not {"-h", "--help"}.isdisjoint(own) and own and not own[0].startswith("-"):
            from titan_train.config.help import settings_help

            print(f"{self.format_help()}\n{settings_help(self.read_config(own[0], settings))}")
            self.exit()
        arguments = self.parse_args(own)
        self._download = getattr(arguments, "download", False)
        return arguments, settings

    def read_config(self, name: str, settings: Sequence[str]) -> "Config":
        """Load a configuration with the settings of the command line.

        Raises:
            ValueError: As `titan_train.config.load_config`.
        """
        from titan_train.config import load_config

        def note(taken: str) -> None:
            if os.environ.get("RANK", "0") == "0":  # under torchrun every rank reads the configuration
                print(f"init     {taken}", file=sys.stderr)

        fetch = _fetch if self._download else None
        return load_config(name, settings, also=self.options(), note=note, fetch=fetch)


def _fetch(key: str, repository: str) -> None:
    """Load a repository of the hub into the folder of its name."""
    from titan_train.hub import download

    parts: dict[str, tuple[Part, ...]] = {"tokenizer.path": ("tokenizer",), "model.name": ("config", "tokenizer")}
    wanted = parts.get(key, ("weights", "tokenizer", "config"))
    out = repository.removeprefix("hf:")
    download(repository, out, parts=wanted, tell=lambda text: print(f"download {text}", file=sys.stderr))


def integer(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """The ``type`` of an option that takes an integer in [least, most]."""

    def read(word: str) -> int:
        if re.fullmatch(r"[+-]?\d{1,25}", word, re.ASCII) and least <= int(word) <= most:
            return int(word)
        raise argparse.ArgumentTypeError(_must_be(word, "an integer", least, most if most < 2**63 - 1 else math.inf))

    return read


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """The ``type`` of an option that takes a finite number in [least, most]."""

    def read(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and least <= value <= most:
            return value
        raise argparse.ArgumentTypeError(_must_be(word, "a finite number", least, most))

    return read


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


def _must_be(word: str, what: str, least: float, most: float) -> str:
    between = [f"at least {least}"] if least > -math.inf else []
    between += [f"at most {most}"] if most < math.inf else []
    return f"{shortened(word)!r} must be {what}{', ' if between else ''}{' and '.join(between)}"


def _in_our_words(message: str) -> str:
    """Argparse's message as one sentence, with the nearest choice."""
    if match := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
        word = match[1].split()[0] if match[1].split() else match[1]
        return f"unexpected {shortened(word)!r}."
    if match := re.fullmatch(r"argument (.*): invalid choice: (.*) \(choose from (.*)\)", message, re.DOTALL):
        choices = [choice.strip("' ") for choice in match[3].split(",")]
        given = match[2].strip("'")
        hint = did_you_mean(given, choices)
        return f"{match[1]} {shortened(given)!r} must be one of {', '.join(choices)}. {hint}".strip()
    return message.removeprefix("argument ").rstrip(".") + "."
