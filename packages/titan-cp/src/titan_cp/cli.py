"""The command line: ``python -m titan_cp explain`` prints a plan's numbers and draws who computes what."""

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from titan_cp import backends
from titan_cp.planning.checks import METHODS
from titan_cp.planning.draw import draw_plan
from titan_cp.planning.layouts import LAYOUTS
from titan_cp.planning.plan import AttentionPlan, plan
from titan_cp.planning.steps import plan_step
from titan_cp.state.costs import STATE_KINDS, explain_state

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 for a plan that cannot work."""
    options = _parser().parse_args(arguments)
    try:
        if options.dp is not None:
            print(_explain_step(options))
            return 0
        if options.heads is None:
            raise ValueError("--heads is missing: give the query heads (with --kind, the value heads).")
        made = plan(
            options.seq_len,
            cu_seqlens=read_documents(options.docs) if options.docs else None,
            size=options.cp,
            rank=0,
            num_heads=options.heads,
            num_kv_heads=options.kv_heads,
            head_dim=max(options.head_dim, options.value_dim or 0) if options.kind else options.head_dim,
            value_dim=options.value_dim,
            dtype=_DTYPES[options.dtype],
            method="ring" if options.kind else options.method,
            layout="contiguous" if options.kind and options.layout == "auto" else options.layout,
            ulysses_degree=options.ulysses_degree,
            causal=not options.full,
            window=options.window,
            block_size=options.block_size,
            pad=options.pad,
        )
        text = made.explain() if options.kind is None else _explain_state(made, options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    if options.kind is not None:
        return 0
    packed, window = len(made.cu_seqlens) > 2, made.window is not None
    for device in ("cuda", "cpu"):
        chosen = backends.explain(device, made.dtype, head_dim=made.head_dim, packed=packed, window=window).used
        print(f"kernel      {device}: {chosen.name} ({chosen.summary})")
    if options.svg:
        options.svg.write_text(draw_plan(made), encoding="utf-8")
        print(f"drawing     {options.svg}")
    return 0


def _explain_state(made: AttentionPlan, options: argparse.Namespace) -> str:
    for name, value, unset in (("method", options.method, "auto"), ("window", options.window, None),
                               ("ulysses-degree", options.ulysses_degree, None), ("svg", options.svg, None),
                               ("full", options.full, False)):  # fmt: skip
        if value != unset:
            raise ValueError(
                f"--{name} is for attention; a state layer (--kind {options.kind}) has none. Leave it out."
            )
    return explain_state(
        made, options.kind, num_heads=options.heads, num_key_heads=options.kv_heads, key_dim=options.head_dim,
        value_dim=options.value_dim or options.head_dim, convolution=options.convolution, dtype=made.dtype,
    )  # fmt: skip


def _explain_step(options: argparse.Namespace) -> str:
    """Of the documents of a whole step, laid end to end and cut into rows."""
    if options.docs is None or options.seq_len is None:
        raise ValueError(
            "--dp plans the documents of a step. Give their lengths (--docs) and the tokens of a row (--seq-len)."
        )
    given = {"kind": options.kind, "window": options.window, "svg": options.svg}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise ValueError(f"--{wrong[0]} is for one sequence, and --dp plans a step. Leave one of them out.")
    bounds, row = read_documents(options.docs), options.seq_len
    tokens, share = bounds[-1], row * options.dp * options.microbatch
    if row < 1 or share < 1:
        raise ValueError("--seq-len, --dp and --microbatch must be 1 or more.")
    if tokens % share:
        whole = -(-tokens // share) * share
        if not options.pad:
            raise ValueError(
                f"the documents have {tokens} tokens, which are no whole micro-batches of {options.dp * options.microbatch} rows "
                f"of {row}. --pad adds a document of {whole - tokens}."
            )
        bounds.append(whole)
    rows = [[b - a for a, b in pairwise(row_bounds)] for row_bounds in cut_rows(bounds, row)]
    step = plan_step(
        rows, dp=options.dp, cp=options.cp, microbatch=options.microbatch, causal=not options.full,
        token_pairs=options.token_pairs,
    )  # fmt: skip
    return step.explain()


def cut_rows(cu_seqlens: Sequence[int], seq_len: int) -> list[list[int]]:
    """Boundaries of each row of ``seq_len`` tokens, from 0, of documents that lie end to end; documents end with their row."""
    ends = sorted({*cu_seqlens, *range(0, cu_seqlens[-1] + 1, seq_len)})
    places = {end: n for n, end in enumerate(ends)}
    return [
        [end - first for end in ends[places[first] : places[first + seq_len] + 1]]
        for first in range(0, cu_seqlens[-1], seq_len)
    ]


def read_documents(path: Path) -> list[int]:
    """Document boundaries from a text file of document lengths, in tokens, separated by white space or commas.

    Raises:
        ValueError: If the file holds anything but positive whole numbers, or is no file.
    """
    if path.exists() and not path.is_file():  # reading could wait, or go on, for ever
        raise ValueError(f"{path} is a folder, a pipe or a device. Give a text file of document lengths.")
    words = path.read_text(encoding="utf-8").replace(",", " ").split()
    bad = [word for word in words if not (word.isascii() and word.isdigit() and int(word) > 0)]
    if bad or not words:
        raise ValueError(
            f"{path} should hold document lengths in tokens, positive whole numbers separated by white space; it holds "
            f"{bad[:3] if bad else 'nothing'}."
        )
    return [0, *accumulate(int(word) for word in words)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m titan_cp", description=__doc__)
    commands = parser.add_subparsers(required=True)
    explain = commands.add_parser("explain", help="print a plan's numbers, and draw it")
    explain.add_argument("--seq-len", type=int, help="tokens; may be left out with --docs")
    explain.add_argument("--docs", type=Path, metavar="FILE", help="document lengths in tokens, white space between")
    explain.add_argument("--cp", type=int, required=True, help="ranks in the context-parallel group")
    explain.add_argument(
        "--dp", type=int, help="plan a step: --docs over this many times --cp ranks, in rows of --seq-len"
    )
    explain.add_argument("--microbatch", type=int, default=1, help="with --dp: rows that a rank computes at a time")
    explain.add_argument("--token-pairs", type=float, default=0.0, metavar="N",
                         help="with --dp: cost of a token's other layers in query-key pairs, parameters of a layer over "
                         "2 · heads · head dim")  # fmt: skip
    explain.add_argument("--heads", type=int, help="query heads; with --kind, value heads")
    explain.add_argument("--kv-heads", type=int, help="KV heads; with --kind, key heads (default: as many as --heads)")
    explain.add_argument("--head-dim", type=int, default=128, help="channels per head")
    explain.add_argument("--value-dim", type=int, help="channels per value head (default: as --head-dim)")
    explain.add_argument("--kind", choices=list(STATE_KINDS), help="a layer with a state instead of attention")
    explain.add_argument("--convolution", type=int, default=0, help="with --kind: taps of the convolution in front")
    explain.add_argument("--dtype", choices=list(_DTYPES), default="bfloat16")
    explain.add_argument("--method", choices=["auto", *METHODS], default="auto")
    explain.add_argument("--layout", choices=["auto", *LAYOUTS], default="auto")
    explain.add_argument("--ulysses-degree", type=int, help="for --method usp")
    explain.add_argument("--full", action="store_true", help="no causal mask")
    explain.add_argument("--window", type=int, help="sliding window in tokens")
    explain.add_argument("--block-size", type=int, default=128, help="tokens per block, for --layout block")
    explain.add_argument("--pad", action="store_true", help="pad to the next legal length")
    explain.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing here")
    return parser
