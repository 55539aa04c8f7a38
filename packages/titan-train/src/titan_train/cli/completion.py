"""Print a script that completes titan-train's commands, options, configurations and settings in a shell.

bash: `titan-train completion bash > ~/.local/share/bash-completion/completions/titan-train`
zsh:  `titan-train completion zsh > ~/.titan-train.zsh`, and `source ~/.titan-train.zsh` in ~/.zshrc
fish: `titan-train completion fish > ~/.config/fish/completions/titan-train.fish`
"""

import contextlib
import dataclasses
import importlib
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from titan_train.cli.shell.parser import CommandParser

_BASH = """\
# titan-train: completion of commands, options, configurations and settings
_titan_train() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={commands}
  else
    case ${{COMP_WORDS[1]}} in
{cases}
      *) words= ;;
    esac
    case $word in
      --*) ;;
      *) compopt -o default 2>/dev/null ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _titan_train titan-train
"""


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to complete in")
    arguments = parser.parse_args(words)
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for a shell: bash, zsh or fish."""
    from titan_train.cli import COMMANDS

    choices = {name: _choices(name) for name in COMMANDS}
    if shell == "fish":
        return _fish(COMMANDS, choices)
    cases = "\n".join(f"      {name}) words={shlex.quote(' '.join(words))} ;;" for name, words in choices.items())
    bash = _BASH.format(commands=shlex.quote(" ".join(COMMANDS)), cases=cases)
    return f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{bash}" if shell == "zsh" else bash


def _fish(commands: Mapping[str, str], choices: Mapping[str, Sequence[str]]) -> str:
    lines = ["# titan-train: completion of commands, options, configurations and settings"]
    for name, text in commands.items():
        lines.append(f"complete -c titan-train -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}")
    for name, words in choices.items():
        if words:
            there = f"-n '__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c titan-train {there} -a {shlex.quote(' '.join(words))}")
    return "\n".join(lines) + "\n"


def _choices(command: str) -> list[str]:
    """What may follow a command: its options; and configurations and settings where it takes a configuration."""
    from titan_train.cli import module_of
    from titan_train.config import Config, list_configs

    module = importlib.import_module(module_of(command))
    asked = _Asked(f"titan-train {command}", module.__doc__)
    with contextlib.suppress(_Asked.Answer):
        module.main(asked, [])
    found = sorted(asked.options())
    for action in asked._actions:  # argparse has no public list of them
        if not action.option_strings and action.choices:
            found += [str(choice) for choice in action.choices]
    if asked.takes_config:
        found += [*list_configs(), *sorted(_settings("", Config))]
    return found


def _settings(prefix: str, kind: type) -> Iterator[str]:
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _settings(f"{prefix}{name}.", typing.cast("type", hint))
        else:
            yield f"--{prefix}{name.replace('_', '-')}"


class _Asked(CommandParser):
    """Takes a command's options, and stops where the command would read the words that were typed."""

    class Answer(Exception):
        """All options are known."""

    takes_config = False

    def add_config(self, *words: Any, **named: Any) -> None:
        """Note that configurations and settings may follow."""
        super().add_config(*words, **named)
        self.takes_config = True

    def parse_args(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Stop."""
        raise self.Answer

    def parse_intermixed_args(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Stop."""
        raise self.Answer

    def parse_with_settings(self, *_: Any, **__: Any) -> NoReturn:
        """Stop."""
        raise self.Answer
