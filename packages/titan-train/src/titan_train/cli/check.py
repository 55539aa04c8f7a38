"""Validate a configuration without training: layout, parameters, memory and communication.

`titan-train check llama3_405b --parallel "pp8 dp8 tp8"` takes seconds on a laptop: nothing is allocated and no rank is started.
The number of devices follows from the degrees and `launch.nproc`, or is `--devices N`.

`--rehearse` runs a micro-batch of each pipeline rank on fake tensors and counts its memory instead of computing it, and shows
the transfers of a step by axis: `titan-train check llama3_8b --rehearse --devices 512 --train.global-batch 512`.

`--hardware NAME` predicts the speed and memory on a machine, by term: `titan-train check llama3_70b --hardware h100 --devices 512
--train.global-batch 1024 --svg speed.svg`. Exit code 2 if the run does not fit.
"""

import argparse
import copy
import dataclasses
import gc
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titan_train.cli.branch import add_start_options, read_start, written_out
from titan_train.cli.parser import CommandParser, integer
from titan_train.config import Config, list_configs, load_config
from titan_train.config.published import split_start
from titan_train.launch.rank.info import count_gpus

if TYPE_CHECKING:
    from titan_pipeline import Schedule
    from torch import nn

    from titan_train.parallel.layout.batch import BatchPlan
    from titan_train.parallel.layout.run import RunPlan
    from titan_train.planner.memory.closed import RankEstimate
    from titan_train.planner.setup import Setup


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = (
        "titan-train check CONFIG [--devices N] [--rehearse | --hardware NAME | --coordinates] [--section.key V]"
    )
    parser.add_config()
    parser.add_code()
    parser.add_argument(
        "--devices", type=integer(1, 10**7), metavar="N", help="ranks of the run (default: as many as the degrees need)"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="count memory on fake tensors, and show the transfers of a step"
    )
    parser.add_argument(
        "--hardware", metavar="NAME", help="predict speed and memory on a shipped machine, or one of doctor --bench"
    )
    parser.add_argument("--constants", metavar="FILE", help="with --hardware: constants of titan-train plan calibrate")
    parser.add_argument(
        "--coordinates",
        action="store_true",
        help="train narrow models of this family for some steps: do activations move as far at any width (muP)?",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="with --hardware or --coordinates: write the picture here"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="with --hardware: write the predicted timeline of all ranks for ui.perfetto.dev",
    )
    parser.add_argument(
        "--memory-timeline",
        type=Path,
        metavar="STEM",
        help="with --rehearse: write the memory of a step over time as STEM.svg, and as STEM.pickle for torch's memory viewer",
    )
    parser.add_argument(
        "--paper", action="store_true", help="leave out data, tokenizer and model.init where they are not here yet"
    )
    add_start_options(parser)
    arguments, settings = parser.parse_with_settings(words, written_out)
    config, note = read_start(parser, arguments, settings)
    nodes = config.launch.nnodes
    config, devices = _on_devices(config, arguments.devices)
    if arguments.devices is None and nodes != config.launch.nnodes:
        wide = f"{devices} ranks are {config.launch.nnodes} machines; to run them, add --launch.nnodes {config.launch.nnodes}"
        note = f"{note}; {wide}" if note else wide
    if arguments.memory_timeline and not arguments.memory_timeline.parent.is_dir():
        raise ValueError(
            f"--memory-timeline {str(arguments.memory_timeline)!r}: there is no folder "
            f"{str(arguments.memory_timeline.parent)!r}. Create it first."
        )
    if arguments.hardware is not None:
        for option in ("rehearse", "coordinates", "memory_timeline"):
            if getattr(arguments, option):
                raise ValueError(
                    f"--{option.replace('_', '-')} and --hardware are two commands: one builds the program, the other predicts "
                    "it without. Give one of them."
                )
        return _predict(arguments, config, devices)
    if arguments.constants is not None or arguments.trace or (arguments.svg is not None and not arguments.coordinates):
        raise ValueError(
            "--constants, --trace and --svg go with --hardware, such as --hardware h100. Add it, or leave them out."
        )
    if arguments.memory_timeline and not arguments.rehearse:
        raise ValueError("--memory-timeline goes with --rehearse, which runs the program. Add it, or leave it out.")
    if arguments.coordinates:
        return _coordinates(arguments, config)
    # Importing torch makes a million objects that stay, and this command is over before garbage could matter.
    gc.disable()
    try:
        return _check(arguments, config, devices, note)
    finally:
        gc.enable()


