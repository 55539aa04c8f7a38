"""Continue a prompt with the model of a run's last checkpoint.

`titan-train generate runs/quickstart --prompt "def main("` prints tokens as they are generated. Uses one process, on a
GPU if there is one.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from titan_train.cli.shell.parser import CommandParser, integer, number


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/quickstart")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=integer(1), default=200, metavar="N", help="default 200")
    parser.add_argument(
        "--temperature", type=number(0), default=0.8, help="0 always takes the most likely token; default 0.8"
    )
    parser.add_argument(
        "--top-k",
        type=integer(0),
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; 0: all (default)",
    )
    parser.add_argument("--top-p", type=number(0, 1), default=0.95, metavar="P", help="nucleus sampling; default 0.95")
    parser.add_argument(
        "--min-p",
        type=number(0, 1),
        default=0.0,
        metavar="P",
        help="drop tokens below P times the most likely one; default 0",
    )
    parser.add_argument("--repetition-penalty", type=number(0), default=1.0, metavar="X", help="1 disables (default)")
    parser.add_argument("--samples", type=integer(1), default=1, metavar="N", help="continuations; default 1")
    parser.add_argument("--seed", type=integer(0), default=0, help="default 0")
    parser.add_argument("--step", type=integer(0), default=None, help="checkpoint to use (default: the last)")
    parser.add_trust()
    arguments = parser.parse_args(words)

    from titan_train.generation import Sampling, load_run

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    if not arguments.prompt:
        raise ValueError("--prompt is empty: give at least one character to continue.")
    run = load_run(arguments.run_dir, step=arguments.step, trust_code=arguments.trust_code, code=arguments.code)
    device = next(run.model.parameters()).device.type
    print(f"{arguments.run_dir}, step {run.step}, on {device}", file=sys.stderr)
    for sample in range(arguments.samples):
        print(arguments.prompt, end="", flush=True)
        seed = arguments.seed + sample
        for text in run.stream(arguments.prompt, max_new_tokens=arguments.max_new_tokens, sampling=sampling, seed=seed):
            print(text, end="", flush=True)
        print()
        if sample + 1 < arguments.samples:
            print("-" * 40)
    return 0
