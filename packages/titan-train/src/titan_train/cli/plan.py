"""Plan a run: search all layouts of a model on a number of devices, show the ten best and why the others lose.

`titan-train plan llama3_70b --devices 256 --hardware h100 --seq-len 8192 --global-batch 512 --out plan` writes the best
setup as a configuration (plan.toml), the memory-speed picture (plan.svg) and a page with sliders (plan.html).
`--explain 1 3` compares two of the list term by term. The first three are built as they will run, on fake tensors, before they
are shown: one that does not fit leaves the list. `--rehearse 0` leaves that out; in bf16 it answers without torch.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from titan_train.cli.parser import integer, number

if TYPE_CHECKING:
    from titan_train.config import Config
    from titan_train.planner.estimate import StepEstimate
    from titan_train.planner.search.search import Ranking
    from titan_train.planner.search.space import PlanRequest
    from titan_train.planner.setup import Setup, States

_RESERVE = 5
"""Setups for each that is to be rehearsed: one that does not fit, or that a run refuses, makes room for the next."""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command. Exit code 2 where nothing fits."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a model (titan-train list), a configuration or its file, hf:DIR, or one that only the "
        "planner knows (kimi_k2, ...)",
    )
    parser.add_argument("--devices", type=integer(1, 10**7), required=True, metavar="N", help="ranks of the run")
    parser.add_argument("--hardware", default="h100", help="shipped machine, or a file of doctor --bench")
    parser.add_argument("--seq-len", type=integer(1), help="tokens in a sequence; default the configuration's, or 8192")
    parser.add_argument("--global-batch", type=integer(1), required=True, help="sequences in one optimizer step")
    parser.add_argument(
        "--precision", action="append", help="bf16, tensorwise, rowwise, blockwise, mxfp8; may be repeated"
    )
    parser.add_argument(
        "--states", action="append", choices=("fp32", "bf16", "int8"), help="of AdamW's means; may be repeated"
    )
    parser.add_argument(
        "--stack", default="compile", choices=("compile", "eager", "te", "te_graphs", "te_full"), help="software"
    )
    parser.add_argument("--constants", help="file of titan-train plan calibrate, instead of the shipped constants")
    parser.add_argument("--fix", action="append", default=[], metavar="AXIS=N", help="such as tp=8; may be repeated")
    parser.add_argument(
        "--max-mem", type=number(0), default=0.0, help="GiB that may be allocated; default 92 %% of the device"
    )
    parser.add_argument("--top", type=integer(1, 10**4), default=10, help="setups to show")
    parser.add_argument(
        "--explain", nargs=2, type=integer(1), metavar=("A", "B"), help="compare two of the list term by term"
    )
    parser.add_argument(
        "--rehearse",
        type=integer(0, 10**4),
        default=3,
        metavar="N",
        help="build the first N as they will run, on fake tensors, before they are shown (default 3; 0 only searches)",
    )
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.toml, STEM.svg and STEM.html")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the first's predicted timeline of all ranks for ui.perfetto.dev",
    )
    parser.add_argument(
        "--web",
        action="store_true",
        help="serve the page on loopback: its sliders take every value (titan-train[serve])",
    )
    parser.add_argument("--port", type=integer(0, 65535), default=0, help="port of --web; 0 takes a free one")
    arguments = parser.parse_args(words)
    gc.disable()  # torch and the estimates are a million objects that stay, and this command is over before garbage matters
    try:
        return _plan(arguments)
    finally:
        gc.enable()


def _plan(arguments: argparse.Namespace) -> int:
    from titan_train.models.hf.folder import PREFIX
    from titan_train.models.registry import list_models
    from titan_train.planner.search.refuse import refuse_search
    from titan_train.planner.search.search import search
    from titan_train.planner.translate import config_toml
    from titan_train.planner.view.page import Plan, build_plan_app, page
    from titan_train.planner.view.svg import front_svg
    from titan_train.planner.view.tables import comparison_text, ranking_text

    if arguments.out and not arguments.out.parent.is_dir():
        raise ValueError(
            f"--out {str(arguments.out)!r}: there is no folder {str(arguments.out.parent)!r}. Create it first."
        )
    request = build_request(arguments)
    shown = max(arguments.top, *(arguments.explain or (1,)))
    ranking = search(request, shown + _RESERVE * arguments.rehearse)
    if not ranking.best:
        print(refuse_search(request, ranking.closest))
        return 2
    if arguments.explain:
        _chosen(ranking, shown, *arguments.explain)
    base = configuration_of(arguments.model)
    te = arguments.stack.startswith("te")  # another program's
    trained = not te and bool(base or request.shape.name in list_models() or request.shape.name.startswith(PREFIX))
    nproc, notes = min(request.machine.domain, 8), list[str]()
    if arguments.rehearse and trained:
        notes = rehearse_first(
            ranking,
            arguments.rehearse,
            partial(config_toml, request.shape.name, nproc=nproc, base=base),
            own_tokenizer=bool(base),
        )
        if not ranking.best:
            print("\n".join(notes))
            return 2
    del ranking.best[shown:]
    if arguments.explain:
        print(comparison_text(*_chosen(ranking, shown, *arguments.explain)))
    else:
        print("\n".join([ranking_text(ranking), *(["", *notes] if notes else [])]))
    plan = Plan(ranking.best[0], request.limit_bytes, request.constants, request.uncut)
    if arguments.out:
        svg = Path(f"{arguments.out}.svg")
        svg.write_text(front_svg(ranking))
        html = Path(f"{arguments.out}.html")
        html.write_text(page(plan))
        print(f"\npicture: {svg}\npage with sliders, set to the first: {html}")
        if trained:
            toml = Path(f"{arguments.out}.toml")
            toml.write_text(config_toml(request.shape.name, ranking.best[0].setup, nproc=nproc, base=base))
            print(f"configuration: {toml}; check it with titan-train check {toml}")
        else:
            why = (
                f"the trainer has no --stack {arguments.stack}"
                if te
                else f"{request.shape.name} is not a shipped model"
            )
            print(f"no configuration: {why}")
    if arguments.trace:
        from titan_train.planner.view.trace import step_trace

        arguments.trace.write_text(step_trace(plan.best))
        print(f"\ntrace: {arguments.trace} (open it in ui.perfetto.dev)")
    if arguments.web:
        from titan_train.serve.loopback import serve_on_loopback

        gc.enable()
        serve_on_loopback("--web", arguments.port, lambda: (build_plan_app(plan), request.shape.name))
    return 0


def _chosen(ranking: "Ranking", shown: int, *numbers: int) -> "list[StepEstimate]":
    count = min(shown, len(ranking.best))
    if not 1 <= min(numbers) <= max(numbers) <= count:
        words = " ".join(map(str, numbers))
        raise ValueError(f"--explain {words}: the list has {count} setups; give two numbers of it.")
    return [ranking.best[number - 1] for number in numbers]


def rehearse_first(
    ranking: "Ranking", count: int, written: "Callable[[Setup], str]", *, own_tokenizer: bool
) -> list[str]:
    """Rehearse the first setups of a ranking; one that a run refuses, or has no memory for, leaves the list.

    Args:
        ranking: The outcome of the search.
        count: Setups.
        written: The configuration of a setup, as text.
        own_tokenizer: Its tokenizer is the model's, not one that is to be replaced.

    Returns:
        Lines on it, a reason to refuse once.
    """
    from titan_train.config import load_config
    from titan_train.planner.memory.folder import shape_of_folder
    from titan_train.planner.memory.ranks import rehearse
    from titan_train.planner.shapes import vocabulary_of
    from titan_train.terminal import clean_console

    lines, counted = list[str](), dict[str, tuple[int, str]]()
    refused: dict[str, list[str]] = {}
    limit, number = ranking.request.limit_bytes, 0

    def leave_out(setup: "Setup") -> None:
        for listed in (ranking.best, ranking.front, *ranking.kinds.values()):
            listed[:] = [other for other in listed if other.setup != setup]

    shown = clean_console(sys.stderr).status("")
    with tempfile.TemporaryDirectory() as folder, shown:
        file = Path(folder) / "plan.toml"
        while number < min(count, len(ranking.best)):
            e = ranking.best[number]
            shown.update(f"rehearsing {number + 1} of {min(count, len(ranking.best))}: {e.setup.describe()}")
            file.write_text(written(e.setup))
            try:
                config = load_config(str(file))
                vocab_size = vocabulary_of(config) if own_tokenizer else None
                ranks = rehearse(config, e.setup.world_size, counted, shape_of_folder(config), vocab_size)
            except ValueError as err:
                refused.setdefault(str(err), []).append(e.setup.describe())
                leave_out(e.setup)
                continue
            found = max(ranks, key=lambda rank: rank.peak)
            sizes = f"{found.peak / 2**30:.1f} GiB, planned {e.memory.allocated_gib:.1f}"
            if found.peak > limit:
                leave_out(e.setup)
                lines.append(f"left out: {e.setup.describe()} does not fit as rehearsed: {sizes}")
                continue
            number += 1
            lines.append(f"rehearsed {number}: {sizes}" + (f"; without {found.left_out}" if found.left_out else ""))
    for why, (first, *others) in refused.items():
        more = f" and {len(others)} more" if others else ""
        lines.append(f"left out: {first}{more}, which a run refuses: {why}")
    return lines


def configuration_of(model: str) -> str:
    """The shipped configuration, or the file, that MODEL names; empty where it is a model's own name."""
    from titan_train.config import list_configs
    from titan_train.models.registry import list_models

    if model.endswith(".toml"):
        return str(Path(model).resolve())
    return model if model in list_configs() and model not in list_models() else ""