def _on_devices(config: Config, devices: int | None) -> tuple[Config, int]:
    """The configuration with as many machines as the devices fill, and the number of devices."""
    gpus = 0 if config.launch.device == "cpu" else count_gpus()
    per_node = config.launch.nproc or gpus or 8
    if devices is not None:
        nodes = max(1, devices // per_node)
    else:
        if config.launch.device == "cpu":  # as `ranks_per_node`
            per_node = config.launch.nproc or math.ceil(config.parallel.num_ranks / config.launch.nnodes)
        nodes = max(config.launch.nnodes, math.ceil(config.parallel.num_ranks / per_node))
        one_node = config.launch.nproc or max(gpus, config.parallel.num_ranks)
        devices = nodes * per_node if nodes > 1 else one_node
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, nnodes=nodes)), devices


def _predict(arguments: argparse.Namespace, config: Config, devices: int) -> int:
    """Time by term, memory by use, tokens per second with an interval. No torch: under a second."""
    from titan_train.models.hf.folder import PREFIX
    from titan_train.planner.calibrate.defaults import constants_for
    from titan_train.planner.cost.constants import load_constants
    from titan_train.planner.documents import described
    from titan_train.planner.estimate import estimate
    from titan_train.planner.hardware.machine import load_machine
    from titan_train.planner.search.refuse import refuse_setup
    from titan_train.planner.translate import not_predicted
    from titan_train.planner.view.svg import estimate_svg
    from titan_train.planner.view.tables import estimate_text

    machine = load_machine(arguments.hardware)
    shape, setup, work = described(config, devices)
    if config.model.name.startswith(PREFIX):
        from titan_train.planner.memory.folder import of_folder

        shape = of_folder(shape, config.model.name, config.model.args)
    constants = (
        load_constants(arguments.constants) if arguments.constants else constants_for(machine, setup, routed=shape.moe)
    )
    found = estimate(shape, machine, setup, constants)
    print(estimate_text(found))
    for number, line in enumerate(not_predicted(config)):
        print(f"\nnote      {line}" if number == 0 else f"          {line}")
    if work:
        print(f"\n{textwrap.indent(work.describe(), ' ' * 10).replace(' ' * 10, 'documents ', 1)}")
        other = setup.changed(attention_share=work.attention_share(dynamic=True))
        faster = estimate(shape, machine, other, constants).tokens_per_s
        if faster > 1.02 * found.tokens_per_s:
            print(f"          and {faster:,.0f} tokens/s/device, if no transfer took longer")
    if arguments.svg:
        arguments.svg.write_text(estimate_svg(found))
        print(f"\npicture: {arguments.svg}")
    if arguments.trace:
        from titan_train.planner.view.trace import step_trace

        arguments.trace.write_text(step_trace(found))
        print(f"\ntrace: {arguments.trace} (open it in ui.perfetto.dev)")
    if found.memory.allocated > machine.memory_bytes:
        print(f"\n{setup.describe()} {refuse_setup(shape, setup, found.memory, machine.memory_bytes)}")
        return 2
    return 0


def _coordinates(arguments: argparse.Namespace, config: Config) -> int:
    """The coordinate check; 2 if activations do not move as far at every width."""
    from titan_train.train.coordinates import check_coordinates, coordinates_svg, coordinates_text

    found = check_coordinates(config)
    print(f"{config.model.name}, model.parametrization={config.model.parametrization!r}, {config.optimizer.name}")
    print(coordinates_text(found, config.model.parametrization))
    if arguments.svg:
        arguments.svg.write_text(coordinates_svg(found))
        print(f"\npicture: {arguments.svg}")
    return 0 if found.flat else 2


