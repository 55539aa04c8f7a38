"""Print a script that completes titan-train's commands, options, configurations and settings in a shell.

bash: `titan-train completion bash > ~/.local/share/bash-completion/completions/titan-train`
zsh:  `titan-train completion zsh > ~/.titan-train.zsh`, and `source ~/.titan-train.zsh` in ~/.zshrc
fish: `titan-train completion fish > ~/.config/fish/completions/titan-train.fish`
"""

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from titan_train.cli.parser import CommandParser

_BASH = """\
# titan-train: completion of commands, options, configurations and settings
_titan_train() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
  esac
  case $word in
    --*) ;;
    *) [ "$COMP_CWORD" -eq 1 ] || compopt -o default 2>/dev/null ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _titan_train titan-train
"""


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to complete in")
    print(script(parser.parse_args(words).shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for a shell: bash, zsh or fish."""
    from titan_train.cli import COMMANDS

    after: dict[str, list[str]] = {"": []}  # what may follow each beginning of a command
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        if first not in after:
            after[""].append(first)
            after[first] = [] if second else _choices(first)
        if second:
            after[first].append(second)
            after[name] = _choices(name)
    if shell == "fish":
        return _fish(COMMANDS, after)
    longest_first = sorted(after, key=lambda name: -len(name))
    cases = "\n".join(
        f"    {shlex.quote(f'{name} ' if name else ' ')}{'*' if name else ''}) words={shlex.quote(' '.join(after[name]))} ;;"
        for name in longest_first
    )
    bash = _BASH.format(cases=cases)
    return f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{bash}" if shell == "zsh" else bash


def _fish(commands: Mapping[str, str], after: Mapping[str, Sequence[str]]) -> str:
    lines = ["# titan-train: completion of commands, options, configurations and settings"]
    for name in after[""]:
        line = commands.get(name) or next(text for command, text in commands.items() if command.startswith(f"{name} "))
        lines.append(f"complete -c titan-train -n __fish_use_subcommand -f -a {name} -d {shlex.quote(line)}")
    for name, words in after.items():
        if name and words:
            there = " && ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
            lines.append(f"complete -c titan-train -n '{there}' -a {shlex.quote(' '.join(words))}")
    return "\n".join(lines) + "\n"


def _choices(command: str) -> list[str]:
    """What may follow a command: its options; and configurations and settings where it takes a configuration."""
    from titan_train.cli import load_command
    from titan_train.config import Config, list_configs
    from titan_train.config.words import option_names

    asked = _Asked(f"titan-train {command}", None)
    with contextlib.suppress(_Asked.Answer):
        load_command(command)[0](asked, [])
    found = sorted(asked.options())
    for action in asked._actions:  # argparse has no public list of them
        if not action.option_strings and action.choices:
            found += [str(choice) for choice in action.choices]
    return [*found, *list_configs(), *sorted(option_names(Config))] if asked.takes_config else found


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

    parse_with_settings = parse_intermixed_args = parse_args  # type: ignore[assignment]
