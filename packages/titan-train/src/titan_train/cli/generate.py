"""Continue prompts with a run's model or with an exported one.

`titan-train generate runs/quickstart --prompt "def main("` prints tokens as they are generated. Several `--prompt`s run as
one batch; `--chat` takes the prompt as a message and writes it with the run's chat template. Uses one process, on a GPU if
there is one; `torchrun --nproc-per-node 4 -m titan_train generate ...` cuts the model over four. A folder of
`titan-train export` is run by the library of its users (transformers, onnxruntime, AOTInductor, llama.cpp), which takes the
most likely token: `--temperature 0`.

A diffusion model makes images: `titan-train generate runs/flux_shapes --prompt "a red disc at the top left" --out disc.png`.
"""

import argparse
import contextlib
import gc
import os
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_train.cli.parser import CommandParser, integer, number

if TYPE_CHECKING:
    import torch.distributed as dist

    from titan_train.generation import LoadedRun, Sampling, TextPiece


_SMALL = 20_000_000
"""Parameters below which one thread decodes with the least work."""


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument(
        "run_dir", metavar="DIR", type=Path, help="a run's folder, such as runs/quickstart, or an exported one"
    )
    parser.add_argument("--prompt", required=True, action="append", help="text to continue; several run as one batch")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="shown before the prompt, to a vision-language model; several are shown in order",
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a message to answer, see tokenizer.chat_template"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        type=_stop_word,
        metavar="WORD",
        help=r"end the text before this word; \n in it is a newline, \t a tab, \\ a backslash",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the step of one token, for many tokens on a GPU"
    )
    parser.add_argument(
        "--draft",
        action="store_true",
        help="with --temperature 0: the run's mtp_depth modules draft tokens, which the model verifies several at a time",
    )
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
    parser.add_argument("--samples", type=integer(1, 4096), default=1, metavar="N", help="continuations; default 1")
    parser.add_argument("--seed", type=integer(0), default=0, help="default 0")
    parser.add_argument("--out", type=Path, metavar="FILE", help="PNG file of a diffusion model's images")
    parser.add_argument(
        "--sample-steps", type=integer(1), metavar="N", help="Euler steps of an image; default: the run's sample_steps"
    )
    parser.add_argument(
        "--sample-scale",
        type=number(0),
        metavar="X",
        help="guidance towards the prompt, of an image; default: the run's sample_scale",
    )
    parser.add_argument("--step", type=integer(0), default=None, help="checkpoint to use (default: the last)")
    parser.add_trust()
    arguments = parser.parse_args(words)

    if arguments.out is not None:
        return _images(arguments)
    if arguments.sample_steps is not None or arguments.sample_scale is not None:
        raise ValueError("--sample-steps and --sample-scale are for images: add --out FILE, or leave them out.")
    if "" in arguments.prompt:
        raise ValueError("--prompt is empty: give at least one character to continue.")
    from titan_train.export.load import target_of

    if target_of(arguments.run_dir) is not None:
        return _exported(arguments)

    from titan_train.generation import Sampling, load_run

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    with _ranks() as group:
        gc.disable()  # importing torch and building the model makes a million objects that stay
        try:
            run = load_run(
                arguments.run_dir,
                step=arguments.step,
                device=_device() if group is not None else None,
                group=group,
                trust_code=arguments.trust_code,
                code=arguments.code,
            )
        finally:
            gc.enable()
        first = group is None or group.rank() == 0
        if first:
            device = next(run.model.parameters()).device.type
            ranks = "" if group is None else f", {group.size()} ranks"
            print(f"{arguments.run_dir}, step {run.step}, on {device}{ranks}", file=sys.stderr)
        with _few_threads(run):
            _continue(arguments, run, sampling, shown=first)
    return 0


def _stop_word(word: str) -> str:
    r"""Shells pass ``"\n"`` as two characters."""
    return re.sub(r"\\([\\nt])", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), word)


@contextlib.contextmanager
def _few_threads(run: "LoadedRun") -> "Generator[None]":
    """One thread for a small model on a CPU, unless the user says how many.

    The products of one token are shorter than the wait for another thread, which spins: 200 tokens of quickstart's model took 6.2
    CPU-seconds on two threads of a busy machine and 1.2 on one.
    """
    import torch

    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    before = torch.get_num_threads()
    few = (
        next(run.model.parameters()).device.type == "cpu"
        and parameters < _SMALL
        and "OMP_NUM_THREADS" not in os.environ
    )
    if few:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if few:
            torch.set_num_threads(before)