def _check(arguments: argparse.Namespace, config: Config, devices: int, note: str) -> int:
    from titan_train.launch.validate import check_start, decided_by_arguments
    from titan_train.run_folder import run_folder, with_kept_model
    from titan_train.task import load_task
    from titan_train.trust import admit_own_code

    admit_own_code(run_folder(config), config.model.name, arguments.code)
    plan = check_start(config, devices)
    print(plan.layout.explain())
    print()
    print(_batch_line(config, plan.batch))
    if note:
        print(f"note     {note}")

    config = with_kept_model(config, run_folder(config))
    task = load_task(config)
    absent: list[str] = []
    try:
        task.check_inputs(config)
    except ValueError as err:
        if not arguments.paper and not _names_shipped_data(config):
            raise
        absent.append(str(err))
    if arguments.paper and config.model.init and not split_start(config.model.init.removeprefix("hf:"))[0].is_dir():
        absent.append(f"model.init={config.model.init!r} is not here.")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, init="", init_changes=()))
    if decided_by_arguments(config, plan) and not arguments.rehearse:
        found = _by_arguments(config, plan)
    else:
        found = _by_module(config, plan, devices, closed_form=not arguments.rehearse)
    print(f"model    {config.model.name}: {found.parameters:,} parameters")
    step = found.flops_per_token * config.train.global_batch * config.model.seq_len
    print(f"compute  {found.flops_per_token / 1e9:,.3f} GFLOP per token, {_si(step)}FLOP per step")
    for line in found.lines:
        print(line)
    ranks = found.ranks
    print(_memory_table(ranks))
    if ranks[0].left_out:
        print(f"\nleft out: {ranks[0].left_out}")
    if arguments.rehearse:
        print(f"\n{_transfers(config, devices, task.vocab_size(config), found)}")
    if arguments.memory_timeline:
        from titan_train.planner.memory.timeline import step_timeline
        from titan_train.planner.view.timeline import timeline_snapshot, timeline_svg

        assert found.model is not None  # a rehearsal builds it
        timeline, stem = step_timeline(config, plan, found.model, ranks), arguments.memory_timeline
        Path(f"{stem}.svg").write_text(timeline_svg(timeline))
        Path(f"{stem}.pickle").write_bytes(timeline_snapshot(timeline))
        print(f"\npicture: {stem}.svg\nsnapshot: {stem}.pickle (drop it on docs.pytorch.org/memory_viz)")
    if absent:
        print("\nthe configuration is valid on paper. What is not here yet, and `run` would refuse:")
        print("\n".join(f"  {reason}" for reason in absent))
    else:
        print("\nthe configuration is valid")
    return 0


class _Found(NamedTuple):
    """What is shown of the model."""

    parameters: int
    flops_per_token: float
    lines: Sequence[str]
    """On its groups of parameters, float8, pipeline and wrapper."""
    ranks: "Sequence[RankEstimate]"
    held: int | None = None
    """Layers of the first pipeline rank; None without a pipeline."""
    model: "nn.Module | None" = None
    """The whole model; None where arguments decide."""


def _by_arguments(config: Config, plan: "RunPlan") -> _Found:
    """Without a module, and without torch."""
    from titan_train.launch.validate import validate_arguments
    from titan_train.planner.memory.closed import whole_rank

    shape = validate_arguments(config)
    flops = shape.flops_per_token(config.model.seq_len, causal=False, norms=True)
    return _Found(shape.parameters(), flops, (), [whole_rank(config, shape, rows=plan.batch.microbatch)])


