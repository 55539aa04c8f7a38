"""Continue a prompt with the model of a run's last checkpoint.

`titan-train generate runs/quickstart --prompt "def main("` prints tokens as they are made. Runs on one process, on a
GPU if there is one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titan_train.tokenizers import Tokenizer


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/quickstart")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default 200")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token; default 0.8")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest; 0: all (default)"
    )
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling; default 0.95")
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P x the likeliest; default 0"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is none (default)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="continuations; default 1")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--step", type=int, default=None, help="checkpoint to use (default: the last)")
    arguments = parser.parse_args(words)

    import torch

    from titan_train.generate import Sampling, stream
    from titan_train.tokenizers import IncrementalDecoder

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer, step = load_run(arguments.run_dir, device, arguments.step)
    ids = tokenizer.encode(arguments.prompt).tolist()
    if not ids:
        raise ValueError("--prompt is empty: give at least one character to continue.")
    print(f"{arguments.run_dir}, step {step}, on {device.type}", file=sys.stderr)
    for sample in range(arguments.samples):
        decoder = IncrementalDecoder(tokenizer)
        print(arguments.prompt, end="", flush=True)
        for (token,) in stream(
            model, [ids], max_new_tokens=arguments.max_new_tokens, sampling=sampling, stop_ids=[tokenizer.eos_id],
            seeds=[arguments.seed + sample],
        ):  # fmt: skip
            if token is not None:
                print(decoder.push(token), end="", flush=True)
        print(decoder.flush())
        if sample + 1 < arguments.samples:
            print("-" * 40)
    return 0


def load_run(run_dir: Path, device: "torch.device", step: int | None = None) -> "tuple[nn.Module, Tokenizer, int]":
    """Load the model and the tokenizer of a run into this process.

    Args:
        run_dir: The run's folder.
        device: Where the weights go.
        step: Which checkpoint; None takes the newest valid one.

    Returns:
        The model in evaluation mode, its tokenizer, and the step.

    Raises:
        ValueError: The folder is not a run's, or has no such checkpoint.
    """
    from titan_ckpt import Checkpointer, TrainState

    from titan_train.data import build_tokenizer
    from titan_train.models import build_model
    from titan_train.run_folder import newest_checkpoint, read_config

    config = read_config(run_dir)
    if newest_checkpoint(run_dir) is None:
        raise ValueError(
            f"{run_dir} has no finished checkpoint yet: let `titan-train run` reach one, or set checkpoint.every."
        )
    tokenizer = build_tokenizer(config.tokenizer, config.data)
    model = build_model(config.model, vocab_size=tokenizer.vocab_size, device=device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with Checkpointer(run_dir / "checkpoints") as checkpointer:
        found = checkpointer.restore(TrainState(model=model, rng=False), "latest" if step is None else step)
    return model.eval(), tokenizer, found
