"""The command `titan-train`. Each command is one module, imported when it is called, so that `--help` is instant."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "run": "train: start ranks here, on several machines or on Ray, and restart them after failures",
    "slurm": "write a batch file that runs a configuration on several machines",
    "check": "validate a configuration; show layout, parameters and memory without training",
    "estimate": "estimate a configuration's speed and memory on a machine, by term",
    "plan": "search layouts of a model on a number of devices; show the best and why",
    "calibrate": "fit the planner to your own runs",
    "dry-run": "rehearse one rank of a large run on fake tensors: memory, and transfers by axis",
    "prepare": "train the tokenizer and tokenize the corpus ahead of a run",
    "tokenizer": "train a tokenizer on your text",
    "data": "show samples of a configuration as the model reads them",
    "download": "load a model, a tokenizer or a data set from the Hugging Face hub",
    "generate": "sample text from a run's last checkpoint",
    "serve": "answer OpenAI's protocol on this machine with a run's model, and a page to chat in",
    "eval": "perplexity and bits per byte of a model, and tasks of lm-evaluation-harness",
    "export": "write a run's model for Hugging Face, llama.cpp, ONNX, AOTInductor or DCP, compared with the run",
    "report": "write a run's one-page HTML report",
    "watch": "watch a run while it goes on, in the terminal or in a browser",
    "trace": "where the time of a run's steps went, by rank and mesh axis; all ranks on one clock",
    "compare": "compare runs on one page: curves, numbers, settings that differ",
    "list": "show the shipped configurations and models",
    "doctor": "show versions, devices and backends, and how to install what is missing",
    "completion": "print a script that completes commands and settings in bash, zsh or fish",
}
"""Every command, with a line on each."""
_FOLDERS = {
    "inputs": ("prepare", "tokenizer", "data", "download"),
    "trained": ("generate", "export", "report", "compare", "serve", "eval", "trace", "watch"),
}
"""Where a command's module is; the others are in this folder."""
_NOT_ON_WINDOWS = ("run", "prepare", "tokenizer", "data", "dry-run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 the run failed, 2 the input was wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from titan_train import __version__

        print(f"titan-train {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        from titan_train.values import did_you_mean

        hint = did_you_mean(name, COMMANDS)
        print(f"titan-train: unknown command {name!r}. {hint}Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    from titan_train.cli.shell.boundary import exit_code

    return exit_code(lambda: _call(name, rest))


def _call(name: str, words: Sequence[str]) -> int:
    if sys.platform == "win32" and name in _NOT_ON_WINDOWS:
        raise ValueError(
            f"titan-train {name} needs Linux or macOS: it forks ranks and locks files. On Windows, run it in WSL 2. The "
            f"other commands work here: {', '.join(command for command in COMMANDS if command not in _NOT_ON_WINDOWS)}."
        )
    from titan_train.cli.shell.parser import CommandParser

    command = importlib.import_module(module_of(name))
    return command.main(CommandParser(f"titan-train {name}", command.__doc__), words)


def module_of(name: str) -> str:
    """The module of a command."""
    folder = next((f"{folder}." for folder, names in _FOLDERS.items() if name in names), "")
    # a module called `list` would hide the built-in one in this package
    module = "shipped" if name == "list" else name.replace("-", "_")
    return f"titan_train.cli.{folder}{module}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: titan-train COMMAND ...",
            "",
            "LLM pretraining from one TOML file.",
            "",
            "commands:",
            *lines,
            "",
            "start here:  titan-train run quickstart",
            "help:        titan-train COMMAND --help;  titan-train run quickstart --help  lists every setting",
        ]
    )