def _images(arguments: argparse.Namespace) -> int:
    """Write the images of the prompts by a diffusion model."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--out: images are sampled by one process. Run titan-train generate without torchrun.")
    if arguments.out.suffix.lower() != ".png":
        raise ValueError(f"--out {arguments.out}: images are written as PNG. Name a file that ends with .png.")
    for option in ("image", "chat", "stop", "compile", "draft"):
        if getattr(arguments, option):
            raise ValueError(f"--{option} is for text, and --out for images. Leave one of them out.")
    from titan_train.tasks.diffusion.show import show_captions

    captions = [prompt for prompt in arguments.prompt for _ in range(arguments.samples)]
    step = show_captions(
        arguments.run_dir,
        captions,
        arguments.out,
        step=arguments.step,
        steps=arguments.sample_steps,
        scale=arguments.sample_scale,
        seed=arguments.seed,
        device=_device(),
    )
    print(f"{arguments.out}: {len(captions)} images of {arguments.run_dir}, step {step}")
    return 0


@contextlib.contextmanager
def _ranks() -> "Generator[dist.ProcessGroup | None]":
    """The ranks of this process's group or torchrun; None without either."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield dist.group.WORLD
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
    else:
        if torch.cuda.is_available():
            torch.cuda.set_device(_device())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


def _device() -> str:
    """Where this rank computes."""
    import torch

    from titan_train.rank_device import device_index

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{device_index(int(os.environ.get('LOCAL_RANK', '0')), torch.cuda.device_count())}"


def _continue(arguments: argparse.Namespace, run: "LoadedRun", sampling: "Sampling", *, shown: bool) -> None:
    from titan_train.generation import encode_chat, encode_prompt

    texts = [prompt for prompt in arguments.prompt for _ in range(arguments.samples)]
    if arguments.image:
        if arguments.chat or arguments.compile or arguments.draft:
            raise ValueError("--image goes with none of --chat, --compile and --draft. Leave these out.")
        from titan_train.tasks.vision.show import images_shown

        with images_shown(run, arguments.image, texts) as prompts:
            _write(arguments, run, sampling, texts, prompts, shown=shown)
        return
    if arguments.chat:
        prompts = [encode_chat(run, [{"role": "user", "content": text}]) for text in texts]
    else:
        prompts = [encode_prompt(run, text) for text in texts]
    _write(arguments, run, sampling, texts, prompts, shown=shown)


def _write(
    arguments: argparse.Namespace,
    run: "LoadedRun",
    sampling: "Sampling",
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    *,
    shown: bool,
) -> None:
    from titan_train.generation import DraftCount, stream_text

    count = DraftCount() if arguments.draft else None
    pieces = stream_text(
        run,
        prompts,
        chat=arguments.chat,
        max_new_tokens=arguments.max_new_tokens,
        sampling=sampling,
        seeds=range(arguments.seed, arguments.seed + len(prompts)),
        stop=arguments.stop,
        compiled=arguments.compile,
        draft=count,
    )
    if shown:
        _print([""] * len(texts) if arguments.chat else texts, pieces)
        if count is not None:
            print(count.text(), file=sys.stderr)
    else:
        for _ in pieces:
            pass


def _print(prompts: Sequence[str], pieces: "Iterator[TextPiece]") -> None:
    """The first row as it comes, the others when they are complete."""
    rows = list(prompts)
    print(rows[0], end="", flush=True)
    for piece in pieces:
        rows[piece.row] += piece.text
        if piece.row == 0:
            print(piece.text, end="", flush=True)
    print("".join(f"\n{'-' * 40}\n{text}" for text in rows[1:]))


def _exported(arguments: argparse.Namespace) -> int:
    """Continue the prompts with an exported folder."""
    if arguments.temperature != 0:
        raise ValueError(
            "an exported folder takes the most likely token: pass --temperature 0, or name a run's folder."
        )
    from titan_train.export.load import continue_text, load_exported, refuse_options_of_runs

    options = {
        "--chat": arguments.chat,
        "--image": arguments.image,
        "--stop": arguments.stop,
        "--compile": arguments.compile,
        "--draft": arguments.draft,
        "--samples": arguments.samples > 1,
        "--repetition-penalty": arguments.repetition_penalty != 1,
        "--step": arguments.step is not None,
        "--code": arguments.code,
    }
    refuse_options_of_runs(arguments.run_dir, options)
    exported = load_exported(arguments.run_dir, trust_code=arguments.trust_code)
    texts = [continue_text(exported, arguments.run_dir, text, arguments.max_new_tokens) for text in arguments.prompt]
    print(f"\n{'-' * 40}\n".join(prompt + text for prompt, text in zip(arguments.prompt, texts, strict=True)))
    return 0