def formats_of_states(
    arguments: argparse.Namespace, config: "Config | None"
) -> "tuple[tuple[States, ...], tuple[float, float]]":
    """The formats of AdamW's means to search, the list's first, and bytes of state for each parameter in that one."""
    from titan_train.config.optimizer import ADAMW_STATE_BYTES, OptimizerConfig

    optimizer = OptimizerConfig() if config is None else config.optimizer
    adamw = optimizer.name == "adamw" and not arguments.stack.startswith("te")
    if arguments.states and not adamw:
        raise ValueError(
            "--states: formats are those of adamw on torch. Use optimizer.name='adamw' and --stack compile."
        )
    adapters = config is not None and config.model.lora_rank > 0  # their states are small in any format
    smaller = adamw and optimizer.states == "fp32" and not adapters
    default = ("fp32", "bf16", "int8") if smaller else (optimizer.states,)
    states = tuple(arguments.states or default)
    more = ADAMW_STATE_BYTES[states[0]] - ADAMW_STATE_BYTES[optimizer.states]
    blocks, ends = optimizer.state_bytes if config is None else config.state_bytes
    return states, (blocks + more, ends + more)


def build_request(arguments: argparse.Namespace) -> "PlanRequest":
    """The search that the words ask for."""
    from titan_train.config import list_configs, load_config
    from titan_train.models.hf.folder import PREFIX
    from titan_train.planner.cost.constants import load_constants
    from titan_train.planner.hardware.machine import load_machine
    from titan_train.planner.search.space import PlanRequest
    from titan_train.planner.setup import Precision
    from titan_train.planner.shapes import find_shape, shape_of_config, uncut_axes, vocabulary_of

    machine = load_machine(arguments.hardware)
    fixed: dict[str, int] = {}
    for word in arguments.fix:
        axis, _, number = word.partition("=")
        if not (number.isdecimal() and number.isascii() and int(number[:9]) > 0):
            raise ValueError(f"--fix {word!r} must be AXIS=N, such as tp=8.")
        fixed[axis] = int(number)
    config = None
    if base := configuration_of(arguments.model):
        config = load_config(base)
    elif arguments.model in list_configs():
        config = load_config(arguments.model)
    name = config.model.name if config is not None else arguments.model
    uncut = uncut_axes(name)
    for axis in uncut:
        if fixed.get(axis, 1) > 1:
            raise ValueError(
                f"--fix {axis}={fixed[axis]}: a plan cannot cut {name} over {axis}"
                + (", which it counts with sequence parallelism. " if axis == "tp" else ". ")
                + f"Leave {axis} out; titan-train check CONFIG --parallel.{axis}={fixed[axis]} says what a run takes."
            )
    for precision in arguments.precision or ():
        if precision not in get_args(Precision):
            raise ValueError(f"--precision {precision!r} is unknown. Use one of {', '.join(get_args(Precision))}.")
        if precision in ("delayed", "nvfp4") and not arguments.stack.startswith("te"):
            raise ValueError(
                f"--precision {precision} is a recipe of TransformerEngine, which the trainer lacks. Use --stack te, or one of "
                "bf16, fp32, tensorwise, rowwise, blockwise, mxfp8."
            )
    default = ["bf16", "tensorwise"] if machine.fp8 and arguments.stack == "compile" else ["bf16"]
    shape = (
        shape_of_config(config, vocab_size=vocabulary_of(config))
        if base and config is not None
        else find_shape(arguments.model)
    )
    if name.startswith(PREFIX):
        from titan_train.planner.memory.folder import of_folder

        shape = of_folder(shape, name, config.model.args if config is not None else {})
    states, state_bytes = formats_of_states(arguments, config)
    return PlanRequest(
        shape=shape,
        machine=machine,
        gpus=arguments.devices,
        seq_len=arguments.seq_len or (config.model.seq_len if config is not None else 8192),
        global_batch=arguments.global_batch,
        stack=arguments.stack,
        precisions=cast(tuple[Precision, ...], tuple(arguments.precision or default)),
        states=states,
        fixed=fixed,
        uncut=uncut,
        max_memory_gib=arguments.max_mem,
        state_bytes=state_bytes,
        constants=load_constants(arguments.constants) if arguments.constants else None,
        **({} if config is None else _not_searched(config)),
    )