def _by_module(config: Config, plan: "RunPlan", devices: int, *, closed_form: bool) -> _Found:
    """On the model, built without memory."""
    import titan_fsdp as fsdp

    from titan_train.launch.validate import validate
    from titan_train.models import count_parameters, flops_per_token
    from titan_train.parallel.data_parallel import fsdp_policy
    from titan_train.parallel.layout.batch import tokens_at_once
    from titan_train.parallel.layout.degrees import wrapped_over
    from titan_train.parallel.stages import stage_layers
    from titan_train.parallel.tied import meaning_all_copies
    from titan_train.planner.memory.folder import shape_of_folder
    from titan_train.planner.memory.ranks import estimate_ranks

    layout, mode, batch, schedule = plan.layout, plan.mode, plan.batch, plan.schedule
    model = validate(config, devices)
    config = meaning_all_copies(config, model)
    lines: list[str] = []
    if config.model.parametrization != "standard":
        lines.append(_group_lines(config, model))
    if config.float8.recipe != "none":
        lines.append(_float8_lines(config, model, tokens_at_once(batch, config, layout)))
    if config.parallel.keep_fp32 and config.train.dtype != "fp32":
        lines.append("note     parallel.keep_fp32: what these modules save for backward is counted in bf16, half of it")
    held = None
    if schedule is not None:
        layers = stage_layers(config, model, schedule)
        held = sum(len(layers[stage]) for stage in schedule.stages_of(0))
        lines.append(_pipeline_lines(layers, schedule))
    ranks = estimate_ranks(
        config, model, layout=layout, mode=mode, batch=batch, schedule=schedule, closed_form=closed_form,
        folder=shape_of_folder(config),
    )  # fmt: skip
    if mode != "none" and layout.spec.tp * layout.spec.pp * layout.spec.ep == 1:
        lines.append(f"\n{fsdp.plan(model, wrapped_over(layout, mode), fsdp_policy(config, mode, model)).explain()}")
    return _Found(count_parameters(model), flops_per_token(model, config.model.seq_len), lines, ranks, held, model)


