"""The command `titan-train`. Each command is one module, imported when it is called, so that `--help` is instant."""

import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "run": "train: start ranks here, on several machines or on Ray, and restart them after failures",
    "check": "validate a configuration; layout, memory and speed without training, on any number of devices",
    "init": "write a commented configuration to begin with: pretrain, continue, sft, lora or diffusion",
    "plan": "search layouts of a model on a number of devices; show the best and why",
    "plan calibrate": "measure this machine's operators by shape, or fit the planner to your own runs",
    "data prepare": "train the tokenizer and tokenize the corpus ahead of a run",
    "data show": "show samples of a configuration as the model reads them",
    "data tokenizer": "train a tokenizer on your text",
    "data download": "load a model, a tokenizer or a data set from the Hugging Face hub",
    "generate": "sample text from a run's last checkpoint",
    "eval": "perplexity and bits per byte of a model, and tasks of lm-evaluation-harness",
    "export": "write a run's model for Hugging Face, llama.cpp, ONNX, AOTInductor or DCP, compared with the run",
    "serve": "answer OpenAI's protocol on this machine with a run's model, and a page to chat in",
    "report": "write a run's one-page HTML report, compare several runs, or show where the time of steps went",
    "watch": "watch a run live, in the terminal or in a browser",
    "card": "prove what works for a model on this machine, and write a card of it",
    "doctor": "show versions, devices and backends, and how to install what is missing",
    "list": "show the shipped configurations and models",
    "slurm": "write a batch file that runs a configuration on several machines",
    "completion": "print a script that completes commands and settings in bash, zsh or fish",
}
"""Every command, with a line on each."""
REMOVED = {
    "estimate": "check CONFIG --hardware NAME --devices N",
    "dry-run": "check CONFIG --rehearse --devices N",
    "prepare": "data prepare CONFIG",
    "tokenizer": "data tokenizer --out DIR [FILE ...]",
    "download": "data download hf:REPO --out DIR",
    "calibrate": "plan calibrate RUN ...",
    "compare": "report RUN RUN ...",
    "trace": "report RUN --trace",
}
"""What to type instead of a command that is gone."""
_COUNTS_LEAKS = "triton._C.libtriton"
_NOT_ON_WINDOWS = ("run", "data prepare", "data show", "data tokenizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 the run failed, 2 the input was wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    first = words[0] if words else "--help"
    if first in ("-h", "--help"):
        print(_help(COMMANDS))
        return 0
    if first in ("-V", "--version"):
        from titan_train import __version__

        print(f"titan-train {__version__}")
        return 0
    name = next((name for n in (2, 1) if (name := " ".join(words[:n])) in COMMANDS), "")
    if name:
        from titan_train.cli.boundary import exit_code

        code = exit_code(lambda: _call(name, words[len(name.split()) :]))
        # The process ends: what it imported need not be searched for garbage, half a second after torch. Triton counts what is
        # left then, and would call it a leak.
        if argv is None and _COUNTS_LEAKS not in sys.modules:
            gc.freeze()
        return code
    group = {command: line for command, line in COMMANDS.items() if command.startswith(f"{first} ")}
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_help(group))
        return 0
    print(f"error: {_unknown(words, group or COMMANDS)}", file=sys.stderr)
    return 2


def _call(name: str, words: Sequence[str]) -> int:
    if sys.platform == "win32" and name in _NOT_ON_WINDOWS:
        raise ValueError(
            f"titan-train {name} needs Linux or macOS: it forks ranks and locks files. On Windows, run it in WSL 2. The "
            f"other commands work here: {', '.join(command for command in COMMANDS if command not in _NOT_ON_WINDOWS)}."
        )
    from titan_train.cli.parser import CommandParser

    command, text = load_command(name)
    return command(CommandParser(f"titan-train {name}", text), words)


def load_command(name: str) -> tuple[Callable[..., int], str]:
    """The function of a command and the text of its help page: the function's docstring, or its module's."""
    module, _, second = name.partition(" ")
    # a module called `list` would hide the built-in one in this package
    found = importlib.import_module(f"titan_train.cli.{'shipped' if module == 'list' else module}")
    command = getattr(found, second or "main")
    return command, inspect.getdoc(command if second else found) or ""


def _unknown(words: Sequence[str], choices: dict[str, str]) -> str:
    from titan_train.values import did_you_mean

    if words[0] in REMOVED:
        return f"`titan-train {words[0]}` is now `titan-train {REMOVED[words[0]]}`."
    name = words[0] if choices is COMMANDS else " ".join(words[:2])
    return f"unknown command {name!r}. {did_you_mean(name, choices)}Commands: {', '.join(choices)}."


def _help(commands: dict[str, str]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {text}" for name, text in commands.items()]
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
            "help:        titan-train help COMMAND;  titan-train run quickstart --help  lists every setting",
        ]
    )