def _not_searched(config: "Config") -> "dict[str, Any]":
    """What a plan leaves as a configuration has it."""
    return {
        "weight_bytes": config.optimizer.weight_bytes,
        "grad_bytes": 4 if config.parallel.reduce_dtype == "fp32" else 2,
        "min_speedup": config.float8.min_speedup,
        "task": "lora" if config.model.lora_rank else "pretrain",
    }


def calibrate(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Measure this machine's operators, or fit the planner's constants to your own runs of one machine.

    `titan-train plan calibrate --device --out my.toml` times matrix products, attention, casts and the collectives of this
    machine's ranks by shape, and writes a hardware file: `check --hardware my.toml` interpolates in it and says which terms it
    covers. `titan-train plan calibrate runs/a runs/b runs/c --hardware my.toml --out constants.toml` fits constants, then
    `titan-train check CONFIG --hardware my.toml --constants constants.toml`. With three runs or more, each is also predicted
    from the others.
    """
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders, of one machine and one stack")
    parser.add_argument("--device", action="store_true", help="measure this machine's operators by shape, without runs")
    parser.add_argument("--hardware", default="cpu", help="shipped machine, or a hardware file")
    parser.add_argument(
        "--out", type=Path, help="file to write; default constants.toml, or hardware.toml with --device"
    )
    arguments = parser.parse_args(words)
    if arguments.device == bool(arguments.runs):
        raise ValueError(
            "plan calibrate takes run folders to fit constants to, or --device to measure this machine's operators. Give one of "
            "them."
        )
    out = arguments.out or Path("hardware.toml" if arguments.device else "constants.toml")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}. Create it first.")
    if arguments.device:
        return _measure(out)

    import statistics

    from titan_train.planner.calibrate.runs import RUN_CONSTANTS, calibrate, held_out, read_run
    from titan_train.planner.cost.constants import save_constants
    from titan_train.planner.hardware.machine import load_machine

    machine = load_machine(arguments.hardware)
    rows = [read_run(folder, machine) for folder in arguments.runs]
    found = calibrate(rows)
    blind = held_out(rows) if len(rows) > 2 else [None] * len(rows)
    print(f"{'predicted / measured':>44} {'prior':>8} {'fitted':>8} {'from the others':>16}")
    for row, before, after, other in zip(rows, found.before, found.after, blind, strict=True):
        last = f"{other:16.2f}" if other is not None else f"{'':16}"
        print(f"{Path(row.source).name:<20} {row.setup.describe()[:40]:<40} {before:8.2f} {after:8.2f} {last}")
    print("constants " + ", ".join(f"{name} {getattr(found.constants, name):.4g}" for name in RUN_CONSTANTS))
    for name, ratios in (("prior", found.before), ("fitted", found.after), ("from the others", blind)):
        wrong = [abs(ratio - 1) for ratio in ratios if ratio is not None]
        if wrong:
            print(f"wrong by, {name:<16} median {statistics.median(wrong):6.1%}, worst {max(wrong):6.1%}")
    save_constants(found.constants, out)
    print(f"written to {out}")
    return 0


def _measure(out: Path) -> int:
    """Tables of this machine's operators, in a hardware file."""
    from titan_train.planner.hardware.links import measure_links
    from titan_train.planner.hardware.measure import this_device, write_machine

    links = [speed for speed in measure_links() if speed.device == this_device()]
    tables = write_machine(out, links=links, by_shape=True)["tables"]
    for kind, group in tables.items():
        for name, table in group.items() if isinstance(group, dict) else ():
            sizes = " x ".join(f"{axis[0]:,} to {axis[-1]:,}" for axis in table["axes"])
            low, high = (1e6 * pick(table["seconds"]) for pick in (min, max))
            print(f"{kind + ' ' + name:<28}{len(table['seconds']):>4} shapes, {sizes}: {low:,.0f} to {high:,.0f} us")
    print(f"written to {out}; predict with titan-train check CONFIG --hardware {out}")
    return 0
