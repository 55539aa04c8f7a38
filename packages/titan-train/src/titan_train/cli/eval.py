"""Evaluate a run or an exported folder.

`titan-train eval runs/quickstart --text book.txt` prints perplexity and bits per byte of texts (files, or JSON lines with a
text). `--tasks` runs tasks of lm-evaluation-harness (extra `eval`); `--include-path` adds task files of yours, which need no
network. On several GPUs: `torchrun --nproc-per-node 4 -m titan_train eval ...`; each rank takes a share of the texts.
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_train.cli.parser import CommandParser, integer


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="a run's folder or an exported one")
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="texts to predict")
    parser.add_argument("--tasks", default="", metavar="NAMES", help="tasks of lm-evaluation-harness, with commas")
    parser.add_argument("--include-path", type=Path, default=None, metavar="DIR", help="folder with task files")
    parser.add_argument("--num-fewshot", type=integer(0), default=None, metavar="N", help="default: the task's")
    parser.add_argument(
        "--limit", type=integer(1), default=None, metavar="N", help="documents of each task; default all"
    )
    parser.add_argument("--batch-size", type=integer(1), default=8, metavar="N", help="rows of a forward; default 8")
    parser.add_argument(
        "--max-length",
        type=integer(2),
        default=None,
        metavar="N",
        help="tokens read at once; default: as a run was trained, or as an exported folder says",
    )
    parser.add_argument("--step", type=integer(0), default=None, help="checkpoint of a run (default: the newest)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all results there")
    parser.add_trust()
    arguments = parser.parse_args(words)
    tasks = [name for name in arguments.tasks.split(",") if name]
    if not tasks and not arguments.text:
        raise ValueError("there is nothing to evaluate. Name files with --text, or tasks with --tasks.")
    if tasks and importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--tasks needs lm-evaluation-harness, which is not installed. Install titan-train[eval].")

    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.absolute().parent.is_dir()):
        raise ValueError(f"--json {arguments.json}: there is no such folder to write a file in. Make it first.")

    from titan_train.eval.ranks import join_ranks

    with join_ranks() as ranks:
        results = _evaluate(arguments, tasks, ranks)
    if results is not None and arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    return 0


def _evaluate(arguments: argparse.Namespace, tasks: list[str], ranks: Any) -> dict[str, Any] | None:
    from titan_train.eval.model import load_eval_model
    from titan_train.eval.perplexity import perplexity, read_texts
    from titan_train.eval.ranks import local_device

    texts = read_texts(arguments.text)
    model = load_eval_model(
        arguments.folder,
        step=arguments.step,
        max_length=arguments.max_length,
        device=local_device(),
        trust_code=arguments.trust_code,
        code=arguments.code,
        ranks=ranks,
    )
    results: dict[str, Any] = {"model": model.name, "max_length": model.max_length}
    if texts:
        found = perplexity(model, texts, batch_size=arguments.batch_size, ranks=ranks)
        results["text"] = asdict(found) | {"perplexity": found.per_token, "bits_per_byte": found.bits_per_byte}
        if ranks.rank == 0:
            print(
                f"{found.texts} texts, {found.tokens:,} tokens, {found.bytes:,} bytes, read {found.max_length} at once\n"
                f"perplexity     {found.per_token:.4f} per token\nbits per byte  {found.bits_per_byte:.4f}"
            )
    if tasks:
        from titan_train.eval.harness import run_tasks

        answer = run_tasks(
            model, tasks, batch_size=arguments.batch_size, ranks=ranks, include=arguments.include_path,
            limit=arguments.limit, num_fewshot=arguments.num_fewshot,
        )  # fmt: skip
        if answer is not None:
            results["tasks"], results["samples"] = answer["results"], answer["samples"]
            _print_tasks(answer["results"])
    return results if ranks.rank == 0 else None


def _print_tasks(results: dict[str, dict[str, Any]]) -> None:
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                print(f"{task:<24} {name.partition(',')[0]:<20} {value:.4f}")
