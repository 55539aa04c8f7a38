"""Validate a configuration without training: layout, parameters, memory and communication.

Nothing is allocated and no rank is started (the model is built on the meta device), so a 405B configuration is
checked on a laptop in seconds: `titan-train check llama3_405b --parallel "pp8 dp8 tp8"`. The number of nodes follows
from the degrees and `launch.nproc`.
"""

import copy
import dataclasses
import gc
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_pipeline import Schedule, simulate

from titan_train.cli.shell.parser import CommandParser
from titan_train.cli.start import check_start
from titan_train.config import Config, list_configs
from titan_train.launch.rank.info import count_gpus
from titan_train.parallel.layout.batch import BatchPlan, tokens_at_once
from titan_train.parallel.layout.run import fit_warmup
from titan_train.run_folder import run_folder
from titan_train.trust import admit_own_code

if TYPE_CHECKING:
    from torch import nn

    from titan_train.planner.memory.ranks import RankEstimate

_MEMORY = {
    "params": "sharded parameters, float32",
    "grads": "sharded gradients",
    "optimizer": "optimizer state",
    "gathered": "largest set of parameters gathered at once",
    "activations": "activations of all micro-batches in flight",
    "working": "backward of one block: what it recomputes, its widest gradients",
    "peak": "peak over the step",
}


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    # Importing torch makes a million objects that stay, and this command is over before garbage could matter.
    gc.disable()
    try:
        return _check(parser, words)
    finally:
        gc.enable()


def _check(parser: CommandParser, words: Sequence[str]) -> int:
    parser.usage = "titan-train check CONFIG [--section.key value ...]"
    parser.add_config()
    arguments, settings = parser.parse_with_settings(words)
    config, note = fit_warmup(parser.read_config(arguments.config, settings))
    admit_own_code(run_folder(config), config.model.name, arguments.code)
    per_node = config.launch.nproc or count_gpus() or 8
    nodes = max(config.launch.nnodes, math.ceil(config.parallel.num_ranks / per_node))
    world_size = (
        nodes * per_node if nodes > 1 or config.launch.nproc else max(count_gpus() or 1, config.parallel.num_ranks)
    )
    config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, nnodes=nodes))
    plan = check_start(config, world_size)
    layout, mode, batch, schedule = plan.layout, plan.mode, plan.batch, plan.schedule
    print(layout.explain())
    print()
    print(_batch_line(config, batch))
    if note:
        print(f"note     {note}")

    import titan_fsdp as fsdp

    from titan_train.models import build_model, count_parameters, flops_per_token
    from titan_train.optim import plan_groups
    from titan_train.optim.schedule import check_schedule
    from titan_train.parallel.check import check_model
    from titan_train.parallel.data_parallel import fsdp_policy
    from titan_train.parallel.layout.degrees import wrapped_over
    from titan_train.parallel.structure import freeze
    from titan_train.parallel.tied import meaning_all_copies
    from titan_train.planner.memory.ranks import estimate_ranks
    from titan_train.run_folder import with_kept_model
    from titan_train.task import load_task

    config = with_kept_model(config, run_folder(config))
    task = load_task(config)
    if arguments.config not in list_configs():  # a shipped one names data that its reader has yet to bring
        task.check_inputs(config)
    model = build_model(config.model, vocab_size=task.vocab_size(config), device="meta")
    check_schedule(config.schedule, config.train.steps)
    freeze(model, config.train.freeze)
    plan_groups(model, config.optimizer)
    check_model(config, layout, batch, model)
    config = meaning_all_copies(config, model)
    if config.model.init:
        _check_published(config, model)
    print(f"model    {config.model.name}: {count_parameters(model):,} parameters")
    flops = flops_per_token(model, config.model.seq_len)
    print(
        f"compute  {flops / 1e9:,.3f} GFLOP per token, "
        f"{flops * config.train.global_batch * config.model.seq_len / 1e12:,.1f} TFLOP per step"
    )
    if config.float8.recipe != "none":
        print(_float8_lines(config, model, tokens_at_once(batch, config, layout)))
    if schedule is not None:
        print(_pipeline_lines(config, model, schedule))
    ranks = estimate_ranks(config, model, layout=layout, mode=mode, batch=batch, schedule=schedule)
    if mode != "none" and layout.spec.tp * layout.spec.pp * layout.spec.ep == 1:
        print(f"\n{fsdp.plan(model, wrapped_over(layout, mode), fsdp_policy(config, mode)).explain()}")
    print(_memory_table(ranks))
    print("\nthe configuration is valid")
    return 0


def _check_published(config: Config, model: "nn.Module") -> None:
    """Compare the model and the tokenizer with the folder that the weights come from."""
    from titan_train.train.published_tokenizer import check_tokenizer
    from titan_train.train.warm_start import check_init

    check_init(config.model.init, model, config.model)
    check_tokenizer(config)


def _float8_lines(config: Config, model: "nn.Module", tokens: int) -> str:
    """Which linears would compute in float8, one line a kind, and how much faster each is predicted to be."""
    from titan_train.parallel.float8 import conversion_table, convert_to_float8, describe_conversion

    converted = copy.deepcopy(model)
    report = convert_to_float8(converted, config.float8, tokens=tokens, eager=not config.compile.enabled)
    line = describe_conversion([report], config.float8, [converted], staged=False)
    return f"float8   {line}\n{textwrap.indent(conversion_table(report), ' ' * 7)}"


def _pipeline_lines(config: Config, model: "nn.Module", schedule: Schedule) -> str:
    """The schedule, what its ranks hold, and how much of a step they wait."""
    from titan_train.parallel.stages import stage_layers

    layers = stage_layers(config, model, schedule)
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
    """One column per pipeline rank; one column if all are equal."""
    different = {(r.num_parameters, r.activations): r for r in ranks}
    shown = ranks if len(different) > 1 else ranks[:1]
    head = "".join(f"{'pp ' + str(r.pipeline_rank):>10}" for r in shown) if len(shown) > 1 else ""
    lines = [f"\nmemory per rank, GiB:{head}"]
    lines.append(
        f"  {'parameters':<12}"
        + "".join(f"{r.num_parameters / 1e9:10.3f}" for r in shown)
        + "  billions used in compute"
    )
    for name, meaning in _MEMORY.items():
        lines.append(f"  {name:<12}" + "".join(f"{getattr(r, name) / 2**30:10.2f}" for r in shown) + f"  {meaning}")
    return "\n".join(lines)


def _batch_line(config: Config, batch: BatchPlan) -> str:
    tokens = batch.global_batch * config.model.seq_len
    return (
        f"batch    {batch.global_batch} sequences x {config.model.seq_len} = {tokens:,} tokens per step: "
        f"{batch.dp_size} data-parallel ranks x {batch.accumulation} micro-batches x {batch.microbatch}; "
        f"{tokens * config.train.steps:,} tokens in {config.train.steps} steps"
    )