def _si(value: float) -> str:
    """Three digits and an SI prefix: ``22.0 E``."""
    prefix = min(6, max(0, int(math.log10(max(value, 1.0)) // 3)))
    return f"{value / 1000**prefix:,.3g} {' kMGTPE'[prefix].strip()}"


def _group_lines(config: Config, model: "nn.Module") -> str:
    """The learning rate and weight decay of each group of parameters."""
    from titan_train.optim import plan_groups

    lines: list[str] = []
    for group in plan_groups(model, config.optimizer):
        count = sum(parameter.numel() for parameter in group.parameters)
        first, *others = group.fqns
        more = f" and {len(others)} more" if others else ""
        scale = group.lr_scale * (config.optimizer.muon.lr_scale if group.kind == "muon" else 1.0)
        lines.append(
            f"lr {config.optimizer.lr * scale:.3g} (x {scale:.4g}), weight decay {group.weight_decay:.3g}: "
            f"{count:,} in {first}{more}"
        )
    return "groups   " + "\n         ".join(lines)


def _names_shipped_data(config: Config) -> bool:
    """Whether the data is a shipped configuration's, which its reader has yet to bring; so it is in what `plan` writes."""

    def inputs(c: Config) -> tuple[object, ...]:
        return c.data, c.tokenizer, c.diffusion.path

    return any(inputs(config) == inputs(load_config(name)) for name in list_configs())


def _transfers(config: Config, devices: int, vocabulary: int | None, found: _Found) -> str:
    """What the first rank sends in a step, by axis; a test compares it with counted transfers."""
    from titan_train.planner.cost.traffic import step_traffic
    from titan_train.planner.shapes import shape_of_config
    from titan_train.planner.translate import setup_of_config

    setup, shape = setup_of_config(config, devices), None
    try:
        shape = shape_of_config(config, vocab_size=vocabulary)
    except ValueError as why:
        if setup.tp * setup.cp * setup.ep * setup.pp > 1:
            return f"transfers of a step: not computed. {why}"
    if unknown := _transfers_not_known(config, setup):
        return f"transfers of a step: not computed with {unknown}."
    element_bytes = 4 if config.train.dtype == "fp32" else 2
    traffic = step_traffic(shape, setup, found.ranks[0].wrapper, element_bytes=element_bytes, held=found.held)
    lines = [f"{'transfers of a step, first rank':<34}{'count':>8}{'GB':>10}"]
    for (axis, kind), count in sorted(traffic.counts.items()):
        lines.append(f"  {axis:<14}{kind:<18}{count:>8,}{traffic.num_bytes[axis, kind] / 1e9:>10.3f}")
    return "\n".join(lines)


def _transfers_not_known(config: Config, setup: "Setup") -> str:
    """A setting whose transfers `step_traffic` does not count; empty where there is none."""
    parallel, checkpoint = config.parallel, config.activations.checkpoint
    settings = {
        f"parallel.compress={parallel.compress!r}": setup.sharding == "ddp" and parallel.compress != "none",
        "parallel.sequence_parallel=false": setup.tp > 1 and not parallel.sequence_parallel,
        f"float8.recipe={config.float8.recipe!r}, whose weights are gathered in float8": setup.float8,
        f"pipeline.schedule={setup.schedule!r}": setup.pp > 1
        and (setup.stages_per_rank > 1 or setup.head_on_first_rank),
        f"activations.checkpoint={checkpoint!r}": setup.tp * setup.cp * setup.ep > 1
        and checkpoint in ("pattern", "budget"),
        "context.dynamic=true": config.context.dynamic,
        "the method 'usp' of context parallelism": setup.ulysses_degree > 0,
    }
    return next((words for words, given in settings.items() if given), "")


def _float8_lines(config: Config, model: "nn.Module", tokens: int) -> str:
    """Which linears would compute in float8, one line a kind, and how much faster each is predicted to be."""
    from titan_train.parallel.float8 import conversion_table, convert_to_float8, describe_conversion

    converted = copy.deepcopy(model)
    report = convert_to_float8(converted, config.float8, tokens=tokens, eager=not config.compile.enabled)
    line = describe_conversion([report], config.float8, [converted], staged=False)
    return f"float8   {line}\n{textwrap.indent(conversion_table(report), ' ' * 7)}"


def _pipeline_lines(layers: Sequence[range], schedule: "Schedule") -> str:
    """The schedule, what its ranks hold, and how much of a step they wait."""
    from titan_pipeline import simulate

    held = "; ".join(
        f"rank {rank}: " + " and ".join(f"{layers[s].start}-{layers[s].stop - 1}" for s in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    )
    played = simulate(schedule)
    return (
        f"pipeline {schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks, "
        f"{schedule.num_microbatches} micro-batches; bubble {played.makespan_bubble:.1%} of a step with equal stages "
        f"({played.stage_bubble:.1%} without waiting for the optimizer step)\nlayers   {held}"
    )


def _memory_table(ranks: "Sequence[RankEstimate]") -> str:
    """One column per pipeline rank; one column if all are equal. The rows add up to the peak."""
    from titan_train.planner.memory.peak import PARTS

    different = {(r.num_parameters, r.activations, r.peak): r for r in ranks}
    shown = ranks if len(different) > 1 else ranks[:1]
    head = "".join(f"{'pp ' + str(r.pipeline_rank):>10}" for r in shown) if len(shown) > 1 else ""
    lines = [f"\nmemory per rank, GiB:{head:>12}"]
    used = "".join(f"{r.num_parameters / 1e9:10.3f}" for r in shown)
    for name, meaning in PARTS.items():
        sizes = [r.memory.parts.get(name, 0.0) / 2**30 for r in shown]
        if any(sizes):
            lines.append(f"  {name:<18}" + "".join(f"{size:10.2f}" for size in sizes) + f"  {meaning}")
    fullest = max(ranks, key=lambda r: r.peak)
    lines.append(f"  {'peak':<18}" + "".join(f"{r.peak / 2**30:10.2f}" for r in shown) + f"  {fullest.memory.instant}")
    lines.append(f"  {'billions':<18}{used}  parameters used in compute")
    return "\n".join([*lines, "", _where_it_fits(fullest.peak)])


def _where_it_fits(peak: int) -> str:
    from titan_train.planner.hardware.machine import list_machines, load_machine

    machines = [load_machine(name) for name in list_machines() if name != "cpu"]
    fits = [m.name for m in machines if peak <= m.memory_bytes]
    if len(fits) == len(machines):
        return "fits     every shipped machine"
    return f"fits     {', '.join(fits) or 'no shipped machine'}; --hardware NAME predicts the speed and refuses what does not fit"


def _batch_line(config: Config, batch: "BatchPlan") -> str:
    tokens = batch.global_batch * config.model.seq_len
    ramp = batch.ramp
    smaller = ", ".join(map(str, ramp.sizes[:-1]))
    rises = f" (after {smaller}, until {config.train.ramp_tokens:,} tokens)" if smaller else ""
    return (
        f"batch    {batch.global_batch} sequences{rises} x {config.model.seq_len} = {tokens:,} tokens per step: "
        f"{batch.dp_size} data-parallel ranks x {batch.accumulation} micro-batches x {batch.microbatch}; "
        f"{ramp.consumed_after(config.train.steps) * config.model.seq_len:,} tokens in {config.train.steps} steps"
    )
